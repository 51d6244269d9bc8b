"""Eight channels of a query or a key at a time: taken, rotated or expanded, rounded once and put (optional package)."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from flash_attn.cute import utils

from phasewise.kernels.ahead import VECTOR
from phasewise.kernels.tiles import LOG2E

# ln(1 + x) / x for x in [0, 1], as `prepare.log1p` has it for half precision
LOG1P = (-0.0238691252, 0.101222217, -0.210048631, 0.325206667, -0.499361366, 0.999991596)


@cute.jit
def softplus(x: Float32) -> Float32:
    """ln(1 + e^x), as `prepare.magnitude` has it for half precision."""
    small = cute.math.exp2(utils.fmax(x, -x) * -LOG2E.value, fastmath=True)
    series = Float32(LOG1P[0])
    for coefficient in LOG1P[1:]:
        series = series * small + coefficient
    return series * small + utils.fmax(x, Float32(0.0))


class Vectors:
    """Of a dtype of half precision; preparation: "rope", or how PoPE makes magnitudes."""

    def __init__(self, dtype: Any, preparation: str):
        self.dtype, self.preparation = dtype, preparation

    @cute.jit
    def taken(self, line, column):
        values = cute.make_rmem_tensor(VECTOR, line.element_type)
        cute.autovec_copy(cute.local_tile(line, (VECTOR,), (column,)), values)
        return values

    @cute.jit
    def put(self, line, column, values):
        rounded = cute.make_rmem_tensor(VECTOR, self.dtype)
        utils.cvt_f16(values, rounded)
        cute.autovec_copy(rounded, cute.local_tile(line, (VECTOR,), (column,)))

    @cute.jit
    def turn(self, angle, factor: Any = None, less: Any = None):
        """Cosines and sines of angles less others, times RoPE's factor."""
        cos, sin = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        for c in cutlass.range_constexpr(VECTOR):
            at = angle[c] if const_expr(less is None) else angle[c] - less[c]
            cos[c], sin[c] = cute.math.cos(at, fastmath=True), cute.math.sin(at, fastmath=True)
            if const_expr(factor is not None):
                cos[c], sin[c] = cos[c] * factor, sin[c] * factor
        return cos, sin

    @cute.jit
    def rotated(self, x, y, cos, sin):
        """A pair of vectors turned, in float32."""
        one, other = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        x, y = self.wide(x), self.wide(y)
        for c in cutlass.range_constexpr(VECTOR):
            one[c] = x[c] * cos[c] - y[c] * sin[c]
            other[c] = y[c] * cos[c] + x[c] * sin[c]
        return one, other

    @cute.jit
    def expanded(self, x, cos, sin):
        """The cosine and the sine part of a vector's magnitudes, in float32."""
        one, other = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        x = self.wide(x)
        for c in cutlass.range_constexpr(VECTOR):
            magnitude = self.magnitude(x[c])
            one[c], other[c] = magnitude * cos[c], magnitude * sin[c]
        return one, other

    @cute.jit
    def magnitude(self, x):
        if const_expr(self.preparation == "softplus"):
            x = softplus(x)
        elif const_expr(self.preparation == "relu"):
            x = utils.fmax(x, Float32(0.0))
        return x

    @cute.jit
    def wide(self, x):
        """float32 of half precision; bfloat16 are the upper halves of theirs."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        if const_expr(self.dtype is cutlass.BFloat16):
            pairs, bits = cute.recast_tensor(x, Int32), cute.recast_tensor(values, Int32)
            for c in cutlass.range_constexpr(VECTOR // 2):
                bits[2 * c], bits[2 * c + 1] = pairs[c] << 16, pairs[c] & Int32(-(1 << 16))
        else:
            for c in cutlass.range_constexpr(VECTOR):
                values[c] = Float32(x[c])
        return values

"""PoPE's decoding in half precision: magnitudes and angles of raw keys go from registers to the tensor cores.

Letters: B batch, H query heads, G key heads, T queries, S keys, D the width of q and k, V that of v. As in
decode_forward.py, except that warps meet only over queries: each has 16 keys of a tile, a running maximum and a sum of
its own, and leaves parts of its own to be added up. Tiles are transposed. Scores are [keys, queries], so that keys are
the left operand, of which a thread has 8 channels in a row, as they lie in memory: products do not mind the order of
channels, as long as queries keep the same. Outputs are [channels, queries].

Keys and values are read as pairs of channels in int32: of halves the compiler would make words of their own at the end
of each tile, and wait for the next tile's there.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false
# Kernels annotate compile-time values as gl.constexpr and use them as what they hold.

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from phasewise.kernels.decode_parts import product, tiles_each, turned_back, turns
from phasewise.kernels.hardware import multiprocessors
from phasewise.kernels.prepare import MAGNITUDES, instruction
from phasewise.kernels.tiles import EMPTY, LN2, LOG2E, UNSEEN, ceil_div, launch, power_of_two

await_warps = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.7 renamed it
WIDTHS = (64, 128)
MOST_ROWS = 16  # queries that meet one key head
KEYS = gl.constexpr(16)  # of a warp in a tile: the rows of one product
PIECE = gl.constexpr(32)  # channels: of one load of a thread, and of two products
TURNS = gl.constexpr(4)  # tiles for which queries are turned at once


@gluon.constexpr_function
def warp_bits(warps):
    """Bases of a linear layout that give each warp a matrix of its own."""
    return [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]


@gluon.constexpr_function
def value_layout(warps, width):
    """Of pairs of channels [warps, 16, width / 2]: a thread has 4 in a row of keys 2t, 2t + 1, 2t + 8 and 2t + 9."""
    wide = [[0, 0, 1 << bit] for bit in range(5, (width // 2).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 8, 0], *wide],
        [[0, 2, 0], [0, 4, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        warp_bits(warps),
        [],
        [warps, 16, width // 2],
    )


@gluon.constexpr_function
def output_layout(warps, width, queries):
    """Of outputs [warps, width, queries], channels in order: a thread has 8 in a row of queries 2t and 2t + 1."""
    wide = [[0, 1 << bit, 0] for bit in range(6, width.bit_length() - 1)]
    more = [[0, 0, 1 << bit] for bit in range(3, queries.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 0, 1], *wide, *more],
        [[0, 0, 2], [0, 0, 4], [0, 8, 0], [0, 16, 0], [0, 32, 0]],
        warp_bits(warps),
        [],
        [warps, width, queries],
    )


@gluon.jit
def halves(words, dtype: gl.constexpr):
    """The two numbers in each int32."""
    low = words.to(gl.int16).to(dtype, bitcast=True)
    return low, (words >> 16).to(gl.int16).to(dtype, bitcast=True)


@gluon.jit
def magnitude_over_ln2(x, KIND: gl.constexpr):
    """The magnitude; softplus over ln 2, within 4e-7 and 2^-22 of itself."""
    if KIND == "softplus":
        small = instruction(
            x, "{ .reg .f32 t; abs.f32 t, $1; mul.f32 t, t, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, t; }"
        )
        return gl.maximum(x, 0.0) * LOG2E + instruction(1.0 + small, "lg2.approx.ftz.f32 $0, $1;")
    elif KIND == "relu":
        return gl.maximum(x, 0.0)
    else:
        return x


@gluon.jit
def sizes(words, KIND: gl.constexpr, dtype: gl.constexpr):
    """Magnitudes [warps, keys, PIECE] of the pairs of channels in int32 [warps, keys, PIECE / 2]."""
    if dtype == gl.bfloat16:
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    else:
        low, high = halves(words, dtype)
        low, high = low.to(gl.float32), high.to(gl.float32)
    both = gl.join(magnitude_over_ln2(low, KIND), magnitude_over_ln2(high, KIND)).to(dtype)
    return both.reshape([words.shape[0], words.shape[1], PIECE])


@gluon.jit
def in_pieces(x):
    """[rows, D] as [pieces rows, PIECE]."""
    ROWS: gl.constexpr = x.shape[0]
    COUNT: gl.constexpr = x.shape[1] // PIECE
    return x.reshape([ROWS, COUNT, PIECE]).permute((1, 0, 2)).reshape([COUNT * ROWS, PIECE])


@gluon.jit
def operand(pieces, piece: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr):
    """A piece of queries `in_pieces` in shared memory, as every warp's right operand [warps, PIECE, rows]."""
    x = pieces.slice(ROWS * piece, ROWS).permute((1, 0)).load(gl.SliceLayout(0, layout))
    return gl.expand_dims(x, 0).broadcast_to([WARPS, PIECE, ROWS])


@gluon.jit
def reading(ptr, strides, b, group, first, layout: gl.constexpr, WARPS: gl.constexpr, WORDS: gl.constexpr):
    """Keys [warps, 16, 1] of the tile at `first`, and addresses [warps, 16, WORDS] of their pairs of channels."""
    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    c = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    n = first + w * KEYS + row
    start = ptr + b * strides[0] + group.to(gl.int64) * strides[1]
    words = start.to(gl.pointer_type(gl.int32), bitcast=True)
    return n, words + n.to(gl.int64) * (strides[2] // 2) + c


@gluon.jit
def read_pieces(at, inside, COUNT: gl.constexpr):
    """Pairs of channels of each piece; what is outside stays undefined."""
    read = ()
    for piece in gl.static_range(COUNT):
        read = read + (gl.load(at + PIECE // 2 * piece, inside),)  # noqa: RUF005 (the compiler knows no unpacking)
    return read


@gluon.jit
def load_queries(
    q_ptr, q_strides, phase_ptr, rates, b, group, first, T, S, factor,
    KIND: gl.constexpr, PHASE: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Magnitudes times cosines and sines, as the key at `first` sees them, float32 [ROWS, D]."""
    D: gl.constexpr = rates.shape[0]
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, D, gl.SliceLayout(0, layout))
    real = (m < GROUP * T)[:, None]
    h = group * GROUP + m // T
    t = m % T
    at = q_ptr + b * q_strides[0] + h.to(gl.int64) * q_strides[1] + t.to(gl.int64) * q_strides[2]
    x = gl.load(at[:, None] + c[None, :].to(gl.int64) * q_strides[3], real, other=0.0)
    cos, sin = turns((S - T + t - first)[:, None], rates[None, :], True)
    if PHASE:
        phases = gl.load(phase_ptr + h[:, None] * D + c[None, :], real, other=0.0)
        phase_cos, phase_sin = turns(phases.to(gl.float64), 1.0, True)
        cos, sin = cos * phase_cos + sin * phase_sin, sin * phase_cos - cos * phase_sin
    size = gl.where(real, magnitude_over_ln2(x.to(gl.float32), KIND) * factor, 0.0)
    return size * cos, size * sin


@gluon.jit
def fill_tables(cosines, sines, rate_ptr, dtype: gl.constexpr, WARPS: gl.constexpr):
    """Cosines and sines [pieces, keys, PIECE] of a tile's offsets; each warp's from those of the one before."""
    layout: gl.constexpr = gl.BlockedLayout([KEYS // WARPS, 1], [1, 32], [WARPS, 1], [1, 0])
    n = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    c = gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    COUNT: gl.constexpr = cosines.shape[0]
    for piece in gl.static_range(COUNT):
        rates = gl.load(rate_ptr + PIECE * piece + c)
        cos, sin = turns(n[:, None], rates[None, :], True)
        step_cos, step_sin = turns(KEYS, rates, True)
        for warp in gl.static_range(WARPS):
            cosines.index(piece).slice(KEYS * warp, KEYS).store(cos.to(dtype))
            sines.index(piece).slice(KEYS * warp, KEYS).store(sin.to(dtype))
            sin, cos = turned_back(sin, cos, step_cos, step_sin)


@gluon.jit(do_not_specialize=["rows", "S", "low", "splits"])
def polar_kernel(
    part_ptr, lse_ptr, q_ptr, q_strides, k_ptr, k_strides, v_ptr, v_strides, rate_ptr, phase_ptr,
    rows, H, T, S, low, splits, chunk, factor,
    KIND: gl.constexpr, D: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr, PHASE: gl.constexpr,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp, float32 [splits warps, B H T, V] and [splits warps, B H T], of one split's warps."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK: gl.constexpr = KEYS * WARPS
    PIECES: gl.constexpr = D // PIECE
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    flat: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [WARPS, 1], [1, 0])
    straight: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    split = gl.program_id(0) % splits
    group = gl.program_id(0) // splits % (H // GROUP)
    b = (gl.program_id(0) // splits // (H // GROUP)).to(gl.int64)
    first = low + split * chunk
    last = gl.minimum(first + chunk, S)
    k_n, k_at = reading(k_ptr, k_strides, b, group, first, gl.DotOperandLayout(0, mma, 4), WARPS, PIECE // 2)
    v_n, v_at = reading(v_ptr, v_strides, b, group, first, value_layout(WARPS, V), WARPS, V // 2)
    k = read_pieces(k_at, k_n < last, PIECES)
    v = gl.load(v_at, v_n < last, other=0)

    rates = gl.load(rate_ptr + gl.arange(0, D, gl.SliceLayout(0, flat)))
    x1, x2 = load_queries(
        q_ptr, q_strides, phase_ptr, rates, b, group, first, T, S, factor, KIND, PHASE, GROUP, ROWS, flat
    )
    step_cos, step_sin = turns(BLOCK, rates, True)
    q1 = gl.allocate_shared_memory(dtype, [TURNS, PIECES * ROWS, PIECE], straight)
    q2 = gl.allocate_shared_memory(dtype, [TURNS, PIECES * ROWS, PIECE], straight)
    cosines = gl.allocate_shared_memory(dtype, [PIECES, BLOCK, PIECE], straight)
    sines = gl.allocate_shared_memory(dtype, [PIECES, BLOCK, PIECE], straight)
    fill_tables(cosines, sines, rate_ptr, dtype, WARPS)

    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
    j = first + w * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    m = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    furthest = gl.where(m < GROUP * T, S - T + m % T if CAUSAL else S - 1, -1)
    top = gl.full([WARPS, ROWS], 0.1 * UNSEEN, gl.float32, gl.SliceLayout(1, mma))
    totals = gl.zeros([WARPS, KEYS, ROWS], gl.float32, mma)
    nothing = gl.zeros([WARPS, KEYS, ROWS], gl.float32, mma)
    mixed = gl.zeros([WARPS, V, ROWS], gl.float32, mma)
    for first_n in range(first, last, BLOCK * TURNS):
        for turn in gl.static_range(TURNS):
            q1.index(turn).store(in_pieces(x1.to(dtype)))
            q2.index(turn).store(in_pieces(x2.to(dtype)))
            x1, x2 = turned_back(x1, x2, step_cos, step_sin)
        await_warps()
        for turn in range(gl.minimum(TURNS, gl.cdiv(last - first_n, BLOCK))):
            k_n += BLOCK
            k_at += BLOCK * (k_strides[2] // 2)
            by_cos = nothing
            by_sin = nothing
            for piece in gl.static_range(PIECES):
                size = gl.convert_layout(sizes(k[0], KIND, dtype), left, assert_trivial=True)
                # The next tile's piece takes the registers of this one.
                k = k[1:] + (gl.load(k_at + PIECE // 2 * piece, k_n < last),)  # noqa: RUF005
                cos = cosines.index(piece).reshape([WARPS, KEYS, PIECE]).load(left)
                by_cos = mma_v2(
                    product(size, cos), operand(q1.index(turn), piece, ROWS, WARPS, right), by_cos
                )
                sin = sines.index(piece).reshape([WARPS, KEYS, PIECE]).load(left)
                by_sin = mma_v2(
                    product(size, sin), operand(q2.index(turn), piece, ROWS, WARPS, right), by_sin
                )
            scores = gl.where(j <= furthest, by_cos + by_sin, UNSEEN)
            j += BLOCK
            higher = gl.maximum(top, gl.max(scores, 1))
            weights = gl.exp2(scores - gl.expand_dims(higher, 1))
            fade = gl.expand_dims(gl.exp2(top - higher), 1)
            top = higher
            totals = totals * fade + weights
            p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(1, mma, 2))
            # Channel 64 a + 8 g + 2 i + e stands in row 64 a + 16 i + 8 e + g, where its thread has it.
            channels = gl.join(*halves(v, dtype)).reshape([WARPS, KEYS, V // 64, 8, 4, 2])
            v_rows = channels.permute((0, 2, 4, 5, 3, 1)).reshape([WARPS, V, KEYS])
            v_rows = gl.convert_layout(v_rows, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
            mixed = mma_v2(v_rows, p, mixed * fade)
            v_n += BLOCK
            v_at += BLOCK * (v_strides[2] // 2)
            v = gl.load(v_at, v_n < last, other=0)

    total = gl.sum(totals, 1)
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(1, mma)))[:, None]
    m = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, :]
    at = (split * WARPS + w).to(gl.int64) * rows + (b * H + group * GROUP + m // T) * T + m % T
    gl.store(lse_ptr + at, gl.where(empty, EMPTY, top * LN2 + gl.log(total)), m < GROUP * T)
    whole: gl.constexpr = output_layout(WARPS, V, ROWS)
    out = (mixed / gl.expand_dims(total, 1)).reshape([WARPS, V // 64, 4, 2, 8, ROWS])
    out = out.permute((0, 1, 4, 2, 3, 5)).reshape([WARPS, V, ROWS])
    out = gl.convert_layout(out, whole, assert_trivial=True)
    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, whole)))[:, None, None]
    m = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, whole)))[None, None, :]
    at = (split * WARPS + w).to(gl.int64) * rows + (b * H + group * GROUP + m // T) * T + m % T
    d = gl.arange(0, V, gl.SliceLayout(0, gl.SliceLayout(2, whole)))[None, :, None]
    gl.store(part_ptr + at * V + d, out, m < GROUP * T)


def serves(q: Tensor, k: Tensor, v: Tensor, *, kind: str, placed: bool, window: int | None) -> bool:
    """Whether `parts` computes this decoding."""
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    return (
        kind in MAGNITUDES and q.is_cuda and q.dtype != torch.float32 and not placed
        and q.shape[3] in WIDTHS and v.shape[3] in WIDTHS and rows <= MOST_ROWS
        and (window is None or q.shape[2] == 1) and _in_words(k) and _in_words(v)
    )  # fmt: skip


def _in_words(x: Tensor) -> bool:
    """Whether pairs of channels lie in whole words of 4 bytes."""
    return x.stride(3) == 1 and all(x.stride(axis) % 2 == 0 for axis in range(3)) and x.data_ptr() % 4 == 0


def parts(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, phase: Tensor | None, *, kind: str, factor: float, scale: float,
    causal: bool, low: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Float32 `[parts, B H T, V]` and log-sum-exps `[parts, B H T]` of what `serves` takes, for keys from `low` on."""
    batch, heads, queries, width = q.shape
    groups, keys, v_width = v.shape[1:]
    meta = launch("decode.polar", q, qk=width, v=v_width, length=power_of_two(keys))
    room, block = meta.pop("PROGRAMS") * multiprocessors(q.device), int(KEYS) * meta["num_warps"]
    chunk = tiles_each(ceil_div(keys - low, block), batch * groups, room) * block
    splits = ceil_div(keys - low, chunk)
    rows, count = batch * heads * queries, splits * meta["num_warps"]
    part = torch.empty(count, rows, v_width, dtype=torch.float32, device=q.device)
    lse = torch.empty(count, rows, dtype=torch.float32, device=q.device)
    unit = math.log(2) ** 2 if kind == "softplus" else 1.0
    polar_kernel[(batch * groups * splits,)](
        part, lse, q, q.stride(), k, k.stride(), v, v.stride(), rates, phase,
        rows, heads, queries, keys, low, splits, chunk, factor * scale * math.log2(math.e) * unit,
        KIND=kind, D=width, V=v_width, GROUP=heads // groups, PHASE=phase is not None, CAUSAL=causal,
        ROWS=8 if heads // groups * queries <= 8 else 16, **meta,
    )  # fmt: skip
    return part, lse

"""Numbers of `hopper_forward` rounded to half precision, pairs in an int32: weights to multiply, outputs to store.

The tensor cores leave a thread every fourth pair of a row. Stored as they lie, outputs would be written by half sectors
of memory, so the four threads of a row exchange them first, and each stores 16 bytes.
"""

# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from phasewise.kernels.tapa_joint import unknown_zero


@gluon.jit
def packed(x, dtype: gl.constexpr):
    """Pairs of what is side by side; a loop that hands on weights as halves takes them apart."""
    pairs = x.reshape([x.shape[0], x.shape[1] // 2, 2])
    first, second = pairs.split()
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], gl.int32, True, 1
        )


@gluon.jit
def operand(pairs, dtype: gl.constexpr, out_layout: gl.constexpr):
    """What `packed` made, as the operand of a product."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), True, 1
    )
    p = gl.join(first, second).reshape([pairs.shape[0], 2 * pairs.shape[1]]).to(dtype, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, out_layout, 2))


@gluon.constexpr_function
def side_by_side(pairs):
    """Layout of 64 rows of so many pairs: a thread has four side by side, four threads sixteen."""
    further = [[0, 16 << bit] for bit in range((pairs // 16).bit_length() - 1)]
    registers = [[0, 1], [0, 2], [8, 0], *further]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, pairs])


@gluon.jit
def swapped(x, bit):
    """x with its last index, of two, and this bit of the thread's number in each other's place."""
    first, second = x.split()
    first, second = gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 lane, sent;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, $4;
        setp.ne.b32 p, lane, 0;
        selp.b32 sent, $2, $3, p;
        shfl.sync.bfly.b32 sent, sent, $4, 31, 0xffffffff;
        selp.b32 $0, sent, $2, p;
        selp.b32 $1, $3, sent, p;
        }""",
        "=&r,=&r,r,r,r", [first, second, bit], (gl.int32, gl.int32), False, 1,
    )  # fmt: skip
    return gl.join(first, second)


@gluon.jit
def finish(acc, share, m, head, out_ptr, out_strides, H, T, D: gl.constexpr, dtype: gl.constexpr):
    """Stores the output of queries from m on; acc is of 32 channels or more."""
    ROWS: gl.constexpr = acc.shape[0]
    PAIRS: gl.constexpr = acc.shape[1] // 2
    pairs = packed(acc * share[:, None], dtype).reshape([ROWS, PAIRS // 16, 2, 2, 4])
    pairs = swapped(pairs.permute((0, 1, 2, 4, 3)), 1)
    pairs = swapped(pairs.permute((0, 1, 3, 4, 2)), 2)
    layout: gl.constexpr = side_by_side(PAIRS)
    pairs = gl.convert_layout(pairs.permute((0, 1, 2, 4, 3)).reshape([ROWS, PAIRS]), layout)
    t = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, layout))
    # Addressed here: what the compiler takes out of the loop over tiles it has no registers for.
    out_at = out_ptr + 16 * unknown_zero(m)
    out_at += (head // H).to(gl.int64) * out_strides[0] + (head % H).to(gl.int64) * out_strides[1]
    at = (out_at + t.to(gl.int64) * out_strides[2]).to(gl.pointer_type(gl.int32), bitcast=True)
    gl.store(at[:, None] + c[None, :], pairs, (t < T)[:, None] & (c < D // 2)[None, :])

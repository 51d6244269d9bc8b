"""TAPA attention, forward, on Hopper: TAPA's score and softmax inside flash-attn-4's pipeline (optional package).

Its producer, schedule and epilogue are flash-attn-4's; the warp groups that multiply are ours. For keys and queries at
consecutive places the distance power is a function of row - column alone, so it comes from a table, of which a
thread's part of a tile reads one entry for every diagonal of 8 x 8 blocks.
"""

import math
import operator
from functools import partial

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr, pipeline
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from flash_attn.cute import utils
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.named_barrier import NamedBarrierFwd
from quack import layout_utils, sm90_utils
from quack.compile_utils import make_fake_tensor
from torch import Tensor

from phasewise.kernels import flash
from phasewise.kernels.prepare import expanded_like
from phasewise.kernels.tapa_score import BEFORE, Score, power_table
from phasewise.kernels.tiles import launch

CHANNELS = 16  # that one tensor core instruction sums over
ROWS = 2  # of a tile that a thread holds
GROUP_ROWS = 64  # that a warp group holds
LOWEST = -1e20  # where the maximum of a row starts
LARGE = 256.0  # sum of a thread's weights above which their reference is raised
# cos(x) in x^2 for |x| <= pi, minimax, error 4.1e-5
COSINE = (0.99995977, -0.49979311, 0.04149602, -0.0013392656, 1.8791829e-05)
SHIFT_TO_INTEGER = 1.5 * 2.0**23


def _instruction(ptx: str, constraints: str, *operands: Float32, loc, ip, integer: bool = False):
    return llvm.inline_asm(
        T.i32() if integer else T.f32(), [Float32(x).ir_value(loc=loc, ip=ip) for x in operands], ptx, constraints,
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip


@dsl_user_op
def cosine(x: Float32, *, loc=None, ip=None) -> Float32:
    """cos by the special-function unit, whose reduction costs one rounding of x."""
    return Float32(_instruction("cos.approx.ftz.f32 $0, $1;", "=f,f", x, loc=loc, ip=ip))


@dsl_user_op
def multiply_add(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    return Float32(_instruction("fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", a, b, c, loc=loc, ip=ip))


@dsl_user_op
def at_most(x: Float32, bound: Float32, *, loc=None, ip=None) -> Float32:
    """The smaller of the two; NaN where x is."""
    return Float32(_instruction("min.NaN.ftz.f32 $0, $1, $2;", "=f,f,f", x, bound, loc=loc, ip=ip))


@dsl_user_op
def sign_bit(x: Float32, *, loc=None, ip=None) -> Int32:
    """1 for negative x; for sums of weights a 0 that is known only once they are."""
    ptx = "{.reg .b32 bits; mov.b32 bits, $1; shr.u32 $0, bits, 31;}"
    return Int32(_instruction(ptx, "=r,f", x, loc=loc, ip=ip, integer=True))


@cute.jit
def cosine_by_polynomial(x: Float32) -> Float32:
    """cos on the multiply-add pipe, which takes a part of them: the special-function unit alone would be the bound.

    Within [-1, 1] for every finite x; beyond 2^22 turns, where float32 ends telling halves apart, it is no cosine.
    """
    turns = multiply_add(x, Float32(0.5 / math.pi), Float32(SHIFT_TO_INTEGER)) - Float32(SHIFT_TO_INTEGER)
    x = multiply_add(turns, Float32(-2 * math.pi), x)
    square = at_most(x * x, Float32(math.pi**2))
    result = Float32(COSINE[-1])
    for coefficient in COSINE[-2::-1]:
        result = multiply_add(result, square, Float32(coefficient))
    return result


class TapaForward(FlashAttentionForwardSm90):
    """flash-attn-4's forward whose `mma` makes TAPA's scores; causal, queries the last of the keys.

    share: of how many cosines one goes to the polynomial. turn: part of a tile's columns for which a warp group has
    the special functions to itself, so that the groups do not wait for their products at the same time.
    """

    def __init__(self, dtype, *, amplitude_dim, width, v_width, group, tile_m, tile_n, share, turn):
        super().__init__(
            dtype, width, v_width, group, is_causal=True, pack_gqa=False, tile_m=tile_m, tile_n=tile_n, num_stages=2,
            num_threads=2 * tile_m + 128, has_aux_tensors=True,
        )  # fmt: skip
        self.amplitude_steps = amplitude_dim // CHANNELS
        self.columns = tile_n // 4  # that a thread holds of each of its rows
        self.turn = round(self.columns * turn)
        offsets = [row * share // ROWS for row in range(ROWS)]
        self.by_polynomial = {
            (row, column)
            for row in range(ROWS)
            for column in range(self.columns)
            if column % share == offsets[row]
        }

    @cute.jit
    def mma(
        self, tiled_mma_qk, tiled_mma_pv, mO, mLSE, sQ, sK, sVt, sP, sO, learnable_sink, pipeline_k, pipeline_v,
        pipeline_q, gmem_tiled_copy_O, tma_atom_O, tidx, scale_log2, softmax_scale, block_info,
        SeqlenInfoCls, AttentionMaskCls, TileSchedulerCls, blocksparse_tensors, aux_data, fastdiv_mods,
    ):  # fmt: skip
        """What a warp group does: for each of its tiles of queries, walk over the keys from the diagonal down."""
        thread_mma = tiled_mma_qk.get_slice(tidx)
        group = (
            cute.arch.make_warp_uniform(tidx // self.num_threads_per_warp_group)
            * self.num_threads_per_warp_group
        )
        _, q, k = sm90_utils.partition_fragment_ABC(
            tiled_mma_qk.get_slice(group), (self.tile_m, self.tile_n, self.tile_hdim), sQ, sK
        )
        out, weights, v = sm90_utils.partition_fragment_ABC(
            tiled_mma_pv.get_slice(group), (self.tile_m, self.tile_hdimv, self.tile_n), sP, sVt
        )
        origin = thread_mma.partition_C(cute.make_identity_tensor((self.tile_m, self.tile_n)))[0]
        powers = aux_data.tensors[0]
        top = cute.make_rmem_tensor(ROWS, Float32)
        total = cute.make_rmem_tensor(ROWS, Float32)
        begin = partial(self.begin_scores, tiled_mma_qk, q, k)
        weigh = partial(self.weigh, out, top, total, scale_log2)
        mix = partial(sm90_utils.gemm_w_idx, tiled_mma_pv, out, weights, v, zero_init=False)
        step = partial(
            self.step, begin, weigh, mix, weights, top, total, scale_log2, pipeline_k, pipeline_v, powers
        )

        self.mma_init()
        q_parity = Int32(0)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
        scheduler = TileSchedulerCls()
        work = scheduler.initial_work_tile_info()
        while work.is_valid_tile:
            m, head, batch, _ = work.tile_idx
            lengths = SeqlenInfoCls(batch)
            mask = partial(
                AttentionMaskCls(lengths).apply_mask,
                batch_idx=batch,
                head_idx=head,
                m_block=m,
                thr_mma=thread_mma,
                mask_seqlen=True,
                mask_causal=True,
            )
            first = m * self.tile_m + group // self.num_threads_per_warp_group * GROUP_ROWS
            place = first + lengths.seqlen_k - lengths.seqlen_q
            gap = m * self.tile_m + origin[0] - origin[1] + lengths.seqlen_k - lengths.seqlen_q + BEFORE
            low, high = block_info.get_n_block_min_max(lengths, m)
            # The group walks from the last tile of keys that it sees itself; one without queries does a tile unread.
            masked = cutlass.max(low, place // self.tile_n)
            seen = cutlass.min(high, cute.ceil_div(place + GROUP_ROWS, self.tile_n))
            if first >= lengths.seqlen_q:
                seen = low + 1
            out.fill(0.0)
            top.fill(LOWEST)
            total.fill(0.0)

            pipeline_q.consumer_wait_w_index_phase(0, q_parity)
            for _ in cutlass.range(high - seen, unroll=1):
                state = self.pass_over(state, pipeline_k, pipeline_v)
            high = seen - 1
            strength = self.strengths(powers, gap - high * self.tile_n)
            pipeline_k.consumer_wait(state, pipeline_k.consumer_try_wait(state))
            amplitude, phase = begin(state.index)
            warpgroup.wait_group(0)
            pipeline_k.consumer_release(state)
            self.score(amplitude, phase, strength)
            mask(amplitude, n_block=high)
            weigh(amplitude, phase)
            utils.cvt_f16(layout_utils.reshape_acc_to_frgA(phase), weights)
            for i in cutlass.range(high - masked, unroll=1):
                state = step(state, high - 1 - i, gap, mask)
            high = cutlass.min(high, masked)
            for i in cutlass.range(high - low, unroll=1):
                state = step(state, high - 1 - i, gap, None)
            pipeline_q.consumer_release_w_index(0)
            q_parity ^= 1
            pipeline_v.consumer_wait(state, pipeline_v.consumer_try_wait(state))
            mix(B_idx=state.index, wg_wait=0)
            pipeline_v.consumer_release(state)
            state.advance()

            total.store(utils.warp_reduce(total.load(), operator.add, width=4))
            rows = layout_utils.reshape_acc_to_mn(out)
            for r in cutlass.range_constexpr(ROWS):
                rows[r, None].store(rows[r, None].load() * cute.arch.rcp_approx(total[r]))
                total[r] = (top[r] * scale_log2 + cute.math.log2(total[r], fastmath=True)) * math.log(2.0)
            self.epilogue(
                out,
                total,
                mO,
                mLSE,
                sO,
                lengths,
                gmem_tiled_copy_O,
                tma_atom_O,
                tiled_mma_pv,
                tidx,
                m,
                head,
                batch,
            )
            scheduler.advance_to_next_work()
            work = scheduler.get_current_work()

    @cute.jit
    def step(
        self,
        begin,
        weigh,
        mix,
        weights,
        top,
        total,
        scale_log2,
        pipeline_k,
        pipeline_v,
        powers,
        state,
        n,
        gap,
        mask,
    ):
        """The weights of key tile n, while those of the tile before are multiplied with their values."""
        before = state.clone()
        state.advance()
        strength = self.strengths(powers, gap - n * self.tile_n)
        pipeline_k.consumer_wait(state, pipeline_k.consumer_try_wait(state))
        amplitude, phase = begin(state.index)
        pipeline_v.consumer_wait(before, pipeline_v.consumer_try_wait(before))
        mix(B_idx=before.index, wg_wait=-1)
        self.warp_scheduler_barrier_sync()
        warpgroup.wait_group(1)
        pipeline_k.consumer_release(state)
        added = cute.make_rmem_tensor(ROWS, Float32)
        added.fill(0.0)
        if const_expr(mask is not None):
            self.score(amplitude, phase, strength)
            self.pass_turn(added)
            mask(amplitude, n_block=n)
            warpgroup.wait_group(0)
            pipeline_v.consumer_release(before)
            weigh(amplitude, phase)
            utils.cvt_f16(layout_utils.reshape_acc_to_frgA(phase), weights)
        else:
            # The reference of the exponentials is that of the tile before, so that none waits for a maximum.
            stream = partial(self.score_and_weigh, amplitude, phase, strength, added, top, scale_log2)
            stream(0, self.turn)
            self.pass_turn(added)
            stream(self.turn, self.columns)
            warpgroup.wait_group(0)
            pipeline_v.consumer_release(before)
            utils.cvt_f16(layout_utils.reshape_acc_to_frgA(phase), weights)
            if cute.arch.vote_any_sync(utils.fmax(added[0], added[1]) > LARGE):
                weigh(amplitude, phase)
                utils.cvt_f16(layout_utils.reshape_acc_to_frgA(phase), weights)
                added.fill(0.0)
            for r in cutlass.range_constexpr(ROWS):
                total[r] += added[r]
        return state

    @cute.jit
    def pass_over(self, state, pipeline_k, pipeline_v):
        """Leaves a tile of keys, and the turn that would have come with it, to the other warp groups."""
        for tiles in (pipeline_k, pipeline_v):
            tiles.consumer_wait(state, tiles.consumer_try_wait(state))
            tiles.consumer_release(state)
        state.advance()
        self.warp_scheduler_barrier_sync()
        nothing = cute.make_rmem_tensor(ROWS, Float32)
        nothing.fill(0.0)
        self.pass_turn(nothing)
        return state

    @cute.jit
    def pass_turn(self, sums):
        """The next warp group's turn, once these sums of weights are there."""
        index = utils.canonical_warp_group_idx(sync=False)
        following = index if index < self.num_wg_mma else 0
        cute.arch.barrier_arrive(
            barrier_id=int(NamedBarrierFwd.WarpSchedulerWG1)
            + following
            + sign_bit(sums[0])
            + sign_bit(sums[1]),
            number_of_threads=2 * self.num_threads_per_warp_group,
        )

    @cute.jit
    def begin_scores(self, tiled_mma, q, k, stage):
        """Accumulators of q_A . k_A and q_P . k_P, still being computed."""
        shape = tiled_mma.partition_shape_C((self.tile_m, self.tile_n))
        amplitude = cute.make_rmem_tensor(shape, Float32)
        phase = cute.make_rmem_tensor(shape, Float32)
        warpgroup.fence()
        atom = cute.make_mma_atom(tiled_mma.op)
        for step in cutlass.range_constexpr(cute.size(q.shape[2])):
            into = amplitude if step < self.amplitude_steps else phase
            atom.set(warpgroup.Field.ACCUMULATE, step not in (0, self.amplitude_steps))
            cute.gemm(atom, into, q[None, None, step], k[None, None, step, stage], into)
        warpgroup.commit_group()
        return amplitude, phase

    @cute.jit
    def strengths(self, powers, gap):
        """Factors of the phase for two neighbouring columns of every diagonal of 8 x 8 blocks, the last row's first.

        gap: distance of the thread's first element, plus BEFORE.
        """
        pairs = cute.make_rmem_tensor(self.tile_n // 8 + 1, Int64)
        for diagonal in cutlass.range_constexpr(self.tile_n // 8 + 1):
            pairs[diagonal] = powers[gap + 8 - 8 * diagonal]
        return cute.recast_tensor(pairs, Float32)

    @cute.jit
    def score_at(self, amplitude, phase, strength, row: cutlass.Constexpr, column: cutlass.Constexpr):
        """amplitude cos(strength phase) in the amplitude's place."""
        angle = phase[row, column] * strength[2 * (column // 2 - row + 1) + column % 2]
        if const_expr((row, column) in self.by_polynomial):
            amplitude[row, column] = amplitude[row, column] * cosine_by_polynomial(angle)
        else:
            amplitude[row, column] = amplitude[row, column] * cosine(angle)

    @cute.jit
    def score(self, amplitude, phase, strength):
        """Scores, unscaled, in the amplitudes' place."""
        amplitude, phase = layout_utils.reshape_acc_to_mn(amplitude), layout_utils.reshape_acc_to_mn(phase)
        for column in cutlass.range_constexpr(self.columns):
            for row in cutlass.range_constexpr(ROWS):
                self.score_at(amplitude, phase, strength, row, column)

    @cute.jit
    def score_and_weigh(
        self,
        amplitude,
        phase,
        strength,
        added,
        top,
        scale_log2,
        first: cutlass.Constexpr,
        last: cutlass.Constexpr,
    ):
        """Scores in the amplitudes' place and weights, relative to `top`, in the phases', of columns [first, last)."""
        amplitude, phase = layout_utils.reshape_acc_to_mn(amplitude), layout_utils.reshape_acc_to_mn(phase)
        for column in cutlass.range_constexpr(first, last):
            for row in cutlass.range_constexpr(ROWS):
                self.score_at(amplitude, phase, strength, row, column)
                phase[row, column] = cute.math.exp2(
                    amplitude[row, column] * scale_log2 - top[row] * scale_log2, fastmath=True
                )
                added[row] += phase[row, column]

    @cute.jit
    def weigh(self, out, top, total, scale_log2, scores, weights):
        """Weights of scores relative to their maximum so far; what was summed before fades to the same reference."""
        out, scores, weights = (layout_utils.reshape_acc_to_mn(x) for x in (out, scores, weights))
        for r in cutlass.range_constexpr(ROWS):
            row = scores[r, None].load()
            higher = cute.arch.warp_reduction_max(utils.fmax_reduce(row, top[r]), threads_in_group=4)
            fade = cute.math.exp2((top[r] - higher) * scale_log2, fastmath=True)
            # Subtracted first: of products with the scale, roundings would be left, and overflow where scores are huge.
            weight = cute.math.exp2((row - higher) * scale_log2, fastmath=True)
            total[r] = utils.fadd_reduce(weight, init_val=total[r] * fade)
            top[r] = higher
            weights[r, None].store(weight)
            out[r, None].store(out[r, None].load() * fade)


@flash.kept
def compiled(dtype: torch.dtype, amplitude_dim: int, width: int, v_width: int, group: int, **tiles: float):
    """The kernel for these, for any lengths: (q, k, v, out, lse, scale, ...) as flash-attn-4's."""
    element = flash.ELEMENTS[dtype]
    kernel = TapaForward(
        element, amplitude_dim=amplitude_dim, width=width, v_width=v_width, group=group, **tiles
    )
    batch, queries, keys, heads, key_heads = (cute.sym_int() for _ in range(5))
    fake = partial(make_fake_tensor, element, divisibility=8)
    return flash.compiled(
        kernel, fake((batch, queries, heads, width)), fake((batch, keys, key_heads, width)),
        fake((batch, keys, key_heads, v_width)), fake((batch, queries, heads, v_width)),
        make_fake_tensor(Float32, (batch, heads, queries), divisibility=1), Float32(1.0),
        *(None,) * 9, utils.AuxData([make_fake_tensor(Int64, (cute.sym_int(),), divisibility=1)]), None, None,
    )  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, V]`, stored place by place, and float32 log-sum-exp `[B, H, T]`."""
    batch, heads, queries, width = q.shape
    keys, v_width = v.shape[2:]
    out = expanded_like(q, v_width)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    tiles = launch("tapa.flash.forward", q, qk=width, v=v_width, length=keys)
    kernel = compiled(q.dtype, score.amplitude_dim, width, v_width, heads // k.shape[1], **tiles)
    table = power_table(alpha, score.unit, keys)
    kernel(
        *(flash.copyable(x) for x in (q, k, v)), out.transpose(1, 2), lse, score.scale,
        *(None,) * 9, utils.AuxData([table], None), None, None,
    )  # fmt: skip
    return out, lse

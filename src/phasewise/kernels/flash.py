"""flash-attn-4's kernels for Hopper, without its interface (optional package).

That interface decides anew at every call what follows from dtypes and widths, which costs more of the CPU than a
small model's attention takes on the GPU. Here a kernel is compiled once for these, for any lengths, and then called;
quack's cache of kernels on disk (`QUACK_CACHE_DIR`, `QUACK_CACHE_ENABLED`) serves the next process.
Queries are `[B, H, T, E]`, keys `[B, H / group, S, E]`, values `[B, H / group, S, D]`; the kernels have places before
heads.
"""

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import quack.cache
import torch
from cutlass import Float32, Int32
from flash_attn.cute import interface, utils
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from quack.compile_utils import make_fake_tensor
from torch import Tensor

from phasewise.kernels.flash_persistent import PersistentForward
from phasewise.kernels.hardware import multiprocessors
from phasewise.kernels.prepare import expanded_like
from phasewise.kernels.table import exact
from phasewise.kernels.tiles import EMPTY_LSE, launch

ELEMENTS = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}
NO_AUXILIARY = utils.AuxData(None, None)


class Kind(NamedTuple):
    """What kernels are compiled for."""

    dtype: torch.dtype
    width: int
    v_width: int
    group: int
    causal: bool
    windowed: bool

    @property
    def row_ends(self) -> bool:
        """Whether a query's last key is its own place, by the kernels' plain causal rule."""
        return self.causal and not self.windowed

    @property
    def can_stay(self) -> bool:
        """Whether the forward's programs can stay for many tiles (`flash_persistent`)."""
        return self.row_ends and self.v_width % 16 == 0 and 64 % self.group == 0


def kind_of(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> Kind:
    return Kind(q.dtype, q.shape[3], v.shape[3], q.shape[1] // k.shape[1], causal, window is not None)


def sides_of(causal: bool, window: int | None) -> tuple[int | None, int | None]:
    """How many keys a window shows before and after a query's own."""
    return (None, None) if window is None else (window - 1, 0 if causal else window - 1)


def forward_config(kind: Kind, device: torch.device) -> Any:
    """Tiles of the forward: the launch table's for just these widths, or else flash-attn-4's own."""
    tiles = exact("separable.flash.forward", device, kind.dtype, kind.width, kind.v_width)
    if tiles is None:
        return interface._tile_size_fwd_sm90(kind.width, kind.v_width, kind.row_ends, kind.windowed)
    return interface.FwdConfig(tiles["tile_m"], tiles["tile_n"], mma_pv_is_rs=True, intra_wg_overlap=True)


def compiled(kernel: Any, *arguments: Any) -> Any:
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *arguments, stream, options="--enable-tvm-ffi")


@contextmanager
def quiet() -> Iterator[None]:
    """Compile without what the package's compiler warns of in its own code, for those to whom warnings are errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@functools.cache
def sources() -> str:
    """A digest of the sources of flash-attn-4 and of our kernels; quack adds its own and versions."""
    digest = hashlib.sha256()
    for module in (__file__, interface.__file__):
        for path in sorted(Path(module).parent.glob("*.py")):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def kept(make: Callable[..., Any]) -> Callable[..., Any]:
    """What compiles a kernel, once for its arguments: in a process, and on disk for others while the sources stay."""

    @functools.wraps(make)
    def made(_sources: str, *arguments: Any, **named: Any) -> Any:
        with quiet():
            return make(*arguments, **named)

    on_disk = quack.cache.jit_cache(made)

    @functools.cache
    @functools.wraps(make)
    def found(*arguments: Any, **named: Any) -> Any:
        return on_disk(sources(), *arguments, **named)

    return found


def forward_kernel(
    kind: Kind,
    config: Any,
    form: type[FlashAttentionForwardSm90] = FlashAttentionForwardSm90,
    **settings: Any,
) -> Any:
    """The forward to compile."""
    return form(
        ELEMENTS[kind.dtype], kind.width, kind.v_width, kind.group, is_causal=kind.row_ends, is_local=kind.windowed,
        pack_gqa=kind.group > 1, tile_m=config.m_block_size, tile_n=config.n_block_size, num_stages=2,
        num_threads=384, intra_wg_overlap=config.intra_wg_overlap, mma_pv_is_rs=config.mma_pv_is_rs, **settings,
    )  # fmt: skip


@kept
def compiled_forward(kind: Kind, config: Any, programs: int) -> Any:
    """The forward: (q, k, v, out, lse, scale, ...). programs: those that stay, which takes a counter; 0 for none."""
    q, k, v, out, *_ = interface.make_fake_bwd_tensors(ELEMENTS[kind.dtype], kind.group > 1, False, False)
    lse = make_fake_tensor(Float32, (*(q.shape[i] for i in (0, 2, 1)),))
    sides = (1, 1) if kind.windowed else (None, None)
    kernel, auxiliary = forward_kernel(kind, config), NO_AUXILIARY
    if programs:
        kernel = forward_kernel(kind, config, PersistentForward, programs=programs)
        auxiliary = utils.AuxData([make_fake_tensor(Int32, (1,))], None)
    return compiled(
        kernel, q, k, v, out, lse, Float32(1.0), *(None,) * 5, *sides, None, None, auxiliary, None, None
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, D]`, stored place by place, and log-sum-exp `[B, H, T]`; places are ours, bottom right."""
    rows, heads, queries, _ = q.shape
    out = expanded_like(q, v.shape[3])
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device)
    kind = kind_of(q, k, v, causal, window)
    auxiliary = NO_AUXILIARY
    many = launch("separable.flash.stays", q, qk=kind.width, v=kind.v_width, length=k.shape[2])["queries"]
    stays = kind.can_stay and rows * heads * queries >= many
    if stays:
        auxiliary = utils.AuxData([torch.zeros(1, dtype=torch.int32, device=q.device)], None)
    compiled_forward(kind, forward_config(kind, q.device), multiprocessors(q.device) if stays else 0)(
        copyable(q), copyable(k), copyable(v), out.transpose(1, 2), lse, scale, *(None,) * 5,
        *sides_of(causal, window), None, None, auxiliary, None, None,
    )  # fmt: skip
    sees_nothing = queries > k.shape[2] and (causal or window is not None)
    return out, lse.clamp_min(EMPTY_LSE) if sees_nothing else lse


def copyable(x: Tensor) -> Tensor:
    """x as `[B, T, H, E]`, copied when its strides do not suit the copy engine."""
    x = x.detach().transpose(1, 2)
    wide = 16 // x.element_size()
    regular = (
        x.stride(3) == 1 and all(s > 0 and s % wide == 0 for s in x.stride()[:3]) and x.data_ptr() % 16 == 0
    )
    return x if regular else x.clone(memory_format=torch.contiguous_format)

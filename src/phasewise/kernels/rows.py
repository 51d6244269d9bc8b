"""What a row of the launch table may say: for each kernel the settings that its launcher takes, and nothing else."""

import functools
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from phasewise.problems import first, problems

# What the rows of a choice may name: in `order`, fastest first, or as the `body` of a pass.
BODIES: Mapping[str, tuple[str, ...]] = {
    "separable.forward.body": ("flash", "cudnn", "triton"),
    "separable.flash.backward": ("flash", "stored", "joint", "triton"),
    "separable.triton.forward": ("hopper", "triton"),
    "separable.triton.backward": ("stored", "joint", "triton"),
    "tapa.forward.body": ("flash", "triton"),
    "tapa.backward": ("joint", "passes"),
}

Row = dict[str, Any]
REMEDY = (
    "`git checkout` or a new installation of phasewise restores it, and `phasewise bench attention --tune` measures a "
    "GPU's rows anew"
)
Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Block = Literal[16, 32, 64, 128, 256]  # Triton's tiles
Warps = Literal[1, 2, 4, 8, 16]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _Row(_Strict):
    device: Annotated[str, Field(min_length=1)]
    dtype: Literal["any", "bfloat16", "float16", "float32"]
    qk: Count | None
    v: Count | None
    length: Count | None


def read(path: Path) -> list[Row]:
    """The rows of a launch table, each as its JSON object.

    Raises ValueError for a file that cannot be read or is none, and for a row that no kernel can be launched with.
    """
    try:
        rows = _table().model_validate_json(path.read_bytes()).rows
        named = [row.model_dump(exclude_unset=True) for row in rows]
        _check_together(named)
    except OSError as error:
        raise ValueError(f"the launch table {path} cannot be read ({error.strerror}); {REMEDY}") from error
    except ValidationError as error:
        raise ValueError(f"{path} is no launch table: {_problem(error)}; {REMEDY}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no launch table: {error}; {REMEDY}") from error
    return named


def _check_together(rows: list[Row]) -> None:
    """Raise ValueError for two rows of the same sizes, and where an encoding is left without an order of bodies."""
    known: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(rows, 1):
        served = tuple(row[name] for name in ("kernel", "device", "dtype", "qk", "v", "length"))
        if served in known:
            same = ", ".join(map(str, served))
            raise ValueError(f"rows {known[served]} and {number} serve the same: {same}")
        known[served] = number
    for kernel in (name for name in BODIES if name.endswith(".body")):
        if not any(row["kernel"] == kernel and _serves_all(row) for row in rows):
            raise ValueError(f"no row of {kernel} serves any device, dtype, widths and length")


def _serves_all(row: Row) -> bool:
    return row["device"] == row["dtype"] == "any" and row["qk"] is row["v"] is row["length"] is None


def _problem(error: ValidationError) -> str:
    """The first problem that pydantic found, with the row's number, from 1, and its kernel."""
    match problems(error)[0]:
        case ("rows", int(index), kernel, *names), words:
            return f"row {index + 1} ({kernel}), {'.'.join(map(str, names))}: {words}"
        case ("rows", int(index)), words:
            return f"row {index + 1}: {words}"
    return first(error)


def _rows(*kernels: str, optional: Mapping[str, Any] | None = None, **required: Any) -> type[BaseModel]:
    """The rows of these kernels, by the settings that a launcher must be given and those that it may be."""
    fields = {name: (kind, ...) for name, kind in required.items()}
    fields |= {name: (kind, None) for name, kind in (optional or {}).items()}
    meta = create_model("Meta", __base__=_Strict, **fields)
    return create_model("KernelRow", __base__=_Row, kernel=(Literal[kernels], ...), meta=(meta, ...))


def _choices(kernel: str, bodies: tuple[str, ...]) -> type[BaseModel]:
    if kernel.endswith(".body"):
        return _rows(kernel, order=Annotated[list[Literal[bodies]], Field(min_length=1)])
    return _rows(kernel, body=Literal[bodies])


@functools.cache
def _table() -> Any:
    """What `read` reads, made when it does: an import of the package is not to wait for it."""
    registers = {"maxnreg": Count}
    compiler = {"num_warps": Warps, "num_stages": Count, **registers}
    passes = ("forward", "query_grad", "key_grad")
    families = [
        *(_choices(kernel, bodies) for kernel, bodies in BODIES.items()),
        _rows(
            *(f"{family}.{name}" for family in ("separable", "tapa") for name in passes),
            BLOCK_M=Block, BLOCK_N=Block, optional=compiler,
        ),
        _rows(
            "separable.score_grad",
            BLOCK_M=Block, SIDE=Block, together=Count, optional={"STAGES": Count, **compiler},
        ),
        _rows("separable.products", BLOCK_K=Block, together=Count, optional=compiler),
        _rows("separable.joint", STAGES=Count, AHEAD=bool, optional=registers),
        _rows(
            "separable.hopper.forward",
            BLOCK_N=Block, PARTS=Count, Q_STAGES=Count, K_STAGES=Count, V_STAGES=Count, optional=registers,
        ),
        _rows("separable.flash.forward", tile_m=Count, tile_n=Count),
        _rows(
            "separable.flash.gradient",
            m_block_size=Count, n_block_size=Count, num_stages_Q=Count, num_stages_dO=Count, num_stages_PdS=Count,
            SdP_swapAB=bool, dKV_swapAB=bool, dQ_swapAB=bool, AtomLayoutMSdP=Count, AtomLayoutNdKV=Count,
            AtomLayoutMdQ=Count, optional={"num_wg": Count, "dQ_single_wg": bool},
        ),
        _rows("separable.flash.ahead", "separable.hopper.ahead", programs=Amount, tiles=Count),
        _rows("separable.flash.stays", "tapa.chunks", queries=Amount),
        _rows("tapa.flash.forward", tile_m=Count, tile_n=Count, share=Count, turn=Share),
        _rows(
            "tapa.joint",
            BLOCK_M=Block, BLOCK_N=Block, STAGES=Literal[2], HELPER_REGISTERS=Count, num_warps=Warps, maxnreg=Count,
        ),
        _rows(
            *(f"decode.{name}" for name in ("plain", "rope", "pope", "tapa")),
            BLOCK_N=Block, PROGRAMS=Count, STAGES=Count, optional=compiler,
        ),
        _rows("decode.polar", PROGRAMS=Count, num_warps=Warps, optional=registers),
    ]  # fmt: skip
    row = Annotated[functools.reduce(operator.or_, families), Field(discriminator="kernel")]
    return create_model("Table", __base__=_Strict, rows=(Annotated[list[row], Field(min_length=1)], ...))

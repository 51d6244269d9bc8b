"""Launch configurations measured on this GPU and written into the committed table, `kernels/launch.json`."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phasewise.bench.timing import side_by_side
from phasewise.kernels import table
from phasewise.kernels.table import Row
from phasewise.record import replacing

LENGTH, HEADS, ROWS = 4096, 16, 2
GAIN = 0.02
SIZES: Mapping[str, tuple[int, ...]] = {
    "BLOCK_M": (32, 64, 128),
    "BLOCK_N": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3),
}


@dataclass(frozen=True)
class Subject:
    """A kernel of the launch table at two widths, and a call whose time its configuration decides."""

    kernel: str
    qk: int
    v: int
    run: Callable[[], tuple[Tensor, ...]]


def tune(widths: list[int], *, dtype: torch.dtype = torch.bfloat16, only: str = "") -> list[Row]:
    """Time every configuration of the attention kernels on this GPU; write those that beat the table by 2 %.

    widths: of heads, [D]; PoPE's 2 D comes with each. only: kernels whose name holds this.
    A configuration counts when it compiles, fits, and gives what the present one gives within bf16's rounding.
    Returns the rows written. Raises ValueError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("tuning measures a CUDA device and there is none")
    written = []
    for width in widths:
        for subject in subjects(width, dtype):
            if only in subject.kernel and (row := best(subject, dtype, candidates())) is not None:
                written.append(row)
                write(row)
    return written


def subjects(width: int, dtype: torch.dtype) -> Iterator[Subject]:
    """The kernels whose tiles are free to choose, on drawn causal inputs `[2, 16, 4096, width]`."""
    from phasewise.kernels import body, tapa_backward, tapa_forward
    from phasewise.kernels.tapa_score import Score

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(channels: int) -> Tensor:
        shape = (ROWS, LENGTH, HEADS, channels)
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype).transpose(1, 2)

    v, dout = draw(width), draw(width)
    for wide in (width, 2 * width):
        q, k = draw(wide), draw(wide)
        how = {"scale": width**-0.5, "causal": True, "window": None, "places": None, "slopes": None}

        def forward(q: Tensor = q, k: Tensor = k, how: Mapping = how) -> tuple[Tensor, ...]:
            return body.forward(q, k, v, **how)

        out, lse = forward()

        def backward(
            q: Tensor = q, k: Tensor = k, out: Tensor = out, lse: Tensor = lse, how: Mapping = how
        ) -> tuple[Tensor, ...]:
            into = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
            body.backward(q, k, v, out, lse, dout, None, into, **how)
            return into

        yield Subject("separable.forward", wide, width, forward)
        yield Subject("separable.query_grad", wide, width, backward)
        yield Subject("separable.key_grad", wide, width, backward)
    q, k = draw(width), draw(width)
    alpha = torch.full((), 0.1, device="cuda")
    amplitude = width // 2
    unit = 2 * torch.pi * (width - amplitude) ** -0.5
    score = Score(amplitude, amplitude**-0.5, unit, linear=False, causal=True, window=None)
    out, lse = tapa_forward.forward(q, k, v, alpha, None, score)
    yield Subject("tapa.forward", width, width, lambda: tapa_forward.forward(q, k, v, alpha, None, score))

    def tapa_gradients() -> tuple[Tensor, ...]:
        """With that of alpha, which takes the two passes on every device."""
        return tapa_backward.backward(dout, None, q, k, v, alpha, out, lse, None, score, alpha_grad=True)[:3]

    yield Subject("tapa.query_grad", width, width, tapa_gradients)
    yield Subject("tapa.key_grad", width, width, tapa_gradients)


def candidates() -> Iterator[dict[str, int]]:
    """Every combination of the sizes tried.

    >>> sum(1 for _ in candidates())
    54
    """
    for values in itertools.product(*SIZES.values()):
        yield dict(zip(SIZES, values, strict=True))


def best(subject: Subject, dtype: torch.dtype, metas: Iterable[Mapping[str, int]]) -> Row | None:
    """The row of the fastest of `metas` that gives what the table's does, when it is faster by 2 %."""
    kind = str(dtype).removeprefix("torch.")
    key = {"kernel": subject.kernel, "device": torch.cuda.get_device_name(), "dtype": kind,
           "qk": subject.qk, "v": subject.v, "length": None}  # fmt: skip
    expected = subject.run()
    present = fastest = _milliseconds(subject)
    found: Row | None = None
    refused = 0
    for meta in metas:
        row = {**key, "meta": dict(meta)}
        with _first(table.launch_table()["rows"], row):
            try:
                right = all(_close(*pair) for pair in zip(subject.run(), expected, strict=True))
                took = _milliseconds(subject)
            except Exception as error:  # the compiler has many ways to refuse a configuration
                if "out of memory" in str(error).lower() and "resource" not in str(error).lower():
                    raise
                refused += 1
                continue
        if not right:
            print(f"{subject.kernel} {subject.qk} {subject.v} {meta}: WRONG RESULT, not taken", flush=True)
        elif took < min(fastest, present * (1 - GAIN)):
            fastest, found = took, row
    print(
        f"{subject.kernel} {subject.qk} {subject.v}: {present:.3f} ms in the table, {fastest:.3f} ms "
        f"{'stays' if found is None else found['meta']}; {refused} configurations refused",
        flush=True,
    )
    return found


def _milliseconds(subject: Subject) -> float:
    return side_by_side({subject.kernel: subject.run}, rounds=1, repeats=7)[subject.kernel].median


def _close(mine: Tensor, right: Tensor) -> bool:
    return bool((mine.double() - right.double()).norm() <= 0.01 * right.double().norm())


@contextmanager
def _first(rows: list[Row], row: Row) -> Iterator[None]:
    """Let `row` be the table's first, so that it wins over equals, for as long as the block lasts."""
    rows.insert(0, row)
    table.forget_choices()
    try:
        yield
    finally:
        rows.remove(row)
        table.forget_choices()


def write(row: Row, path: Path = table.PATH) -> None:
    """Put `row` into the launch table in the place of the one for the same kernel, device, dtype and widths."""
    present = json.loads(path.read_text())
    same = ("kernel", "device", "dtype", "qk", "v", "length")
    rows = [other for other in present["rows"] if any(other[name] != row[name] for name in same)] + [row]
    others = {name: value for name, value in present.items() if name != "rows"}
    parts = [f'  "{name}": {_lines(value)}' for name, value in {"rows": rows, **others}.items()]
    with replacing(path) as unfinished:
        unfinished.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    table.launch_table.cache_clear()
    table.forget_choices()


def _lines(rows: list[Row]) -> str:
    return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]"

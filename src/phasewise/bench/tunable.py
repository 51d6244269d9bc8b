"""What `phasewise bench attention --tune` chooses between: rows of the launch table, and calls whose time they decide.

Letters: B rows, H heads, T queries and keys, D the width of heads.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasewise.encodings import TAPA, Encoding, PoPE, RoPE
from phasewise.encodings.base import angles
from phasewise.frequencies import Geometric
from phasewise.kernels import library, tapa
from phasewise.kernels.hardware import name_of
from phasewise.kernels.table import BODIES, launch_table, ranked
from phasewise.positions import Positions
from phasewise.reference import reference

TOKENS, HEADS = 32_768, 16
JUDGED, SEEN = 2, 128  # heads of the first row, and queries of theirs, that are held to the reference
TILED, SMALL, LONG = 4096, 2048, 8192  # lengths for tiles, few queries, and queries of more keys
Meta = Mapping[str, Any]
Tensors = tuple[Tensor, ...]
Grid = Mapping[str, tuple]
STAGES = {"num_stages": (2, 3)}
OF_QUERIES = ({"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8)}, STAGES)
OF_KEYS = ({"BLOCK_M": (32, 64), "BLOCK_N": (64, 128), "num_warps": (4, 8)}, STAGES)
TOGETHER = {"together": (2, 4, 8, 16)}
GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "separable.forward": OF_QUERIES,
    "separable.hopper.forward": ({"BLOCK_N": (64, 128), "PARTS": (2, 3)}, {"K_STAGES": (2, 3)}),
    "separable.query_grad": OF_QUERIES,
    "separable.key_grad": OF_KEYS,
    "separable.score_grad": (TOGETHER,),
    "separable.products": ({"BLOCK_K": (32, 64), "num_warps": (8, 16), "num_stages": (3, 4)}, TOGETHER),
    "tapa.forward": OF_QUERIES,
    "tapa.query_grad": OF_QUERIES,
    "tapa.key_grad": OF_KEYS,
    "tapa.joint": ({"BLOCK_M": (32, 64), "STAGES": (2, 3), "maxnreg": (128, 168)},),
    "tapa.flash.forward": ({"tile_m": (128, 192), "tile_n": (64, 96, 128)}, {"turn": (0.3, 0.5)}),
    "separable.flash.forward": ({"tile_m": (128, 192), "tile_n": (80, 96, 112, 128)},),
    "separable.flash.gradient": (
        {"m_block_size": (64, 80, 96), "n_block_size": (80, 96, 128)},
        {"num_stages_Q": (1, 2), "num_stages_dO": (1, 2)},
    ),
    "separable.hopper.ahead": ({"programs": (0, 8, 12, 16, 24, 32, 44)},),
    "separable.flash.ahead": ({"programs": (0, 24, 32, 44, 60)},),
    "tapa.chunks": ({"queries": (256, 512, 1024, 2048, 4096, 1 << 40)},),
    "separable.flash.stays": ({"queries": (0, 50_000, 100_000, 1 << 40)},),
    **{kernel: ({"body": bodies},) for kernel, bodies in BODIES.items()},
}
"""Values tried of a row's settings: in each round all combinations in the place of the present row's, or of what was
fastest in the round before; what is not named stays as it is."""


class Trial(NamedTuple):
    """A call whose time is measured, and what it gives and has to give for the first heads of the first row."""

    run: Callable[[], object]
    given: Callable[[], Tensors]
    truth: Callable[[], Tensors]

    def error(self) -> float:
        """The greatest relative error of a result."""
        pairs = zip(self.given(), self.truth(), strict=True)
        return max(((x[:1, : y.shape[1]].double() - y).norm() / y.norm()).item() for x, y in pairs)


@dataclass(frozen=True)
class Subject:
    """A family of rows, of one kernel or choice at two widths, and the call that they decide at each length.

    rounds: what is tried in the place of the row's settings, round by round. fixed: rows that have to be in force for
    the call to come to the kernel. stage: what it is decided with, tiles, bodies or orders.
    """

    kernel: str
    qk: int
    v: int
    lengths: tuple[int, ...]
    make: Callable[[int], Trial]
    rounds: tuple[tuple[Meta, ...], ...] = ()
    fixed: Mapping[str, Meta] = field(default_factory=dict)
    stage: str = "tiles"

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.qk} {self.v}"

    @property
    def known(self) -> bool:
        """Whether the table has a row of some GPU for these widths, to begin with."""
        return any(
            row["kernel"] == self.kernel and row["device"] != "cpu" and row["dtype"] in ("bfloat16", "any")
            and self.qk <= (row["qk"] or self.qk) and self.v <= (row["v"] or self.v)
            for row in launch_table()["rows"]
        )  # fmt: skip

    def within(self, part: str) -> bool:
        """Whether a part names this subject's stage, or stands in its kernel's name and widths."""
        return part == self.stage or part in self.name

    def candidates(self, metas: Sequence[Meta], number: int) -> list[Meta]:
        """These, then every other that a round tries in their place; of orders one for each body that may be first."""
        if number >= len(self.rounds):
            return list(metas)
        if "order" in metas[0]:
            order = metas[0]["order"]
            return [{"order": [body, *(x for x in order if x != body)]} for body in order]
        return unique([*metas, *({**meta, **settings} for meta in metas for settings in self.rounds[number])])


@dataclass(frozen=True)
class Case:
    """One encoding's attention at a width and a length: drawn causal inputs, `[B, 16, T, D]`, and both passes.

    queries: T where keys are more.
    """

    kind: str
    width: int
    length: int
    rows: int
    queries: int = 0

    @property
    def first(self) -> int:
        """The place of the first query."""
        return self.length - (self.queries or self.length)

    @cached_property
    def inputs(self) -> Tensors:
        """bf16 q, k, v and a gradient of the output, stored place by place."""
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (self.rows, self.length, HEADS, self.width)
        options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
        q, k, v, dout = (torch.randn(shape, **options).transpose(1, 2) for _ in range(4))
        return q[:, :, self.first :], k, v, dout[:, :, self.first :]

    @cached_property
    def encoding(self) -> Encoding:
        """For JUDGED heads."""
        built: Mapping[str, Callable[[], Encoding]] = {
            "rope": lambda: RoPE(head_dim=self.width),
            "pope": lambda: PoPE(num_heads=JUDGED, head_dim=self.width),
            "tapa": lambda: TAPA(head_dim=self.width, alpha=0.1),
        }
        return built[self.kind]().cuda()

    @cached_property
    def turned(self) -> tuple[Tensor | None, ...]:
        """What the operator turns queries and keys by."""
        polar = self.kind == "pope"
        rates = Geometric(base=10_000.0).rates(self.width // (1 if polar else 2), device="cuda")
        turns = angles(torch.arange(self.length, device="cuda")[None], rates)
        return turns[:, self.first :], turns, torch.zeros(HEADS, self.width, device="cuda") if polar else None

    @property
    def tapa_settings(self) -> tuple[int, float, float, bool, bool, None]:
        parts = self.width // 2
        return parts, parts**-0.5, 2 * torch.pi * parts**-0.5, False, True, None

    def settings(self, body: str) -> tuple[str, float, float, bool, None, str]:
        return "softplus" if self.kind == "pope" else "rope", 1.0, self.width**-0.5, True, None, body

    def forward(self, body: str) -> Tensors:
        """Output, log-sum-exp, and what else the operator saves."""
        q, k, v, _ = self.inputs
        if self.kind == "tapa":
            alpha = torch.full((), 0.1, device="cuda")
            return tapa.tapa(q, k, v, alpha, *(None,) * 4, *self.tapa_settings, body)
        return library.separable(q, k, v, *self.turned, *(None,) * 5, *self.settings(body))

    @cached_property
    def saved(self) -> Tensors:
        """q, k, output and log-sum-exp as the backward takes them."""
        out, lse, *rotated = self.forward("triton")
        return *(rotated if self.kind == "rope" else self.inputs[:2]), out, lse

    def backward(self, body: str, dout: Tensor) -> Tensors:
        """Gradients of q, k and v."""
        v, (q, k, out, lse) = self.inputs[2], self.saved
        if self.kind == "tapa":
            alpha = torch.full((), 0.1, device="cuda")
            given = (dout, None, q, k, v, alpha, out, lse, *(None,) * 4)
            return tapa.tapa_backward(*given, *self.tapa_settings, False)[:3]
        given = (q, k, v, out, lse, dout, None, *self.turned, *(None,) * 5)
        return library.separable_backward(*given, *self.settings(body))[:3]

    @cached_property
    def seen(self) -> Tensor:
        """Queries that are held to the reference, from the first to the last."""
        queries = self.length - self.first
        return torch.linspace(0, queries - 1, min(queries, SEEN), device="cuda").round().long()

    @cached_property
    def seen_dout(self) -> Tensor:
        """The gradient of the output where only these are seen."""
        dout = self.inputs[3]
        return torch.zeros_like(dout).index_copy(2, self.seen, dout[:, :, self.seen])

    @cached_property
    def truth(self) -> Tensors:
        """Output and gradients of q, k and v for JUDGED heads of the first row, as these queries see, in float32."""
        q, k, v, dout = (x[:1, :JUDGED].float() for x in self.inputs)
        seen = q[:, :, self.seen]
        leaves = [x.requires_grad_() for x in (seen, k, v)]
        at = Positions.arange(self.length, device="cuda")
        places = self.first + self.seen
        q_at = Positions(at.index[:, places], at.segment[:, places])
        with torch.enable_grad():
            out, _ = reference(seen, k, v, self.encoding, q_at, at)
            return out.detach(), *torch.autograd.grad(out, leaves, dout[:, :, self.seen])

    def onward(self, body: Callable[[], str]) -> Trial:
        return Trial(
            lambda: self.forward(body()),
            lambda: (self.forward(body())[0][:, :, self.seen],),
            lambda: self.truth[:1],
        )

    def back(self, body: str) -> Trial:
        def given() -> Tensors:
            dq, dk, dv = self.backward(body, self.seen_dout)
            return dq[:, :, self.seen], dk, dv

        return Trial(lambda: self.backward(body, self.inputs[3]), given, lambda: self.truth[1:])


def unique(metas: Sequence[Meta]) -> list[Meta]:
    """Without repeats, in order."""
    return [meta for i, meta in enumerate(metas) if meta not in metas[:i]]


def rounds(kernel: str) -> tuple[tuple[Meta, ...], ...]:
    """What is tried of a kernel's settings.

    >>> rounds("separable.flash.ahead")[0][:2]
    ({'programs': 0}, {'programs': 24})
    """
    return tuple(
        tuple(dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
        for grid in GRIDS.get(kernel, ())
    )


def chains(widths: Sequence[int], lengths: Sequence[int]) -> list[list[list[Subject]]]:
    """For each encoding and width: tiles; then, with those, bodies of a pass; then, with those, the order of auto's."""
    families = [
        Family(kind, width, tuple(sorted(lengths)))
        for width, kind in itertools.product(widths, ("rope", "pope", "tapa"))
    ]
    return [
        [
            [subject for subject in stage if subject.known]
            for stage in (family.tiles(), family.bodies(), family.orders())
        ]
        for family in families
    ]


@dataclass(frozen=True)
class Family:
    """One encoding at one width: all that is chosen for it."""

    kind: str
    width: int
    lengths: tuple[int, ...]

    @property
    def operator(self) -> str:
        return "tapa" if self.kind == "tapa" else "separable"

    def case(self, length: int) -> Case:
        return Case(self.kind, self.width, length, TOKENS // length)

    def onward(self, body: str, length: int) -> Trial:
        return self.case(length).onward(lambda: body)

    def back(self, body: str, length: int) -> Trial:
        return self.case(length).back(body)

    def small(self, length: int) -> Trial:
        """Forward passes of few queries, of one, two and four rows."""
        *fewer, last = (Case(self.kind, self.width, length, rows) for rows in (1, 2, 4))
        trial = last.onward(lambda: "flash")

        def run() -> None:
            for case in fewer:
                case.forward("flash")
            trial.run()

        return Trial(run, trial.given, trial.truth)

    def chunks(self, length: int) -> Trial:
        """Backward passes of few queries and of more, of as many rows as come to as much work, on more keys."""
        numbers = [n for n in (256, 512, 1024, 2048, 4096) if n < length]
        cases = [Case(self.kind, self.width, length, numbers[-1] // n, n) for n in numbers]
        trials = [case.back("triton") for case in cases]

        def run() -> None:
            for trial in trials:
                trial.run()

        return Trial(run, trials[-1].given, trials[-1].truth)

    def tile(self, name: str, make: Callable[[int], Trial], **fixed: str) -> Subject:
        rows = {f"{self.operator}.{choice}": {"body": body} for choice, body in fixed.items()}
        return self.subject(name, (TILED,), make, rows, "tiles")

    def subject(
        self,
        name: str,
        lengths: tuple[int, ...],
        make: Callable[[int], Trial],
        fixed: Mapping[str, Meta] | None = None,
        stage: str = "bodies",
    ) -> Subject:
        kernel = f"{self.operator}.{name}"
        qk = self.width * (2 if self.kind == "pope" else 1)
        return Subject(kernel, qk, self.width, lengths, make, rounds(kernel), fixed or {}, stage)

    def tiles(self) -> Iterator[Subject]:
        onward, back = partial(self.onward, "triton"), partial(self.back, "triton")
        if self.kind == "tapa":
            yield self.tile("forward", onward)
            yield self.tile("flash.forward", partial(self.onward, "flash"))
            for name in ("query_grad", "key_grad"):
                yield self.tile(name, back, backward="passes")
            yield self.tile("joint", back, backward="joint")
            return
        yield self.tile("forward", onward, **{"triton.forward": "triton"})
        yield self.tile("hopper.forward", onward, **{"triton.forward": "hopper"})
        yield self.tile("joint", back, **{"triton.backward": "joint"})
        for name in ("query_grad", "key_grad"):
            yield self.tile(name, back, **{"triton.backward": "triton"})
        if self.kind == "pope":
            for name in ("score_grad", "products"):
                yield self.tile(name, back, **{"triton.backward": "stored"})
            yield self.tile("flash.forward", partial(self.onward, "flash"))
            yield self.tile("flash.gradient", partial(self.back, "flash"), **{"flash.backward": "flash"})

    def bodies(self) -> Iterator[Subject]:
        if self.kind == "tapa":
            yield self.subject("backward", self.lengths, partial(self.back, "triton"))
            yield self.subject("chunks", (LONG,), self.chunks)
            return
        yield self.subject("flash.stays", (SMALL,), self.small)
        yield self.subject("flash.ahead", self.lengths, partial(self.onward, "flash"))
        ours = partial(self.onward, "triton")
        yield self.subject(
            "hopper.ahead", self.lengths, ours, {"separable.triton.forward": {"body": "hopper"}}
        )
        yield self.subject("triton.forward", self.lengths, ours)
        for body in ("flash", "triton"):
            yield self.subject(f"{body}.backward", self.lengths, partial(self.back, body))

    def orders(self) -> Iterator[Subject]:
        """Auto's order, of which the first runs."""

        def make(length: int) -> Trial:
            def first() -> str:
                device, kind = name_of(torch.device("cuda")), torch.bfloat16
                return ranked(order.kernel, device, kind, qk=order.qk, v=order.v, length=length)[0]

            return self.case(length).onward(first)

        order = self.subject("forward.body", self.lengths, make, stage="orders")
        yield order

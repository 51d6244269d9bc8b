"""Is position interpolation's outcome known before it is tried? Small models on tasks of known kernels.

python -m experiments.validate_interpolation run FOLDER [--tiny]  trains, predicts, then measures: 2 minutes of a GPU
python -m experiments.validate_interpolation follow               only trains, fewer, and looks at them meanwhile: a CPU

`run` writes predictions with the hash of their content before anything is measured at another length.
`experiments.validation_tables` reads FOLDER.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.command import parser
from experiments.stacked import NOT_SCORED, Stack, losses, train
from phasewise.data.suite import KINDS, LETTERS, Addition, Suite
from phasewise.encodings import RoPEConfig
from phasewise.frequencies import Geometric, Linear
from phasewise.lens.dependency import dependency
from phasewise.lens.dilation import pair_dilation
from phasewise.lens.prediction import dilation_misfit, predict_interpolation
from phasewise.lens.spectrum import SpectrumMeter
from phasewise.lens.width import Kernel, kernel, measure_width
from phasewise.model import ModelConfig
from phasewise.model.reading import Layer
from phasewise.record import record, replacing

BASE = 10_000.0
SEEDS, BLOCKS, SCALES = (0, 1, 2), (4, 8, 16, 32, 64), (1.5, 2.0, 4.0)
LETTER_KINDS = ("cosine", "window", "lag", "blocks")
MARKS = (100, 200, 300, 400, 600, 800)
FOLLOWED = Path("results/validation/followed.json")
ADDITIONS = (Addition(8, digits=6), Addition(8, digits=6, spacing=2))


@dataclass(frozen=True)
class Budget:
    """How much of everything: on a GPU, or in rehearsal on a CPU."""

    width: int = 64
    steps: int = 6000
    addition_steps: int = 6000
    rows: int = 8
    addition_rows: int = 256
    sample: int = 1 << 20
    served_rows: int = 16
    read_rows: int = 16
    workers: int = 14
    blocks: tuple[int, ...] = BLOCKS
    seeds: tuple[int, ...] = SEEDS


TINY = Budget(32, 100, 20, 1, 8, 1 << 14, 2, 2, 1, (4,), (0, 1))
SMALL = Budget(steps=800, rows=2, served_rows=8, read_rows=2, blocks=(4, 16), seeds=(0,))


@dataclass(frozen=True)
class Shape:
    """A model and how it is trained."""

    width: int
    layers: int
    heads: int
    rows: int
    steps: int


@dataclass(frozen=True)
class Pair:
    """A task as trained, and as served `scale` times as long."""

    trained: Suite
    served: Suite
    scale: float
    change: str

    @property
    def task(self) -> str:
        return _name(self.trained)

    @property
    def name(self) -> str:
        return f"{self.task} x{self.scale:g} {self.change}"


def letter_pairs(blocks: Iterable[int]) -> list[Pair]:
    """Every lag dilates with the length, or every lag stays as it is in a longer row."""
    tasks = [KINDS[kind](block) for kind in LETTER_KINDS for block in blocks]
    return [
        Pair(task, served, scale, change)
        for task in tasks
        for scale in SCALES
        for change, served in (("dilated", task.stretched(scale)), ("fixed", task))
    ]


def addition_pairs() -> list[Pair]:
    """More digits; more padding in the fields; or padding after every token, so that all lags dilate."""
    pairs = []
    for task in ADDITIONS:
        for scale in SCALES:
            changes = {"digits": task.stretched(scale), "padding": task.padded(scale)}
            if (scale * task.spacing).is_integer():
                changes["spaced"] = task.spaced(scale)
            pairs += [Pair(task, served, scale, change) for change, served in changes.items()]
    return pairs


def drawn(task: Suite, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return task.rows(torch.rand(rows, length, task.draws, generator=generator, device=generator.device))


def trained(
    tasks: Sequence[Suite],
    budget: Budget,
    device: torch.device,
    shape: Shape,
    look: Callable[[int, Stack], None] = lambda _done, _stack: None,
) -> Stack:
    """A model for every task and seed, tasks outermost; every place of an addition is learned.

    look: told the steps done and the models after every 50 steps.
    """
    models, rows, steps = [task for task in tasks for _ in budget.seeds], shape.rows, shape.steps
    config = ModelConfig(
        vocab_size=LETTERS,
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        encoding=RoPEConfig(frequencies=Geometric(base=BASE)),
    )
    stack = Stack(config, list(range(len(models)))).to(device)
    generator = torch.Generator(device).manual_seed(0)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        parts = []
        for task in models:
            tokens, targets = drawn(task, count * rows, task.length, generator)
            if isinstance(task, Addition):
                following = F.pad(tokens[:, 1:], (0, 1), value=NOT_SCORED)
                targets = torch.where(targets == NOT_SCORED, following, targets)
            parts.append((tokens.unflatten(0, (count, rows)), targets.unflatten(0, (count, rows))))
        return torch.stack([part[0] for part in parts], 1), torch.stack([part[1] for part in parts], 1)

    started = perf_counter()

    def say(done: int, loss: Tensor) -> None:
        look(done, stack)
        if done % (steps // 8) < 100:
            low, middle, high = loss.quantile(torch.tensor([0.0, 0.5, 1.0], device=device)).tolist()
            print(
                f"{done} of {steps} steps, {perf_counter() - started:.0f} s: {low:.3f} {middle:.3f} {high:.3f}"
            )

    train(
        stack, draw, steps=steps, learning_rate=3e-3, weight_decay=0.1, warmup=steps // 20, block=50, say=say
    )
    return stack.eval()


@torch.no_grad()
def measured(
    stack: Stack, tasks: Sequence[Suite], scale: float, *, length: int, rows: int, interpolated: bool
) -> list[dict[str, float]]:
    """Each model on its task in rows of `length` tokens.

    loss: expected over the best prediction there is, whose own is the floor, so that neither has the noise of
    drawn targets. known: the share of what can be known that the model knows. exact: of rows, wholly right.
    loss_of_all: of every next token.
    """
    device = stack.weights[0].device
    generator = torch.Generator(device).manual_seed(1_000_003)
    frequencies = Linear(base=BASE, factor=scale) if interpolated else None
    parts = [drawn(task, rows, length, generator) for task in tasks]
    best = torch.stack([task.posterior(*part) for task, part in zip(tasks, parts, strict=True)])
    tokens, targets = (torch.stack([part[i] for part in parts]) for i in (0, 1))
    sums: dict[str, Tensor] = dict.fromkeys(
        ("loss", "floor", "exact", "loss_of_all"), torch.zeros(len(tasks), device=device)
    )
    pieces = [part.split(2, 1) for part in (tokens, targets, best)]
    for some, wanted, expected in zip(*pieces, strict=True):
        logits = stack(some, frequencies=frequencies)
        scored = wanted != NOT_SCORED
        count = scored.flatten(1).sum(1)
        following = F.pad(some[..., 1:], (0, 1), value=NOT_SCORED)
        values = {
            "loss": -((expected * logits.log_softmax(-1)).sum(-1) * scored).flatten(1).sum(1) / count,
            "floor": (torch.special.entr(expected).sum(-1) * scored).flatten(1).sum(1) / count,
            "exact": ((logits.argmax(-1) == wanted) | ~scored).all(-1).float().mean(1),
            "loss_of_all": losses(logits, torch.where(scored, wanted, following)),
        }
        sums = {name: sums[name] + value / len(pieces[0]) for name, value in values.items()}
    guess = math.log(10 if isinstance(tasks[0], Addition) else LETTERS)
    sums["known"] = (guess - sums["loss"]) / (guess - sums["floor"])
    return [dict(zip(sums, row, strict=True)) for row in torch.stack(list(sums.values()), 1).tolist()]


@torch.no_grad()
def spectra(stack: Stack, tasks: Sequence[Suite], rows: int) -> list[dict[str, object]]:
    """What each model uses of its frequencies, on its own task at its own length."""
    device = stack.weights[0].device
    generator = torch.Generator(device).manual_seed(2_000_003)
    tokens = torch.stack([drawn(task, rows, task.length, generator)[0] for task in tasks])
    found: list[dict[str, list[float]]] = [{} for _ in tasks]

    def sink(layer: Layer, q: Tensor, k: Tensor) -> None:
        for index, (query, key) in enumerate(zip(q.split(rows), k.split(rows), strict=True)):
            meter = SpectrumMeter(layer, length=tokens.shape[-1], queries=0)
            meter.add(query, key)
            spectrum = meter.result(trained=None, wanted=None)
            use, rates = spectrum.mean, np.log(spectrum.rates)
            assert use.theta_eff is not None
            assert use.participation is not None
            steady = np.array(
                [np.array(head.coherent) * head.mean.share * head.mean.energy for head in spectrum.heads]
            )
            steady = steady.sum(0) / steady.sum()
            values = {
                "theta_eff": use.theta_eff,
                "participation": use.participation,
                "coherent": spectrum.coherent,
                "theta_coherent": float(np.exp(steady @ rates)),
            }
            for name, value in values.items():
                found[index].setdefault(name, []).append(value)

    stack(tokens, sink=sink)
    geometric = {
        name: [float(np.exp(np.log(np.maximum(one[name], 1e-12)).mean())) for one in found]
        for name in found[0]
    }
    return [{name: values[index] for name, values in geometric.items()} for index in range(len(tasks))]


def profiled(task: Suite, sample: int) -> dict[str, object]:
    """The kernel as the lens measures it on a sample, at each distance up to three blocks."""
    generator = torch.Generator().manual_seed(3_000_017)
    if isinstance(task, Addition):
        known = task.kernel
        return {"density": known.tolist(), "width": float(task.width + 1), "source": "known", "kind": "none"}
    tokens, targets = drawn(task, 8, sample // 8, generator)
    classes = F.pad(tokens, (0, 1)).flatten().numpy().astype(np.uint8)
    later = F.pad(targets.clamp(min=0), (1, 0)).flatten().numpy().astype(np.uint8)
    distances = np.arange(1, 3 * task.block + 16)
    curve = dependency(classes, np.full(8, sample // 8 + 1), distances=distances, later=later)
    width, found = measure_width(curve), kernel(curve)
    assert found is not None
    assert width.width is not None
    density = [float(f"{value:.4g}") for value in found.density / found.density.sum()]
    return {
        "density": density,
        "width": width.width,
        "source": "measured",
        "kind": width.kind,
        "w90": width.w90,
    }


def _dilation(pair: Pair, short: np.ndarray, long: np.ndarray) -> float:
    found = pair_dilation(Kernel(short, short[None]), Kernel(long, long[None]))
    return math.log(found.factor) / math.log(pair.scale)


def run(folder: Path, budget: Budget, device: torch.device) -> None:
    torch.set_num_threads(2)
    letters = [KINDS[kind](block) for kind in LETTER_KINDS for block in budget.blocks]
    pairs = letter_pairs(budget.blocks) + addition_pairs()
    needed = list(dict.fromkeys(task for pair in pairs for task in (pair.trained, pair.served)))
    groups = [("letters", letters, Shape(budget.width, 1, 1, budget.rows, budget.steps))]
    shape = Shape(2 * budget.width, 2, 4, budget.addition_rows, budget.addition_steps)
    groups += [(_name(task).replace(":", "-"), [task], shape) for task in ADDITIONS]
    commit = Path("COMMIT").read_text().strip() if Path("COMMIT").is_file() else "unknown"
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    how = {"device": device_name, "torch": torch.__version__, "commit": commit, "budget": asdict(budget)}
    _save(folder / "run.json", how)
    kernels: dict[Suite, dict] = {}
    with ProcessPoolExecutor(budget.workers, mp_context=get_context("spawn")) as pool:
        profiles = [pool.submit(profiled, task, budget.sample) for task in needed]
        for group, tasks, size in groups:
            started = perf_counter()
            stack = trained(tasks, budget, device, size)
            state = {name: weight.bfloat16() for name, weight in zip(stack.names, stack.weights, strict=True)}
            torch.save(state, folder / f"{group}.pt")
            each = [task for task in tasks for _ in budget.seeds]
            models = _read(stack, each, budget)
            _save(folder / f"{group}-models.json", models)
            print(f"{group}: {len(each)} models in {perf_counter() - started:.0f} s")
            if not kernels:
                kernels = {task: future.result() for task, future in zip(needed, profiles, strict=True)}
                _save(folder / "kernels.json", {repr(task): found for task, found in kernels.items()})
                print(f"{len(kernels)} kernels measured, {perf_counter() - started:.0f} s")
            mine = [pair for pair in pairs if pair.trained in tasks]
            predictions = [_predicted(pair, kernels, models) for pair in mine]
            digest = hashlib.sha256(json.dumps(predictions, sort_keys=True).encode()).hexdigest()
            written = datetime.now(UTC).isoformat(timespec="milliseconds")
            _save(
                folder / f"{group}-predictions.json",
                {"sha256": digest, "written": written, "predictions": predictions},
            )
            print(f"{written}: {len(mine)} predictions written, sha256 {digest}")
            found = _measure_pairs(stack, each, mine, budget)
            ended = datetime.now(UTC).isoformat(timespec="milliseconds")
            _save(folder / f"{group}-measured.json", {"ended": ended, "pairs": found})
            print(f"{ended}: measured, {perf_counter() - started:.0f} s")


def follow(budget: Budget) -> None:
    """What fewer models of S1 to S4 use of their frequencies while they learn, on a CPU."""
    letters = [KINDS[kind](block) for kind in LETTER_KINDS for block in budget.blocks]
    each, seen = [task for task in letters for _ in budget.seeds], []

    def look(done: int, stack: Stack) -> None:
        if done in MARKS:
            seen.append({"steps": done, "models": _read(stack, each, budget)})

    shape = Shape(budget.width, 1, 1, budget.rows, budget.steps)
    trained(letters, budget, torch.device("cpu"), shape, look)
    record(FOLLOWED, recipe={"experiment": "validate_interpolation follow", **asdict(budget)}, values=seen)


def _read(stack: Stack, tasks: list[Suite], budget: Budget) -> list[dict[str, object]]:
    length = tasks[0].length
    values = measured(stack, tasks, 1.0, length=length, rows=budget.served_rows, interpolated=False)
    seen = spectra(stack, tasks, budget.read_rows)
    return [
        {"task": _name(task), "seed": index % len(budget.seeds), **values[index], **seen[index]}
        for index, task in enumerate(tasks)
    ]


def _name(task: Suite) -> str:
    if isinstance(task, Addition):
        return f"columns:{task.block}" + (f":{task.spacing}" if task.spacing > 1 else "")
    return next(f"{kind}:{task.block}" for kind in LETTER_KINDS if type(KINDS[kind](2)) is type(task))


def _predicted(pair: Pair, kernels: dict[Suite, dict], models: list[dict]) -> dict[str, object]:
    short, long = (np.array(kernels[task]["density"]) for task in (pair.trained, pair.served))
    own = [model for model in models if model["task"] == pair.task]
    theta = math.exp(sum(math.log(model["theta_eff"]) for model in own) / len(own))
    width, misfit = kernels[pair.trained]["width"], dilation_misfit(short, long, pair.scale)
    relative = _dilation(pair, short, long)
    found = predict_interpolation(pair.scale, misfit=misfit, width=width, theta_eff=theta)
    return {
        "pair": pair.name,
        "outcome": found.outcome,
        "from_data": found.from_data,
        "from_weights": found.from_weights,
        "misfit": misfit,
        "relative": relative,
        "width": width,
        "theta_eff": theta,
        "product": theta * width,
        "kernel": kernels[pair.trained]["source"],
    }


def _measure_pairs(
    stack: Stack, tasks: list[Suite], pairs: list[Pair], budget: Budget
) -> list[dict[str, object]]:
    """All pairs of one scale and change in one pass over the stack."""
    found = []
    for scale, change in dict.fromkeys((pair.scale, pair.change) for pair in pairs):
        served = {pair.trained: pair for pair in pairs if (pair.scale, pair.change) == (scale, change)}
        now = [served[task].served for task in tasks]
        adds = isinstance(now[0], Addition)
        length = now[0].length if adds else round(scale * tasks[0].length)
        both = {
            name: measured(
                stack, now, scale, length=length, rows=budget.served_rows, interpolated=name == "interpolated"
            )
            for name in ("interpolated", "unscaled")
        }
        for index, task in enumerate(tasks):
            values = {name: row[index] for name, row in both.items()}
            found.append({"pair": served[task].name, "seed": index % len(budget.seeds), **values})
    return found


def _save(path: Path, values: object) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    arguments = parser("validate_interpolation", __doc__)
    parts = arguments.add_subparsers(dest="part", required=True)
    parts.add_parser("follow")
    running = parts.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--tiny", action="store_true")
    given = arguments.parse_args()
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.part == "follow":
        follow(SMALL)
    else:
        run(given.folder, TINY if given.tiny else Budget(), where)

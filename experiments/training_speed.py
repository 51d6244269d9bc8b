"""Tokens a second in training: `python -m experiments.training_speed --out results/training/h200.json`.

Our loop with each encoding, and the single-file trainer of `phasewise.bench.gpt2`, all of the size of GPT-2: in turns,
in one run, at each context. The gate is the first step's loss, held against float32 and the reference attention.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F

from phasewise.attention import choose
from phasewise.bench.gpt2 import HEADS, LAYERS, VOCABULARY, WIDTH, Training, prefer_cudnn
from phasewise.bench.timing import Time
from phasewise.data import Corpus, Documents, batch
from phasewise.encodings import named
from phasewise.model import ModelConfig, Transformer
from phasewise.record import record
from phasewise.train.loop import Sitting, sitting
from phasewise.train.optimizer import learning_rate
from phasewise.train.prefetch import ahead
from phasewise.train.processes import Processes
from phasewise.train.recipe import TrainRecipe
from phasewise.train.speed import utilisation

BASELINE = "gpt2"
SEED = 0
GATE = 2e-3  # relative; bfloat16 products on float32 weights are an order closer
ENCODINGS = ("rope", "pope", "tapa")


@dataclass(frozen=True)
class Sizes:
    """What is trained; smaller ones are a rehearsal."""

    tokens: int = 2**16
    """In a step."""
    layers: int = LAYERS
    heads: int = HEADS
    width: int = WIDTH
    vocabulary: int = VOCABULARY
    steps: int = 6
    """In a sample."""
    rounds: int = 5


@dataclass
class Case:
    """One training under test: `advance(steps)` takes steps, and leaves their losses in `losses`."""

    name: str
    context: int
    advance: Callable[[int], None]
    losses: Callable[[], list[float]]
    route: str
    first_step: float = 0.0
    """Seconds of the first two steps, compilation included."""
    peak_bytes: int = 0
    samples: list[float] = field(default_factory=list)
    """Milliseconds a step."""


def corpus(sizes: Sizes, length: int) -> Corpus:
    """Made documents whose tokens are of unequal frequency, so that a loss can fall."""
    random = np.random.default_rng(SEED)
    ranks = random.zipf(1.2, size=(64, length + 1)) % sizes.vocabulary
    documents = Documents.join(list(ranks), vocab_size=sizes.vocabulary)
    return Corpus(
        name="zipf", source="made", licence="none needed", unit="token", vocab_size=sizes.vocabulary,
        sha256=f"zipf {sizes.vocabulary} {length}", splits={"train": documents}, decode=str,
    )  # fmt: skip


def recipe(encoding: str, context: int, sizes: Sizes) -> TrainRecipe:
    """The recipe of one of our trainings."""
    shape = {
        "width": sizes.width,
        "layers": sizes.layers,
        "heads": sizes.heads,
        "activation": "gelu",
        "tied": True,
    }
    model = ModelConfig.model_validate({**shape, "vocab_size": sizes.vocabulary, "encoding": named(encoding)})
    return TrainRecipe(
        model=model, seed=SEED, data="zipf", context=context, batch_size=sizes.tokens // context,
        steps=10_000, warmup=100, learning_rate=6e-4, final_learning_rate=6e-5, beta2=0.95,
        checkpoint_every=10_000, precision="bfloat16", compile=True,
    )  # fmt: skip


def our_case(encoding: str, context: int, sizes: Sizes, device: torch.device, stack: ExitStack) -> Case:
    """Our loop, as `phasewise train` runs it."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    given = recipe(encoding, context, sizes)
    this: Sitting = stack.enter_context(sitting(given, corpus(sizes, 4 * context), folder, device=device))
    steps = this.steps()
    layer = given.model.encodings[0].build(num_heads=sizes.heads, head_dim=given.model.head_dim)
    shape = (given.batch_size, sizes.heads, context, sizes.width // sizes.heads)
    q = torch.empty(shape, dtype=torch.bfloat16, device=device)
    route = choose(q, q, q, layer.to(device)).impl

    def advance(count: int) -> None:
        for _ in islice(steps, count):
            pass

    return Case(encoding, context, advance, lambda: this.losses, route)


def baseline_case(context: int, sizes: Sizes, device: torch.device, stack: ExitStack) -> Case:
    """The single-file trainer on the same batches, made ahead as ours are."""
    training = Training(
        context=context, vocabulary=sizes.vocabulary, layers=sizes.layers, heads=sizes.heads,
        width=sizes.width, device=str(device), seed=SEED,
    )  # fmt: skip
    losses: list[torch.Tensor] = []
    given = recipe("rope", context, sizes)
    here = Processes(rank=0, size=1, device=device)
    coming = stack.enter_context(ahead(given, corpus(sizes, 4 * context), here, start=0))

    def advance(count: int) -> None:
        for ((tokens, targets, _, _),) in islice(coming, count):
            losses.append(training.step(tokens, targets, learning_rate(given, len(losses))))

    return Case(BASELINE, context, advance, lambda: [loss.item() for loss in losses], "sdpa, cuDNN preferred")


def gate(case: Case, sizes: Sizes, device: torch.device) -> float:
    """The relative error of the first step's loss against float32 and the reference attention; raises above GATE."""
    given = recipe(case.name, case.context, sizes)
    torch.manual_seed(SEED)
    model = Transformer(given.model).to(device)
    drawn = batch(
        corpus(sizes, 4 * case.context),
        "train",
        step=0,
        context=case.context,
        batch_size=given.batch_size,
        seed=SEED,
    )
    total = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():
        for row in range(given.batch_size):
            logits = model(drawn.tokens[row : row + 1].to(device), impl="reference")[0]
            total += F.cross_entropy(logits, drawn.targets[row].to(device), reduction="sum").double()
    exact = total.item() / drawn.targets.numel()
    error = abs(case.losses()[0] - exact) / exact
    if not error < GATE:
        raise AssertionError(
            f"{case.name} at {case.context}: first loss {case.losses()[0]}, in float32 {exact}"
        )
    return error


def measure(
    context: int,
    names: Sequence[str],
    sizes: Sizes,
    device: torch.device,
    *,
    deadline: float,
    profiles: Path | None,
) -> list[dict[str, object]]:
    """A row for each case at one context, its samples taken in turns with the others', fewer after the deadline."""
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        cases = []
        for name in names:
            make = baseline_case if name == BASELINE else lambda *a, name=name: our_case(name, *a)
            cases.append(make(context, sizes, device, stack))
        for case in list(cases):
            try:
                _warm(case, device)
            except Exception as error:  # one that fails is recorded as failed, and the others are measured
                print(f"{case.name} at {context} failed: {error!r}", flush=True)
                rows.append({"case": case.name, "context": context, "failed": repr(error)[:2000]})
                cases.remove(case)
        for number in range(sizes.rounds):
            if number >= 2 and perf_counter() > deadline:
                break
            for case in cases:
                case.samples.append(_timed(case, sizes.steps, device))
        medians = {case.name: statistics.median(case.samples) for case in cases}
        for case in cases:
            row = _row(case, medians, sizes, device)
            print(_line(row), flush=True)
            try:
                if case.name != BASELINE:
                    row["gate_error"] = gate(case, sizes, device)
            except AssertionError as error:
                print(error, flush=True)
                row = {"case": case.name, "context": context, "failed": str(error)}
            rows.append(row)
            if profiles is not None and perf_counter() < deadline:
                _profile(case, profiles)
    return rows


def _profile(case: Case, folder: Path) -> None:
    """Write where the time of two steps goes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        case.advance(2)
    order = f"self_{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total"
    table = profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{case.name}-{case.context}.txt").write_text(table)


def _warm(case: Case, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    case.first_step = _timed(case, 2, device) * 2 / 1000
    _timed(case, 2, device)
    if device.type == "cuda":
        case.peak_bytes = torch.cuda.max_memory_allocated()
    print(f"{case.name} at {case.context}: ready after {case.first_step:.1f} s", flush=True)


def _timed(case: Case, steps: int, device: torch.device) -> float:
    """Milliseconds a step, from an idle device to an idle device."""
    _synchronize(device)
    started = perf_counter()
    case.advance(steps)
    _synchronize(device)
    return (perf_counter() - started) * 1000 / steps


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _row(case: Case, medians: dict[str, float], sizes: Sizes, device: torch.device) -> dict[str, object]:
    time = Time.of(case.samples)
    speed = sizes.tokens * 1000 / time.median
    losses = case.losses()
    row: dict[str, object] = {
        "case": case.name, "context": case.context, "attention": case.route, "ms_per_step": asdict(time),
        "tokens_per_second": speed, "peak_bytes": case.peak_bytes, "seconds_to_second_step": case.first_step,
        "mfu": utilisation(recipe("rope", case.context, sizes).model, case.context, speed, device),
        "first_loss": losses[0], "last_loss": losses[-1], "steps": len(losses),
    }  # fmt: skip
    for other in (BASELINE, "rope"):
        if other in medians:
            row[f"speed_to_{other}"] = medians[other] / time.median
    return row


def _line(row: dict[str, object]) -> str:
    ratios = " ".join(f"{key} {value:.3f}" for key, value in row.items() if key.startswith("speed_to"))
    mfu = "" if row["mfu"] is None else f" MFU {row['mfu']:.3f}"
    return f"{row['context']} {row['case']:5} {row['tokens_per_second']:,.0f} tokens/s{mfu} {ratios}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.training_speed", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="the record, a JSON file, written after each context"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="+", default=[BASELINE, *ENCODINGS])
    parser.add_argument("--seconds", type=float, default=600, help="after which fewer samples are taken")
    parser.add_argument("--profiles", type=Path, help="a folder for where the time of each case goes")
    parser.add_argument("--rehearsal", action="store_true", help="a tiny model, to see that all runs")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    tiny = Sizes(tokens=256, layers=2, heads=2, width=32, vocabulary=512, steps=2, rounds=2)
    sizes = tiny if options.rehearsal else Sizes()
    prefer_cudnn()
    deadline = perf_counter() + options.seconds
    rows: list[dict[str, object]] = []
    for number, context in enumerate(options.contexts):
        # The baseline compiles for half a minute at each context, and is wanted at the first.
        names = [case for case in options.cases if case != BASELINE or number == 0]
        rows += measure(context, names, sizes, device, deadline=deadline, profiles=options.profiles)
        written = {
            "what": "training steps, bfloat16 products on float32 weights, compiled; cases in turns in one process",
            "sizes": asdict(sizes), "seed": SEED, "contexts": options.contexts, "cases": options.cases,
            "samples": f"up to {sizes.rounds} rounds of {sizes.steps} steps",
        }  # fmt: skip
        record(options.out, recipe=written, values=rows, device=device)
    return 0


if __name__ == "__main__":
    main()

"""Small models side by side on one GPU: each one's whole training step is a CUDA graph on a stream of its own.

A small model's kernels end sooner than the next are launched, and some fill a part of the device. A captured
step costs one launch, and the steps of several models overlap. Within a block of steps nothing is read from the
device: losses, and a loss that is no longer a number, are seen at the block's end.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from phasewise.data import NOT_SCORED, Batch, Corpus, batch
from phasewise.interrupt import Interrupted
from phasewise.model import Transformer
from phasewise.train.checkpoint import Checkpoint, load, require_same_run, save, saved, step_of
from phasewise.train.loop import Diverged, Trained, cpu_threads
from phasewise.train.metrics import cut, losses_until
from phasewise.train.optimizer import learning_rate, shares
from phasewise.train.processes import Processes
from phasewise.train.recipe import TrainRecipe
from phasewise.train.short import ShortRows, obstacle
from phasewise.train.trainer import Trainer

WARM_UP = 3
COLUMNS = 16
METRICS = "metrics.jsonl"

Inputs = tuple[Tensor, ...]
Draw = tuple[int, int, int]
"""What decides a recipe's batches: seed, rows and context."""


def train_side_by_side(
    recipes: Mapping[str, TrainRecipe],
    corpus: Corpus,
    folder: Path,
    *,
    device: torch.device,
    block: int = 100,
    on_block: Callable[[int, Mapping[str, Transformer]], None] = lambda _steps, _models: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Trained]:
    """Train a model by each recipe, one step of each in turn.

    Each model's batches, learning rates, dropout and losses are those it has alone, to the last digit on one
    device; they are the steps of `phasewise.train.loop.train`, from the same batches. Writes metrics.jsonl and
    checkpoints into FOLDER/NAME at the ends of blocks, and goes on from the furthest ones.
    `on_block(steps_done, models)` is told after each block, its losses being numbers; when `stop()` then says
    so, checkpoints are written and Interrupted is raised. The caller's random state is left as it was.

    device: on CUDA steps are captured; elsewhere the same steps are taken one operation after another.
    block: steps between two looks at the losses; every recipe's checkpoint_every must be a multiple.
    Rows are padded on the right alone, where a causal model does not see it; columns that no row of the corpus
    fills are left out, and tasks with short rows are served by `phasewise.train.short`.

    Raises ValueError for recipes that a captured step cannot serve or that differ in their steps, and for
    folders that do not continue them; Diverged, with model and step, when a loss is no longer a number (the
    checkpoints stay).

    >>> from phasewise.data import load
    >>> from phasewise.encodings import RoPEConfig
    >>> from phasewise.model import ModelConfig
    >>> model = ModelConfig(vocab_size=256, width=16, layers=1, heads=2, encoding=RoPEConfig())
    >>> recipe = TrainRecipe(model=model, seed=0, steps=2, warmup=1, context=16, batch_size=2)
    >>> seeds = {f"seed{seed}": recipe.model_copy(update={"seed": seed}) for seed in range(2)}
    >>> sorted(train_side_by_side(seeds, load("austen"), Path("runs/small"), device=torch.device("cpu")))
    ['seed0', 'seed1']
    """
    _check(recipes, block)
    steps = next(iter(recipes.values())).steps
    with ExitStack() as stack:
        stack.enter_context(cpu_threads(max(recipe.threads for recipe in recipes.values())))
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        if any(recipe.compile for recipe in recipes.values()):
            torch.compiler.reset()  # a process compiles a function for so many models and no more
        done = _shared_step(folder, recipes, corpus)
        _drop_after(done, folder, recipes)
        lanes = {name: Lane(recipe, corpus, folder / name, device, done) for name, recipe in recipes.items()}
        models = {name: lane.trainer.model for name, lane in lanes.items()}
        making = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches"))
        parts = [range(start, min(start + block, steps)) for start in range(done, steps, block)]
        coming = making.submit(_inputs, lanes, corpus, parts[0]) if parts else None
        for part, following in pairwise([*parts, None]):
            assert part is not None
            assert coming is not None
            inputs, end, started = coming.result(), part.stop, perf_counter()
            for name, lane in lanes.items():
                lane.fill(inputs[name])
            for _ in part:
                for lane in lanes.values():
                    lane.advance()
            # Begun once the device has its work: a thread that is busy in Python would hold up the launches.
            coming = making.submit(_inputs, lanes, corpus, following) if following else None
            for name, lane in lanes.items():
                lane.note(name, end, started)
            on_block(end, models)
            stopping = stop() and end < steps
            for lane in lanes.values():
                lane.trainer.model.train()
                if stopping or end == steps or end % lane.recipe.checkpoint_every == 0:
                    lane.save(corpus)
            if stopping:
                raise Interrupted(f"step {end} of {steps}")
        return {name: lane.trained() for name, lane in lanes.items()}


class Padded:
    """Loss and step of any model on padded rows, as the ordinary loop takes them."""

    def __init__(self, trainer: Trainer, corpus: Corpus) -> None:
        self.trainer = trainer
        longest = int(corpus.split("train").lengths.max()) - 1
        self.columns = min(trainer.recipe.context, math.ceil(longest / COLUMNS) * COLUMNS)

    def stack(self, drawn: Sequence[Batch]) -> Inputs:
        """Batches as `loss` takes one: tokens and targets [steps, rows, columns]."""
        return tuple(
            torch.stack([getattr(batch, name)[:, : self.columns] for batch in drawn])
            for name in ("tokens", "targets")
        )

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of one batch."""
        return self.trainer.objective(tokens, targets, None, (targets != NOT_SCORED).sum().float())

    def update(self, _rate: Tensor) -> Tensor:
        """Take the optimizer's step; give the gradient's norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.trainer.model.parameters(), self.trainer.recipe.clip)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad(set_to_none=True)
        return norm


class Lane:
    """One model's training: what a step reads and changes lies at fixed addresses of the device."""

    def __init__(
        self, recipe: TrainRecipe, corpus: Corpus, folder: Path, device: torch.device, done: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe, self.folder, self.device = recipe, folder, device
        processes = Processes(rank=0, size=1, device=device)
        self.trainer = Trainer(recipe, processes, blank=done > 0)
        _put_on_device(self.trainer.optimizer, device)
        self.random = _OnCuda(device) if device.type == "cuda" else _OnCpu()
        self.done, self.seconds = done, 0.0
        if done:
            self._restore(next(path for path in saved(folder) if step_of(path) == done))
        self.losses = losses_until(folder / METRICS, self.done)
        cut(folder / METRICS, self.done)
        short = obstacle(recipe, corpus, device) is None
        self.task = (
            ShortRows(self.trainer.model, self.trainer.optimizer, recipe, corpus)
            if short
            else Padded(self.trainer, corpus)
        )
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.inputs: Inputs = ()
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, block: Inputs) -> None:
        """Give the lane the stacked batches of its next steps."""
        count = len(block[0])
        rates = torch.tensor(
            [learning_rate(self.recipe, self.done + number) for number in range(count)],
            dtype=torch.float32 if self.device.type == "cuda" else torch.float64,
        )
        if not self.inputs:
            self.inputs = tuple(x.to(self.device) for x in (*block, rates))
            self.metrics = torch.zeros(count, 2, device=self.device)
            if self.device.type == "cuda":
                self._capture()
        for mine, given in zip(self.inputs, (*block, rates), strict=True):
            mine[:count].copy_(given)
        self.place.zero_()
        self.count = count
        if self.graph is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def advance(self) -> None:
        """One training step."""
        if self.graph is None:
            with self.random:
                self._step()
        else:
            with torch.cuda.stream(self.stream):
                self.graph.replay()

    def note(self, name: str, end: int, started: float) -> None:
        """Read a block's losses and gradient norms, and write them down."""
        if self.graph is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        values = self.metrics[: self.count].tolist()
        self.seconds += perf_counter() - started
        lines = []
        for step, (loss, norm) in enumerate(values, start=self.done):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise Diverged(
                    f"{name}: training diverged at step {step + 1}: loss {loss}, gradient norm {norm}. "
                    "Lower the learning rate or lengthen the warm-up"
                )
            rate = learning_rate(self.recipe, step)
            record = {"step": step + 1, "loss": loss, "learning_rate": rate, "gradient_norm": norm}
            lines.append(json.dumps(record) + "\n")
        with (self.folder / METRICS).open("a") as metrics:
            metrics.writelines(lines)
            metrics.flush()
            os.fsync(metrics.fileno())
        self.losses += [loss for loss, _ in values]
        self.done = end

    def save(self, corpus: Corpus) -> None:
        """Write a checkpoint."""
        with self.random:
            state = self.trainer.state()
        recipe = self.recipe.model_dump(mode="json")
        checkpoint = Checkpoint(self.done, self.seconds, recipe, corpus.sha256, state)
        save(self.folder, checkpoint)

    def trained(self) -> Trained:
        tail = self.losses[-max(self.recipe.steps // 10, 1) :]
        return Trained(self.trainer.whole(), math.fsum(tail) / len(tail), self.seconds)

    def _restore(self, path: Path) -> None:
        with self.random:
            state = self.trainer.state()
            known = load(path, state)
            self.trainer.restore(state)
        self.seconds = known.seconds

    def _step(self) -> None:
        *batch, rate = (x.index_select(0, self.place)[0] for x in self.inputs)
        for group, share in zip(self.trainer.optimizer.param_groups, shares(self.recipe), strict=False):
            if self.device.type == "cuda":
                group["lr"].copy_(share * rate)
            else:
                group["lr"] = share * rate.item()
        loss = self.task.loss(*batch)
        loss.backward()
        norm = self.task.update(rate)
        self.metrics.index_copy_(0, self.place, torch.stack([loss.detach(), norm])[None])
        self.place += 1

    def _capture(self) -> None:
        """Record a step; what the steps before it, which load and choose kernels, changed is put back."""
        held = [tensor.detach().clone() for tensor in self._changed()]
        self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with self.random, torch.cuda.stream(self.stream):
            random = torch.cuda.get_rng_state(self.device)
            for _ in range(WARM_UP):
                self._step()
                self.place.zero_()
            with torch.no_grad():
                for tensor, before in zip(self._changed(), held, strict=True):
                    tensor.copy_(before)
            torch.cuda.set_rng_state(random, self.device)
        torch.cuda.synchronize(self.device)
        self.graph = torch.cuda.CUDAGraph()
        with self.random, torch.cuda.graph(self.graph, stream=self.stream):
            self._step()

    def _changed(self) -> list[Tensor]:
        optimizer = self.trainer.optimizer
        moments = [moment for state in optimizer.state.values() for moment in state.values()]
        copies = [copy for _, copy in self.task.pairs] if isinstance(self.task, ShortRows) else []
        return [*self.trainer.model.parameters(), *copies, *moments, self.place, self.metrics]


class _OnCpu:
    """A lane's own state of torch's random generator, in use within `with`."""

    def __init__(self) -> None:
        self.state = torch.get_rng_state()

    def __enter__(self) -> None:
        self.others = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = torch.get_rng_state()
        torch.set_rng_state(self.others)


class _OnCuda:
    """The same on a GPU. Graphs read the state where it lies, so lanes on streams of their own need one each."""

    def __init__(self, device: torch.device) -> None:
        self.default = torch.cuda.default_generators[device.index or 0]
        self.own = torch.Generator(device).manual_seed(self.default.initial_seed())

    def __enter__(self) -> None:
        self.others = self.default.graphsafe_get_state()
        self.default.graphsafe_set_state(self.own)

    def __exit__(self, *_: object) -> None:
        self.default.graphsafe_set_state(self.others)


def _inputs(lanes: Mapping[str, "Lane"], corpus: Corpus, steps: range) -> dict[str, Inputs]:
    """What each lane reads in some steps."""
    draws = sorted({_draw(lane.recipe) for lane in lanes.values()})
    drawn = {draw: [_batch(corpus, draw, step) for step in steps] for draw in draws}
    return {name: lane.task.stack(drawn[_draw(lane.recipe)]) for name, lane in lanes.items()}


def _shared_step(folder: Path, recipes: Mapping[str, TrainRecipe], corpus: Corpus) -> int:
    """The furthest step that every model has a checkpoint of: a killed sitting may have written some of the last."""
    found = {name: saved(folder / name) for name in recipes}
    for name, paths in found.items():
        for path in paths[-1:]:
            require_same_run(path, recipes[name], corpus)
    steps = {name: {step_of(path) for path in paths} for name, paths in found.items()}
    shared = set.intersection(*steps.values())
    begun = all((folder / name / METRICS).exists() for name in recipes)
    if not shared and max(map(len, steps.values())) > begun:
        taken = {name: max(of, default=0) for name, of in steps.items()}
        raise ValueError(
            f"the models in {folder} have no checkpoint of one step (the last: {taken}): train those behind apart "
            "up to the others', or delete the folder to start again"
        )
    return max(shared, default=0)


def _drop_after(step: int, folder: Path, names: Iterable[str]) -> None:
    """Take away the checkpoints of steps that will be taken again.

    `save` keeps the last two, and these would be counted for one that every model has.
    """
    for name in names:
        for path in saved(folder / name):
            if step_of(path) > step:
                shutil.rmtree(path)


def _draw(recipe: TrainRecipe) -> Draw:
    return recipe.seed, recipe.batch_size, recipe.context


def _batch(corpus: Corpus, draw: Draw, step: int) -> Batch:
    seed, rows, context = draw
    return batch(corpus, "train", step=step, context=context, batch_size=rows, seed=seed)


def _put_on_device(optimizer: torch.optim.AdamW, device: torch.device) -> None:
    """Give an optimizer its steps and moments, all zero; on CUDA the learning rate too is then a tensor."""
    captured = device.type == "cuda"
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros((), device=device) if captured else 0.0
        group["capturable"] = captured
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()


def _check(recipes: Mapping[str, TrainRecipe], block: int) -> None:
    if not recipes or block < 1:
        raise ValueError(
            f"give at least one recipe and a block of at least 1 step, not {len(recipes)} and {block}"
        )
    steps = {recipe.steps for recipe in recipes.values()}
    if len(steps) > 1:
        raise ValueError(f"side by side all models take one number of steps, not {sorted(steps)}")
    for name, recipe in recipes.items():
        plain = {"packed": False, "accumulate": 1, "sharding": "replicated", "context_processes": 1}
        unserved = [field for field, value in plain.items() if getattr(recipe, field) != value]
        if recipe.evaluate_every:
            unserved.append("evaluate_every")
        if unserved:
            raise ValueError(
                f"{name}: side by side a step takes its whole batch, unpacked, on one device and measures nothing; "
                f"leave out {', '.join(unserved)}"
            )
        if recipe.checkpoint_every % block:
            raise ValueError(
                f"{name}: checkpoints come at ends of blocks: checkpoint_every {recipe.checkpoint_every} "
                f"is no multiple of {block}"
            )

"""The training loop: each step is a function of the recipe, the corpus and the step before."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F

from phasewise.data import Corpus, batch
from phasewise.interrupt import Interrupted
from phasewise.model import Transformer
from phasewise.record import replacing
from phasewise.train.checkpoint import Checkpoint, load, save, saved
from phasewise.train.optimizer import build_optimizer, learning_rate
from phasewise.train.recipe import TrainRecipe


class Diverged(Exception):
    """The loss or its gradient is no longer a number."""


@dataclass(frozen=True)
class Trained:
    """A model at the end of its recipe."""

    model: Transformer
    loss: float
    """Mean training loss of the last tenth of the steps, nats per scored token."""
    seconds: float
    """Time spent in training steps, over all sittings."""


def train(
    recipe: TrainRecipe,
    corpus: Corpus,
    folder: Path,
    *,
    device: torch.device,
    on_step: Callable[[int, float], None] = lambda _step, _loss: None,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Train to the recipe's last step, from the furthest checkpoint in the folder if there is one.

    Writes `metrics.jsonl`, a line a step, and checkpoints. `on_step(steps_done, loss)` is told of each step;
    when `stop()` says so the step's checkpoint is written and Interrupted raised. A run in several sittings
    equals the run in one, dropout included. The caller's random state is left as it was.

    Raises ValueError for a damaged checkpoint or one of another recipe or corpus, Diverged when the loss
    is no longer a number (the last checkpoint stays).
    """
    folder.mkdir(parents=True, exist_ok=True)
    devices = [device] if device.type == "cuda" else []
    with cpu_threads(recipe.threads), torch.random.fork_rng(devices=devices):
        torch.manual_seed(recipe.seed)
        model = Transformer(recipe.model).to(device).train()
        optimizer = build_optimizer(recipe, model)
        done, seconds = 0, 0.0
        if checkpoints := saved(folder):
            checkpoint = load(checkpoints[-1], device=device)
            _same_run(checkpoint, recipe, corpus, path=checkpoints[-1])
            model.load_state_dict(checkpoint.model)
            optimizer.load_state_dict(checkpoint.optimizer)
            _set_random(checkpoint.random, device)
            done, seconds = checkpoint.step, checkpoint.seconds
        losses = _truncate(folder / "metrics.jsonl", done)
        with (folder / "metrics.jsonl").open("a", buffering=1) as metrics:
            for step in range(done, recipe.steps):
                started = perf_counter()
                record = _step(recipe, corpus, model, optimizer, step, device)
                seconds += perf_counter() - started
                losses.append(record["loss"])
                metrics.write(json.dumps(record) + "\n")
                on_step(step + 1, record["loss"])
                stopping = stop() and step + 1 < recipe.steps
                if stopping or (step + 1) % recipe.checkpoint_every == 0 or step + 1 == recipe.steps:
                    os.fsync(metrics.fileno())
                    checkpoint = Checkpoint(
                        step=step + 1,
                        seconds=seconds,
                        recipe=recipe.model_dump(mode="json"),
                        corpus=corpus.sha256,
                        model=model.state_dict(),
                        optimizer=optimizer.state_dict(),
                        random=_get_random(device),
                    )
                    save(folder, checkpoint)
                if stopping:
                    raise Interrupted(f"step {step + 1} of {recipe.steps}")
    tail = losses[-max(recipe.steps // 10, 1) :]
    return Trained(model.eval(), math.fsum(tail) / len(tail), seconds)


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let torch use this many CPU threads, for as long as the block lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _step(
    recipe: TrainRecipe,
    corpus: Corpus,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    step: int,
    device: torch.device,
) -> dict[str, float]:
    rate = learning_rate(recipe, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    drawn = batch(
        corpus, "train", step=step, context=recipe.context, batch_size=recipe.batch_size, seed=recipe.seed
    )
    places = None if drawn.positions is None else drawn.positions.to(device)
    logits = model(drawn.tokens.to(device), at=places)
    loss = F.cross_entropy(logits.flatten(0, 1), drawn.targets.to(device).flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    value, size = loss.item(), norm.item()
    if not (math.isfinite(value) and math.isfinite(size)):
        raise Diverged(
            f"training diverged at step {step + 1}: loss {value}, gradient norm {size}. "
            "Lower the learning rate or lengthen the warm-up"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"step": step + 1, "loss": value, "learning_rate": rate, "gradient_norm": size}


def _same_run(checkpoint: Checkpoint, recipe: TrainRecipe, corpus: Corpus, *, path: Path) -> None:
    now = recipe.model_dump(mode="json")
    differing = sorted(name for name in now if checkpoint.recipe.get(name) != now[name])
    if differing:
        raise ValueError(f"{path} was trained with another {', '.join(differing)}: use another folder")
    if checkpoint.corpus != corpus.sha256:
        raise ValueError(
            f"the corpus {corpus.name} has changed since {path} was written: "
            "use another folder, or the data as it was"
        )


def _truncate(path: Path, steps: int) -> list[float]:
    """Cut the metrics back to the checkpointed step and give the losses that stay."""
    remedy = f"restore it, or delete {path.parent} to train this model again"
    try:
        lines = path.read_text().splitlines()[:steps] if path.exists() else []
        losses = [float(json.loads(line)["loss"]) for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged (not every line is a step's metrics): {remedy}") from error
    if len(lines) < steps:
        raise ValueError(f"{path} holds {len(lines)} of the checkpoint's {steps} steps: {remedy}")
    with replacing(path) as unfinished:
        unfinished.write_text("".join(line + "\n" for line in lines))
    return losses


def _get_random(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)

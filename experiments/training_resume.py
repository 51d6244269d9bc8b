"""How long a resumed run waits before its first step: `python -m experiments.training_resume --out FILE`.

A 124M model with its moments on the CPU: the checkpoint's hashes are checked, the state is read and put in place.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch

from phasewise.data import load
from phasewise.record import record
from phasewise.train.loop import sitting
from phasewise.train.recipe import RunRecipe

REPEATS = 5
VOCABULARY = 50_257
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.training_resume", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the record, a JSON file")
    out = parser.parse_args().out
    recipe = RunRecipe(size="124M", context=16, batch_size=1, steps=4, warmup=1, checkpoint_every=1)
    training, corpus = recipe.training(vocab_size=VOCABULARY), load(recipe.data)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with sitting(training, corpus, folder, device=CPU) as first:
            next(first.steps())
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        opened = []
        for _ in range(REPEATS):
            started = perf_counter()
            with sitting(training, corpus, folder, device=CPU) as resumed:
                opened.append(perf_counter() - started)
                assert resumed.done == 1
    started = perf_counter()
    subprocess.run([sys.executable, "-c", "import phasewise.train.run"], check=True)
    values = {
        "seconds_to_open": opened,
        "seconds_to_import": perf_counter() - started,
        "checkpoint_bytes": written,
        "load_average": os.getloadavg()[0],
    }
    record(out, recipe=training.model_dump(mode="json"), values=values)
    print(values)


if __name__ == "__main__":
    main()

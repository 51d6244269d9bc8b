"""A training whose process is killed goes on in another number of processes: does its loss go on as if nothing was?

    python -m experiments.killed begin runs/killed --processes 2
    python -m experiments.killed resume runs/killed --processes 4 2 1 --out results/parallel/killed.json

`begin` trains each of SETTINGS twice at a time, once undisturbed; of the other one process gets SIGKILL between two
checkpoints. `resume` goes on from copies of what the killed one left, and holds the losses of the steps after its
last checkpoint against the undisturbed run's. All are ordinary `phasewise train` under torchrun.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.several_gpus import MULTICAST
from phasewise.record import record
from phasewise.train.checkpoint import saved, step_of

STEPS, EVERY = 60, 20
KILLED_AFTER = 30
MODEL = ("--size=10M", "--context=512", "--batch-size=32")
SETTINGS = {
    "float32, replicated": ("--precision", "float32"),
    "bfloat16, compiled, sharded": ("--precision", "bfloat16", "--compile", "--sharding", "sharded"),
}
BEGUN = "begun.json"


def training(out: Path, processes: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `phasewise train`; under torchrun where it is to have several processes."""
    command = [sys.executable, "-m", "phasewise", "train", "--out", str(out), *options]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher = ("torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}", "-m")
        command[2:2] = launcher
    return subprocess.Popen(command)


def losses(folder: Path) -> list[float]:
    """Of every step that is whole in a run's metrics."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def kill_last(launcher: subprocess.Popen[bytes], processes: int) -> None:
    """SIGKILL to the process of the highest rank that a launcher has started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    wanted = f"RANK={processes - 1}".encode()
    (last,) = (pid for pid in children if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    os.kill(int(last), signal.SIGKILL)


def begin(folder: Path, processes: int, options: Sequence[str]) -> None:
    found, running = {}, {}
    for name, setting in SETTINGS.items():
        given = (*options, f"--steps={STEPS}", f"--checkpoint-every={EVERY}", *setting)
        for kind in ("whole", "killed"):
            running[name, kind] = training(folder / kind / name, processes, given)
    started = time.monotonic()
    waiting, ends = set(SETTINGS), dict[str, float]()
    while len(found) < len(SETTINGS) or any(process.poll() is None for process in running.values()):
        for name in sorted(waiting):
            process, at = running[name, "killed"], folder / "killed" / name
            if process.poll() is not None:
                raise RuntimeError(f"{at} ended with {process.returncode} before it was killed")
            if len(losses(at)) >= KILLED_AFTER:
                waiting.discard(name)
                kill_last(process, processes)
                ends[name] = time.monotonic()
        for name in sorted(ends):
            process = running[name, "killed"]
            if name not in found and process.poll() is not None:
                found[name] = {
                    "exit_code": process.returncode,
                    "seconds_to_the_launchers_end": time.monotonic() - ends[name],
                    "steps_written": len(losses(folder / "killed" / name)),
                    "checkpoints": [step_of(path) for path in saved(folder / "killed" / name)],
                }
        time.sleep(0.01)
    print(f"begun and killed in {time.monotonic() - started:.0f} s: {found}", flush=True)
    written = {"processes": processes, "options": list(options), "killed": found}
    (folder / BEGUN).write_text(json.dumps(written))


def compared(whole: list[float], killed: list[float], resumed: list[float]) -> dict[str, Any]:
    """How far the losses of a resumed run are from those of the undisturbed one and of the killed one till its end."""

    def apart(other: list[float]) -> float:
        return max(abs(one / two - 1) for one, two in zip(resumed, other, strict=False))

    return {
        "steps": {"whole": len(resumed), "killed": len(killed)},
        "largest_relative_difference": {"whole": apart(whole), "killed": apart(killed)},
        "losses": {"whole": whole, "killed": killed, "resumed": resumed},
    }


def resume(folder: Path, processes: Sequence[int], out: Path) -> None:
    begun = json.loads((folder / BEGUN).read_text())
    running = {}
    for name in SETTINGS:
        for count in processes:
            copy = folder / f"in {count}" / name
            shutil.copytree(folder / "killed" / name, copy)
            sharding = () if count > 1 else ("--sharding", "replicated")
            running[name, count] = training(copy, count, ("--resume", *sharding))
    values = []
    for (name, count), process in running.items():
        code = process.wait()
        from_step = max(begun["killed"][name]["checkpoints"])
        curves = [losses(folder / kind / name)[from_step:] for kind in ("whole", "killed", f"in {count}")]
        facts = {"setting": name, "killed_in": begun["processes"], "resumed_in": count, "exit_code": code}
        values.append({**facts, "from_step": from_step, **compared(*curves), "killed": begun["killed"][name]})
        print(name, count, compared(*curves)["largest_relative_difference"], flush=True)
    settings = {name: os.environ.get(name) for name in MULTICAST}
    record(
        out,
        recipe={"options": begun["options"], "steps": STEPS, "every": EVERY, "seeds": [0], **settings},
        values=values,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.killed", description=__doc__)
    parser.add_argument("part", choices=("begin", "resume"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, nargs="+", required=True)
    parser.add_argument("--out", type=Path, help="the record that resume writes")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=MODEL, help="of phasewise train; last")
    given = parser.parse_args()
    if given.part == "begin":
        begin(given.folder, given.processes[0], given.options)
    else:
        resume(given.folder, given.processes, given.out)

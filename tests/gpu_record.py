"""Runs the GPU tests and records what passed, on what, for which sources; or says how old the record is.

python -m tests.gpu_record write     runs `pytest -m gpu`, then writes results/test-gpu.json
python -m tests.gpu_record check     one line: whether the sources are those that were tested
"""

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from phasewise.record import record

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "results" / "test-gpu.json"
SOURCES = (
    "src/phasewise/kernels/*.py",
    "src/phasewise/kernels/*.json",
    "src/phasewise/encodings/*.py",
    "src/phasewise/fused.py",
    "src/phasewise/attention.py",
)


def sources_hash(root: Path = ROOT) -> str:
    """sha256 of what runs on the GPU: names and contents of the kernels, their tables and what calls them."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def age(path: Path = RECORD, root: Path = ROOT) -> str:
    """One line on the record at `path`: absent, current or stale."""
    if not path.exists():
        return "GPU record: none yet; `make test-gpu` on a machine with a GPU writes it"
    document = json.loads(path.read_text())
    where = f"{document['device']}, commit {document['commit'][:12]}, {document['date']}"
    if failed := document["values"].get("failures"):
        where += f"; FAILED: {', '.join(failed)}"
    if document["values"]["sources_sha256"] == sources_hash(root):
        return f"GPU record: current ({where})"
    return f"GPU record: STALE, the kernels have changed since ({where}); run `make test-gpu` on a GPU"


class Outcomes:
    """A pytest plugin that counts passed, failed and skipped tests, and names the failed."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.count[report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)


def write() -> int:
    """Run the GPU tests and write the record, unless the run broke off. Returns pytest's exit code."""
    if not torch.cuda.is_available():
        print("make test-gpu needs a CUDA device and finds none; `make test` needs none", file=sys.stderr)
        return 2
    outcomes, tested = Outcomes(), sources_hash()
    code = int(pytest.main(["-m", "gpu"], plugins=[outcomes]))
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        values = {"sources_sha256": tested, **outcomes.count, "failures": sorted(outcomes.failures)}
        record(RECORD, recipe={"command": "pytest -m gpu"}, values=values, device="cuda")
        print(age())
    return code


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write"]:
            sys.exit(write())
        case ["check"]:
            print(age())
        case _:
            sys.exit(__doc__)

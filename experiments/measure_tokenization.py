"""How fast text becomes shards: MB/s of `tokenize` on novels, for each kind of tokenizer.

    python -m experiments.measure_tokenization FOLDER_OF_NOVELS results/data/tokenization.json

Wall time depends on what else the machine does, so the load average and the processor time that this work took
are recorded beside it: on idle cores the wall time is about processor time over cores, where cores are kept busy.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from experiments.command import parser
from phasewise.data.kinds import Origin
from phasewise.data.tokenization import tokenize
from phasewise.record import record

TOKENIZERS = ("gpt2", "bpe:8192", "bytes")


def measure(novels: Path, tokenizer: str, repeats: int) -> dict[str, object]:
    """Seconds of the fastest of `repeats` runs, the training of a BPE apart, and what it made."""
    origin = Origin(data=f"text:{novels}", tokenizer=tokenizer, held_out=0.0)
    size = sum(path.stat().st_size for path in novels.rglob("*") if path.is_file())
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        if tokenizer.startswith("bpe"):
            whole = tokenize(origin, Path(folder, "trained"))
            assert whole.vocab_size
            origin = origin.model_copy(update={"tokenizer": str(Path(folder, "trained", "tokenizer.json"))})
        for number in range(repeats):
            processor, started = time.process_time(), time.perf_counter()
            index = tokenize(origin, Path(folder, str(number)))
            runs.append((time.perf_counter() - started, time.process_time() - processor))
    seconds, processor = min(runs)
    tokens = sum(part.tokens for part in index.splits.values())
    return {
        "tokenizer": tokenizer,
        "megabytes": size / 1e6,
        "tokens": tokens,
        "bytes_per_token": size / tokens,
        "seconds": seconds,
        "megabytes_per_second": size / 1e6 / seconds,
        "processor_seconds": processor,
        "megabytes_per_processor_second": size / 1e6 / processor,
        "load_average": os.getloadavg()[0],
    }


def main(novels: Path, out: Path, repeats: int) -> None:
    """Measure each tokenizer and record the values."""
    values = []
    for tokenizer in TOKENIZERS:
        values.append(measure(novels, tokenizer, repeats))
        print(values[-1], flush=True)
        recipe = {"novels": novels.name, "repeats": repeats, "cores": os.cpu_count(), "seeds": [0]}
        record(out, recipe=recipe, values=values)


if __name__ == "__main__":
    arguments = parser("measure_tokenization", __doc__)
    arguments.add_argument("novels", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("repeats", type=int, nargs="?", default=1)
    main(**vars(arguments.parse_args()))

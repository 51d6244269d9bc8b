"""The tables of docs/parallel.md and docs/train.md: `python -m experiments.parallel_tables results/parallel/h200`.

The folder holds `training*.json` of experiments.training_scaling, `context*.json` of experiments.context_parallel, each
at several numbers of processes, and `killed.json` of experiments.killed.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.readme_figure import ROOT, with_table

Row = dict[str, Any]
COMPARED = (("losses", 0), ("gradient_norms", 0), ("losses", -1))
NAMES = {"replicated": "DDP", "sharded": "FSDP2", "resharded": "FSDP2, resharded"}


def rows(documents: Sequence[Row]) -> list[Row]:
    """The measured cases of several files, by number of processes; failed ones have no speed."""
    every = [row for document in documents for row in document["values"]]
    return sorted(every, key=lambda row: row["case"]["processes"])


def alone(row: Row, among: Sequence[Row], *, free: Sequence[str]) -> Row | None:
    """What one process measured of the same case, the fields in `free` aside."""
    fields = [name for name in row["case"] if name not in ("processes", *free)]
    return next(
        (
            other
            for other in among
            if other["case"]["processes"] == 1
            and all(other["case"][name] == row["case"][name] for name in fields)
        ),
        None,
    )


def efficiency(row: Row, one: Row | None, *, free: Sequence[str] = ()) -> float | None:
    """Tokens a second over those of as many processes that lose nothing to each other."""
    if one is None or "tokens_per_second" not in one or "tokens_per_second" not in row:
        return None
    return row["tokens_per_second"] / row["case"]["processes"] / one["tokens_per_second"]


def apart(row: Row, one: Row | None, name: str, step: int) -> float | None:
    """The relative difference of a quantity at a step to one process's."""
    return (
        None
        if one is None or name not in one or name not in row
        else abs(row[name][step] / one[name][step] - 1)
    )


def training_table(documents: Sequence[Row]) -> str:
    every = rows(documents)
    lines = [
        "| model | rows a GPU | GPUs | | tokens/s | MFU | ms a step (quartiles) | efficiency | memory a GPU |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(every, key=_batch):
        case = row["case"]
        what = NAMES[case["sharding"]] if case["processes"] > 1 else ""
        start = f"| {case['size']} | {case['rows']} | {case['processes']} | {what} |"
        if "failed" in row:
            lines.append(f"{start} failed | | | | |")
            continue
        time, share = row["ms_per_step"], efficiency(row, alone(row, every, free=["sharding"]))
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        memory = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        lines.append(
            f"{start} {row['tokens_per_second']:,.0f} | {mfu} | "
            f"{time['median']:.1f} ({time['low']:.1f}-{time['high']:.1f}) | {_percent(share)} | {memory} |"
        )
    recipe = documents[0]["recipe"]
    lines += [
        "",
        f"Rows of {recipe['context']} tokens, as many on every GPU at each number: weak scaling. RoPE, "
        f"bfloat16 on float32 weights, compiled; median of {recipe['samples']} samples of {recipe['steps']} steps. "
        f"{_certificate(documents)}",
    ]
    return "\n".join(lines)


def latest(documents: Sequence[Row]) -> list[Row]:
    """The records, with only those rows of an encoding that were measured at the commit that measured it last."""
    by_date = sorted(documents, key=lambda document: document["date"])
    last = {row["case"]["encoding"]: document["commit"] for document in by_date for row in document["values"]}
    kept = [
        {
            **document,
            "values": [
                row for row in document["values"] if last[row["case"]["encoding"]] == document["commit"]
            ],
        }
        for document in by_date
    ]
    return [document for document in kept if document["values"]]


def context_table(documents: Sequence[Row]) -> str:
    documents = latest(documents)
    every = rows(documents)
    lines = [
        "| tokens | | GPUs | tokens/s | efficiency | exchange alone | memory a GPU | loss | norm | last loss |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(every, key=_by_length):
        case, one = row["case"], alone(row, every, free=[])
        name = case["encoding"] + ("" if case["recompute"] else ", nothing recomputed")
        start = f"| {case['length']:,} | {name} | {case['processes']} |"
        if "tokens_per_second" not in row:
            lines.append(f"{start} does not fit | | | | | | |")
            continue
        seconds = case["length"] / row["tokens_per_second"]
        several = case["processes"] > 1
        cells = [
            f"{row['tokens_per_second']:,.0f}",
            _percent(efficiency(row, one)) if several else "",
            _percent(row["exchange_seconds"] / seconds) if several else "",
            "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB",
            *(_small(apart(row, one, *of)) if several else "" for of in COMPARED),
        ]
        lines.append(f"{start} {' | '.join(cells)} |")
    recipe = documents[0]["recipe"]
    model = recipe["model"]
    lines += [
        "",
        f"One row, {model['layers']} layers of width {model['width']} with {model['heads']} heads, bfloat16 on float32 "
        f"weights, blocks recomputed unless said; median of {recipe['timed']} steps after {recipe['warm_up']}. "
        "Exchange alone: what sending keys, values and their gradients takes when nothing else runs, as a share of the "
        "step; it is what hiding it could save at most. Loss, norm, last loss: how far the first step's loss and "
        f"gradient norm and the last step's loss are from one GPU's, relatively. {_certificate(documents)}",
    ]
    return "\n".join(lines)


def killed_table(document: Row) -> str:
    lines = [
        "| training | killed in | resumed in | from the killed run's next steps | from an undisturbed run |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in document["values"]:
        far, steps = row["largest_relative_difference"], row["steps"]
        cells = [f"{far[run]:.0e} ({steps[run]} steps)" for run in ("killed", "whole")]
        lines.append(f"| {row['setting']} | {row['killed_in']} | {row['resumed_in']} | {' | '.join(cells)} |")
    note = document["recipe"].get("note")
    lines += [
        "",
        f"Largest relative difference of a loss. {_certificate([document])}",
        *([note] if note else []),
    ]
    return "\n".join(lines)


def _by_length(row: Row) -> tuple[Any, ...]:
    case = row["case"]
    order = ("rope", "pope", "tapa")
    return case["length"], not case["recompute"], order.index(case["encoding"]), case["processes"]


def _batch(row: Row) -> tuple[str, int]:
    return row["case"]["size"], row["case"]["rows"]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _certificate(documents: Sequence[Row]) -> str:
    first = documents[0]
    found = [document["recipe"].get("all_reduce_gb_per_second") for document in documents]
    known = sorted(round(rate) for rate in found if rate is not None)
    rates = " to ".join(str(rate) for rate in sorted({*known[:1], *known[-1:]}))
    link = f", all-reduce at {rates} GB/s a GPU" if known else ""
    multicast = "" if first["recipe"].get("NCCL_NVLS_ENABLE") != "0" else ", NVLink multicast off"
    flash = first["versions"].get("flash-attn-4")
    kernels = "" if flash is None else f"flash-attn-4 {flash}, "
    commits = " and ".join(sorted({document["commit"][:10] for document in documents}))
    return (
        f"{first['device']}, one host{multicast}{link}, torch {first['versions']['torch']}, {kernels}"
        f"commit {commits}; `results/parallel/`."
    )


def _read(folder: Path, pattern: str) -> list[Row]:
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]
    if not documents:
        raise SystemExit(f"{folder} holds no {pattern}; give a folder of records, as results/parallel/h200")
    return documents


def main(folder: Path) -> None:
    training, shared = (_read(folder, f"{kind}*.json") for kind in ("training", "context"))
    pages = {
        ROOT / "docs" / "train.md": {
            "training-scaling": training_table(training),
            "killed": killed_table(json.loads((folder / "killed.json").read_text())),
        },
        ROOT / "docs" / "parallel.md": {"context-parallel": context_table(shared)},
    }
    for page, tables in pages.items():
        text = page.read_text()
        for marker, table in tables.items():
            text = with_table(text, table, marker)
        page.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.parallel_tables", description=__doc__)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)

"""The table of docs/train.md from the records of its rows: `make tables` names them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.command import parser
from experiments.readme_figure import ROOT, with_table

PAGE = ROOT / "docs" / "train.md"
NAMES = {"gpt2": "single-file GPT-2 trainer"}


def speed_table(documents: Sequence[dict[str, Any]]) -> str:
    """Tokens a second of each case, and its ratios to those of the same run."""
    document = documents[0]
    lines = [
        "| context | | attention | tokens/s | MFU | ms a step (quartiles) | to the single file | to RoPE | memory "
        "| commit |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    rows = [(row, one["commit"][:7]) for one in documents for row in one["values"]]
    for row, commit in sorted(rows, key=lambda pair: pair[0]["context"]):
        name = NAMES.get(row["case"], row["case"])
        if "failed" in row:
            lines.append(f"| {row['context']} | {name} | | failed | | | | | | {commit} |")
            continue
        time = row["ms_per_step"]
        spread = f" ({time['low']:.1f}-{time['high']:.1f})" if "low" in time else ""
        ratios = (row.get(f"speed_to_{other}") for other in ("gpt2", "rope"))
        cells = ["" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        memory = f"{row['peak_bytes'] / 2**30:.1f} GiB" if "peak_bytes" in row else ""
        lines.append(
            f"| {row['context']} | {name} | {row['attention']} | {row['tokens_per_second']:,.0f} | {row['mfu']:.1%} | "
            f"{time['median']:.1f}{spread} | {cells[0]} | {cells[1]} | {memory} | {commit} |"
        )
    sizes, versions = document["recipe"]["sizes"], document["versions"]
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton", "flash-attn-4") if name in versions
    )
    lines += [
        "",
        f"124M parameters (12 layers, width 768), {sizes['tokens']:,} tokens a step, bfloat16 on float32 weights, one "
        f"{document['device']}; cases in turns in one run, median of up to {sizes['rounds']} samples of "
        f"{sizes['steps']} steps. `results/training/`, {packages}.",
        *(one["recipe"]["note"] for one in documents if "note" in one["recipe"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = parser("training_table", __doc__)
    arguments.add_argument("records", type=Path, nargs="+")
    given = [json.loads(path.read_text()) for path in arguments.parse_args().records]
    PAGE.write_text(with_table(PAGE.read_text(), speed_table(given), "training-speed"))

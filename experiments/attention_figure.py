"""The tables and the figure of docs/attention.md, from recorded runs of `phasewise bench attention`: ours, and peers.

python -m experiments.attention_figure results/attention/h200.json results/attention/peers-h200.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from experiments.readme_figure import measured_on, with_table
from phasewise.figures import figure

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "attention.md"
FIGURE = ROOT / "docs" / "figures" / "attention_cost.svg"
MARKER = "cost"
SUMMARY = "ratios"
PEERS = "peers"
BASELINE = "flash-attn-4"
PEER = "flash-attention-2"
ROUTES = ("flash", "cudnn", "triton")
"""What auto takes, the first that there is."""


def table(document: dict[str, Any]) -> str:
    """Markdown: median times with quartiles, TFLOP/s and the ratio to plain flash-attn-4 of the same run."""
    rows = document["values"]["times"]
    lines = [
        "| D | T | implementation | forward, ms | TFLOP/s | ratio | with backward, ms | TFLOP/s | ratio | peak, MiB |",
        "|---:|---:|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row["width"], row["length"], row["subject"]]
        for kind in ("forward", "both"):
            took = row[f"{kind}_ms"]
            ratio = row.get(f"{kind}_to_{BASELINE}")
            cells += [
                f"{took['median']:.3f} ({took['low']:.3f} to {took['high']:.3f})",
                f"{row[f'{kind}_tflops']:.0f}",
                "" if ratio is None else f"{ratio:.2f}",
            ]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row['peak_bytes'] / 2**20:.0f}"])) + " |")
    recipe = document["recipe"]
    note = f"; {recipe['note']}" if "note" in recipe else ""
    lines += [
        "",
        f"Median (quartiles) of {recipe['samples']}; {recipe['what']}; {recipe['heads']} heads, "
        f"{recipe['tokens']:,} tokens in all, causal. Ratios are to plain {BASELINE} in the same run. "
        f"{measured_on(document)}{note}.",
    ]
    return "\n".join(lines)


def summary(document: dict[str, Any]) -> str:
    """Markdown: what auto takes for each encoding, over plain flash-attn-4 and FlashAttention-2, at every length."""
    rows = document["values"]["times"]
    found = {(row["subject"], row["width"], row["length"]): row for row in rows}
    widths, lengths = (sorted({row[name] for row in rows}) for name in ("width", "length"))
    columns = [(kind, baseline) for baseline in (BASELINE, PEER) for kind in ("forward", "both")]
    heads = [f"{'with backward' if kind == 'both' else kind}, over {baseline}" for kind, baseline in columns]
    lines = [
        f"| at {', '.join(map(str, lengths))} tokens | {' | '.join(heads)} |",
        "|---|" + "---|" * len(columns),
    ]
    for encoding in ("rope", "pope", "tapa"):
        for width in widths:
            route = next((r for r in ROUTES if (f"{encoding} {r}", width, lengths[0]) in found), None)
            if route is None:
                continue
            cells = [
                ", ".join(
                    f"{found[f'{encoding} {route}', width, length][f'{kind}_to_{baseline}']:.2f}"
                    for length in lengths
                )
                for kind, baseline in columns
            ]
            lines.append(f"| {encoding} {route}, D = {width} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(document: dict[str, Any], path: Path) -> None:
    """Bars: the ratio of every implementation to plain flash-attn-4, forward with backward, a panel a width."""
    rows = [row for row in document["values"]["times"] if f"both_to_{BASELINE}" in row]
    if not rows:
        raise ValueError(f"the record has no ratio to {BASELINE}: measure where it is installed")
    widths = sorted({row["width"] for row in rows})
    lengths = sorted({row["length"] for row in rows})
    names = list(dict.fromkeys(row["subject"] for row in rows))
    with figure(path, 4.6 * len(widths), 0.34 * len(names) + 1.2, style={"font.size": 8}) as drawn:
        panels = drawn.subplots(1, len(widths), sharey=True, squeeze=False)[0]
        for axes, width in zip(panels, widths, strict=True):
            for place, length in enumerate(lengths):
                found = {r["subject"]: r for r in rows if (r["width"], r["length"]) == (width, length)}
                at = [n + 0.26 * (place - (len(lengths) - 1) / 2) for n, s in enumerate(names) if s in found]
                ratios = [found[s][f"both_to_{BASELINE}"] for s in names if s in found]
                axes.barh(at, ratios, height=0.24, label=f"T = {length}")
            axes.axvline(1, color="black", linewidth=0.8)
            axes.set_xlabel(f"time over plain {BASELINE}, forward with backward")
            axes.set_title(f"D = {width}", loc="left")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        handles, labels = panels[-1].get_legend_handles_labels()
        drawn.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(lengths))


def main(report: Path, peers: Path) -> None:
    document = json.loads(report.read_text())
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    draw(document, FIGURE)
    page = with_table(PAGE.read_text(), summary(document), SUMMARY)
    page = with_table(page, table(json.loads(peers.read_text())), PEERS)
    PAGE.write_text(with_table(page, table(document), MARKER))
    print(f"wrote {FIGURE.relative_to(ROOT)} and the tables of {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))

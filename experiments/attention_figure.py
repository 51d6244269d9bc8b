"""The tables and the figure of docs/attention.md, and README.md's table of speed, from recorded runs.

The runs are those of `phasewise bench attention`: ours, and peers.

python -m experiments.attention_figure results/attention/h200.json results/attention/flex-h200.json \
    results/attention/peers-h200.json
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.command import parser
from experiments.readme_figure import measured_on, with_table
from phasewise.figures import figure
from phasewise.kernels.table import ranked

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "attention.md"
FIGURE = ROOT / "docs" / "figures" / "attention_cost.svg"
BASELINE = "flash-attn-4"
PEER = "flash-attention-2"
ALONE = "cudnn"
PEERS = ("flex", "PoPE-pytorch")
ENCODINGS = ("plain", "rope", "pope", "tapa", "alibi")
Rows = dict[tuple[str, int, int], dict[str, Any]]
"""By subject, width and length."""


def is_peer(subject: str) -> bool:
    """Whether an implementation is another package's way to an encoding."""
    return subject.partition(" ")[2] in PEERS


def rows_of(document: dict[str, Any]) -> Rows:
    return {(row["subject"], row["width"], row["length"]): row for row in document["values"]["times"]}


def sizes_of(found: Rows) -> tuple[list[int], list[int]]:
    """Widths and lengths that were measured."""
    return sorted({width for _, width, _ in found}), sorted({length for *_, length in found})


def auto(found: Rows, device: str, encoding: str, width: int, length: int, without: str = "") -> str | None:
    """The body that auto takes of those measured, by the launch table; without: what is not installed."""
    kernel = "tapa.forward.body" if encoding == "tapa" else "separable.forward.body"
    qk = width * (2 if encoding == "pope" else 1)
    order = ranked(kernel, device, torch.bfloat16, qk=qk, v=width, length=length)
    return next((x for x in order if x != without and (f"{encoding} {x}", width, length) in found), None)


def table(document: dict[str, Any]) -> str:
    """Markdown: median times with quartiles, TFLOP/s and the ratio to plain flash-attn-4 of the same run."""
    rows = [row for row in document["values"]["times"] if not is_peer(row["subject"])]
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
    lines += [
        "",
        f"Median (quartiles) of {recipe['samples']}; {recipe['what']}; {recipe['heads']} heads, "
        f"{recipe['tokens']:,} tokens in all, causal. Ratios are to plain {BASELINE} in the same run. "
        f"{measured_on(document)}{_note(document)}.",
    ]
    return "\n".join(lines)


def ratios(
    document: dict[str, Any],
    baselines: tuple[str, ...],
    without: str = "",
    encodings: tuple[str, ...] = ENCODINGS,
) -> str:
    """Markdown: what auto takes for each encoding, over each plain attention, at every length."""
    found = rows_of(document)
    widths, lengths = sizes_of(found)
    columns = [(kind, baseline) for baseline in baselines for kind in ("forward", "both")]
    heads = [f"{'with backward' if kind == 'both' else kind}, over {baseline}" for kind, baseline in columns]
    lines = [
        f"| at {', '.join(map(str, lengths))} tokens | {' | '.join(heads)} |",
        "|---|" + "---|" * len(columns),
    ]
    for encoding in encodings:
        for width in widths:
            bodies = [auto(found, document["device"], encoding, width, n, without) for n in lengths]
            taken = [
                found.get((f"{encoding} {body}", width, n), {})
                for body, n in zip(bodies, lengths, strict=True)
            ]
            if not any(taken):
                continue
            cells = [
                ", ".join(_two_places(row.get(f"{kind}_to_{baseline}")) for row in taken)
                for kind, baseline in columns
            ]
            names = ", ".join(body for body in dict.fromkeys(bodies) if body is not None)
            lines.append(f"| {encoding} {names}, D = {width} | {' | '.join(cells)} |")
    return "\n".join(lines)


def speed(document: dict[str, Any], place: Path) -> str:
    """Markdown: those ratios of RoPE, PoPE and TAPA over flash-attn-4, and the record at `place` that has them."""
    recipe = document["recipe"]
    return (
        f"{ratios(document, (BASELINE,), encodings=('rope', 'pope', 'tapa'))}\n\n"
        f"{recipe['heads']} heads of D channels, {recipe['tokens']:,} tokens in all, bfloat16, causal. "
        f"From `{place}`: commit {document['commit'][:10]}, {document['device']}."
    )


def memory(document: dict[str, Any]) -> str:
    """Markdown: peak memory of PoPE's forward and backward over RoPE's, with flash-attn-4 and with torch alone."""
    found = rows_of(document)
    widths, lengths = sizes_of(found)

    def share(width: int, length: int, without: str) -> float | None:
        bodies = [auto(found, document["device"], name, width, length, without) for name in ("pope", "rope")]
        if None in bodies:
            return None
        pope, rope = (
            found[f"{name} {body}", width, length]["peak_bytes"]
            for name, body in zip(("pope", "rope"), bodies, strict=True)
        )
        return pope / rope

    lines = [
        f"| at {', '.join(map(str, lengths))} tokens | {' | '.join(f'D = {width}' for width in widths)} |",
        "|---|" + "---|" * len(widths),
    ]
    for name, without in (("with flash-attn-4", ""), ("torch alone", "flash")):
        cells = [", ".join(_two_places(share(width, n, without)) for n in lengths) for width in widths]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _two_places(number: float | None) -> str:
    """A dash for what was not measured."""
    return "-" if number is None else f"{number:.2f}"


def others(documents: list[dict[str, Any]]) -> str:
    """Markdown: other people's ways to an encoding beside what auto takes in the same run, over plain flash-attn-4.

    What several documents have is the first one's.
    """
    lines = [
        "| D | T | implementation | forward, ms | ratio | with backward, ms | ratio | peak, MiB |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    recorded, told = [], set()
    for document in documents:
        found = rows_of(document)
        peers = {key: row for key, row in found.items() if is_peer(key[0]) and key not in told}
        told |= peers.keys()
        if peers:
            recorded.append(measured_on(document) + _note(document))
        for (subject, width, length), peer in peers.items():
            encoding = subject.partition(" ")[0]
            body = auto(found, document["device"], encoding, width, length)
            lines += [_beside(row) for row in (peer, found.get((f"{encoding} {body}", width, length))) if row]
    return "\n".join([*dict.fromkeys(lines), "", f"{'; '.join(recorded)}."])


def _beside(row: dict[str, Any]) -> str:
    cells = [row["width"], row["length"], row["subject"]]
    for kind in ("forward", "both"):
        cells += [f"{row[f'{kind}_ms']['median']:.3f}", _two_places(row.get(f"{kind}_to_{BASELINE}"))]
    return "| " + " | ".join(map(str, [*cells, f"{row['peak_bytes'] / 2**20:.0f}"])) + " |"


def _note(document: dict[str, Any]) -> str:
    note = document["recipe"].get("note")
    return "" if note is None else f"; {note}"


def draw(document: dict[str, Any], path: Path) -> None:
    """Bars: the ratio of every implementation to plain flash-attn-4, forward with backward, a panel a width."""
    rows = [
        row
        for row in document["values"]["times"]
        if f"both_to_{BASELINE}" in row and not is_peer(row["subject"])
    ]
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


def main(reports: list[Path]) -> None:
    documents = [json.loads(report.read_text()) for report in reports]
    ours = documents[0]
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    draw(ours, FIGURE)
    tables: dict[str, Callable[[], str]] = {
        "ratios": lambda: ratios(ours, (BASELINE, PEER)),
        "alone": lambda: ratios(ours, (ALONE,), without="flash"),
        "memory": lambda: memory(ours),
        "cost": lambda: table(ours),
        "peers": lambda: others(documents),
    }
    page = PAGE.read_text()
    for marker, made in tables.items():
        page = with_table(page, made(), marker)
    PAGE.write_text(page)
    README.write_text(with_table(README.read_text(), speed(ours, reports[0]), "speed"))
    print(f"wrote {FIGURE.relative_to(ROOT)} and the tables of {PAGE.relative_to(ROOT)} and {README.name}")


if __name__ == "__main__":
    arguments = parser("attention_figure", __doc__)
    arguments.add_argument("reports", type=Path, nargs="+")
    main(arguments.parse_args().reports)

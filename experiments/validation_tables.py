"""results/validation, and the tables and the figure of docs/validation.md, from a run of validate_interpolation.

python -m experiments.validation_tables FOLDER    from a run
python -m experiments.validation_tables           the page again, from results/validation

Of each pair of hash-even name thresholds may be fitted; those of odd hash are what is reported.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.command import parser
from experiments.readme_figure import with_table
from experiments.validate_interpolation import BLOCKS, addition_pairs, letter_pairs
from phasewise.figures import figure
from phasewise.lens.prediction import predict_interpolation
from phasewise.lens.thresholds import FINE, KEPT, MISFIT
from phasewise.record import replacing

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "results" / "validation" / "interpolation.json"
PAGE = ROOT / "docs" / "validation.md"
FOLLOWED = ROOT / "results" / "validation" / "followed.json"
FIGURE = ROOT / "docs" / "figures" / "validation.svg"
LEARNED = 0.8
STUDENT = {13: 2.160}
OUTCOMES = ("works", "fails", "undecided")
NAMES = {
    "cosine": "S1 raised cosine",
    "window": "S2 window",
    "lag": "S3 exact lag",
    "blocks": "S4 blocks",
    "columns": "S6 addition",
}
COLOURS = {
    "cosine": "#00798c",
    "window": "#c9971c",
    "lag": "#d1495b",
    "blocks": "#7b5ea7",
    "columns": "#6c757d",
}


def collected(folder: Path) -> dict[str, Any]:
    """Everything a run has, pair by pair, with what is predicted at today's thresholds beside what was."""
    run, models, pairs, hashes = json.loads((folder / "run.json").read_text()), [], [], {}
    blocks = run["budget"]["blocks"]
    scales = {pair.name: pair.scale for pair in letter_pairs(blocks) + addition_pairs()}
    for file in sorted(folder.glob("*-predictions.json")):
        group = file.name.removesuffix("-predictions.json")
        said = json.loads(file.read_text())
        digest = fingerprint(said["predictions"])
        assert digest == said["sha256"], f"{file} is not what was written before measuring"
        measured = json.loads((folder / f"{group}-measured.json").read_text())
        own = json.loads((folder / f"{group}-models.json").read_text())
        models += own
        hashes[group] = {"sha256": digest, "predicted": said["written"], "measured": measured["ended"]}
        known = {(model["task"], model["seed"]): model["known"] for model in own}
        for prediction in said["predictions"]:
            name = prediction["pair"]
            rows = [row for row in measured["pairs"] if row["pair"] == name]
            rows = [row for row in rows if known[name.split()[0], row["seed"]] >= LEARNED]
            pairs.append(_joined(prediction, scales[name], rows, known))
    return {
        "values": {"pairs": pairs, "models": models, "hashes": hashes},
        "recipe": {"experiment": "validate_interpolation", **run["budget"], "kept": KEPT, "learned": LEARNED},
        "commit": run["commit"],
        "dirty": False,
        "device": run["device"],
        "versions": {"torch": run["torch"]},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def fingerprint(predictions: list[dict[str, Any]]) -> str:
    """The hash under which predictions were written before anything was measured."""
    return hashlib.sha256(json.dumps(predictions, sort_keys=True).encode()).hexdigest()


def _joined(
    prediction: dict[str, Any], scale: float, rows: list[dict[str, Any]], known: dict[tuple[str, int], float]
) -> dict[str, Any]:
    name = prediction["pair"]
    task = name.split()[0]
    kept = {
        how: [row[how]["known"] / known[task, row["seed"]] for row in rows]
        for how in ("interpolated", "unscaled")
    }
    now = predict_interpolation(
        scale, misfit=prediction["misfit"], width=prediction["width"], theta_eff=prediction["theta_eff"]
    )
    return {
        **prediction,
        "scale": scale,
        "calibrates": calibrates(name),
        "before": prediction["outcome"],
        "outcome": now.outcome,
        "from_data": now.from_data,
        "from_weights": now.from_weights,
        "seeds": [row["seed"] for row in rows],
        "kept": kept["interpolated"],
        "kept_unscaled": kept["unscaled"],
        **{
            column: {how: [row[how][column] for row in rows] for how in kept}
            for column in ("exact", "loss", "loss_of_all")
        },
        "measured": "works" if rows and np.mean(kept["interpolated"]) >= KEPT else "fails",
    }


def calibrates(name: str) -> bool:
    """Whether thresholds may be fitted on the pair of this name: a fixed half of all."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2 == 0


def fitted(values: Sequence[float], works: Sequence[bool]) -> tuple[float, float]:
    """The threshold up to which most of `values` work and beyond which most do not, and the share it gets right.

    >>> fitted([0.1, 0.2, 0.4, 0.5], [True, True, False, False])
    (0.30000000000000004, 1.0)
    """
    ordered = sorted(set(values))
    middles = [(a + b) / 2 for a, b in pairwise(ordered)]
    right = [
        float(np.mean([(value <= middle) == works for value, works in zip(values, works, strict=True)]))
        for middle in middles
    ]
    best = int(np.argmax(right))
    return middles[best], right[best]


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """c of y = c / x in the geometric mean; the free slope of ln y against ln x and its 95 % half-width.

    >>> [round(value, 6) for value in line([1, 2, 4] * 5, [3, 1.5, 0.75] * 5)]
    [3.0, -1.0, 0.0]
    """
    a, b = np.log(x), np.log(y)
    centred = a - a.mean()
    slope = float(centred @ b / (centred @ centred))
    rest = b - b.mean() - slope * centred
    free = len(a) - 2
    error = math.sqrt(float(rest @ rest) / free / float(centred @ centred))
    return float(np.exp((a + b).mean())), slope, STUDENT[free] * error


def confusion(pairs: Sequence[dict[str, Any]], column: str) -> dict[str, tuple[int, int]]:
    """For each predicted outcome: how many pairs worked, and how many failed."""

    def count(outcome: str, seen: str) -> int:
        return sum(pair[column] == outcome and pair["measured"] == seen for pair in pairs)

    return {outcome: (count(outcome, "works"), count(outcome, "fails")) for outcome in OUTCOMES}


def confusion_table(pairs: Sequence[dict[str, Any]]) -> str:
    """Markdown: before the run, and after a fit on half of the pairs, on the other half."""
    learned = [pair for pair in pairs if pair["seeds"]]
    fit, held = ([p for p in learned if p["calibrates"] is half] for half in (True, False))
    rows = [
        (f"before the run, all {len(learned)}", learned, "before"),
        (f"fitted, the {len(fit)} fitted on", fit, "outcome"),
        (f"**fitted, the other {len(held)}**", held, "outcome"),
        ("data alone, the same", held, "from_data"),
        ("weights alone, the same", held, "from_weights"),
    ]
    lines = [
        "| prediction, pairs | works: did, did not | fails: worked, failed | undecided: worked, failed | right |",
        "|---|---:|---:|---:|---:|",
    ]
    for title, chosen, column in rows:
        found = confusion(chosen, column)
        decided = sum(found["works"]) + sum(found["fails"])
        right = found["works"][0] + found["fails"][1]
        cells = [f"{found[outcome][0]}, {found[outcome][1]}" for outcome in OUTCOMES]
        lines.append(
            f"| {title} | {' | '.join(cells)} | {right} of {decided} ({right / max(1, decided):.0%}) |"
        )
    usable = [pair for pair in fit if not pair["pair"].startswith("columns")]
    other = [pair for pair in held if not pair["pair"].startswith("columns")]
    lines.append("")
    for column in ("misfit", "product"):
        threshold, right = fitted([p[column] for p in usable], [p["measured"] == "works" for p in usable])
        outside = np.mean([(p[column] <= threshold) == (p["measured"] == "works") for p in other])
        lines.append(
            f"One threshold on the {column}, fitted on the half of S1 to S4: {threshold:.3g}, right for "
            f"{right:.0%} there and {outside:.0%} of the other half.  "
        )
    failed = np.mean([pair["measured"] == "fails" for pair in held])
    lines.append(f"Saying that every pair fails would be right for {failed:.0%} of the other half.  ")
    near = sum(0.7 <= float(np.mean(pair["kept"])) <= 0.9 for pair in learned)
    lines.append(
        f"Between 0.7 and 0.9 of what was known, near the line of {KEPT}, lie {near} of {len(learned)}."
    )
    return "\n".join(lines)


def pairs_table(pairs: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a task, change and scale; its blocks side by side."""
    rows: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for pair in pairs:
        task, _, change = pair["pair"].split()
        rows.setdefault((task.partition(":")[0], change, pair["scale"]), []).append(pair)
    lines = [
        "| task | lags | s | misfit | said before | said, fitted | kept, by block | kept without scaling | worked |",
        "|---|---|---:|---:|---|---|---|---|---:|",
    ]
    for (kind, change, scale), some in rows.items():
        some = [pair for pair in some if pair["seeds"]]
        misfits = [pair["misfit"] for pair in some]
        cells = [
            NAMES[kind],
            change,
            f"{scale:g}",
            f"{min(misfits):.2f}"
            + (f" to {max(misfits):.2f}" if max(misfits) - min(misfits) > 0.005 else ""),
            *(_counted([pair[column] for pair in some]) for column in ("before", "outcome")),
            " ".join(f"{np.mean(pair['kept']):.2f}" for pair in some),
            " ".join(f"{np.mean(pair['kept_unscaled']):.2f}" for pair in some),
            f"{sum(pair['measured'] == 'works' for pair in some)} of {len(some)}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def addition_table(pairs: Sequence[dict[str, Any]]) -> str:
    """Markdown: sums that come out right, their loss and that of every token, with interpolation and without."""
    lines = [
        "| task | change | s | exact | without | loss of the sum | without | loss of every token | without |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for pair in pairs:
        task, _, change = pair["pair"].split()
        if pair["seeds"] and task.startswith("columns"):
            values = [
                " ".join(f"{value:.2f}" for value in pair[column][how])
                for column in ("exact", "loss", "loss_of_all")
                for how in ("interpolated", "unscaled")
            ]
            lines.append(f"| {task} | {change} | {pair['scale']:g} | {' | '.join(values)} |")
    return "\n".join(lines)


def _counted(outcomes: Sequence[str]) -> str:
    counts = {outcome: list(outcomes).count(outcome) for outcome in OUTCOMES if outcome in outcomes}
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {name}" for name, n in counts.items())


def calibration_table(models: Sequence[dict[str, Any]]) -> str:
    """Markdown: effective frequency against block length, both fits."""
    lines = [
        "| task | theta_eff B for B = 4, 8, 16, 32, 64 | c, slope -1 | free slope (95 %) | in use, of 32 | known |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for kind in ("cosine", "window", "lag", "blocks"):
        own = _of(models, kind)
        blocks = [_block(model) for model in own]
        products = [
            float(
                np.exp(
                    np.mean(
                        [np.log(m["theta_eff"] * b) for m, b in zip(own, blocks, strict=True) if b == block]
                    )
                )
            )
            for block in sorted(set(blocks))
        ]
        c, slope, half = line(blocks, [model["theta_eff"] for model in own])
        used = [model["participation"] for model in own]
        known = [model["known"] for model in own]
        lines.append(
            f"| {NAMES[kind]} | {' / '.join(f'{value:.2g}' for value in products)} | {c:.2f} "
            f"| {slope:.2f} ± {half:.2f} | {min(used):.1f} to {max(used):.1f} | {min(known):.2f} to {max(known):.2f} |"
        )
    return "\n".join(lines)


def followed_table(moments: Sequence[dict[str, Any]]) -> str:
    """Markdown: effective frequency times block, and what is known, while models learn."""
    kinds = ("cosine", "window", "lag", "blocks")
    blocks = sorted({_block(model) for model in moments[0]["models"]})
    of = " / ".join(map(str, blocks))
    lines = [
        f"| steps | {' | '.join(f'{NAMES[kind]}, B = {of} (known)' for kind in kinds)} |",
        "|---:|---|---|---|---|",
    ]
    for moment in moments:
        cells = []
        for kind in kinds:
            own = sorted(_of(moment["models"], kind), key=_block)
            products = " / ".join(f"{model['theta_eff'] * _block(model):.2g}" for model in own)
            known = " / ".join(f"{model['known']:.2f}" for model in own)
            cells.append(f"{products} ({known})")
        lines.append(f"| {moment['steps']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(models: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [model for model in models if model["task"].startswith(f"{kind}:")]


def _block(model: dict[str, Any]) -> int:
    return int(model["task"].split(":")[1])


def draw(values: dict[str, Any], path: Path) -> None:
    """Left: effective frequency against block length. Right: what is kept against the misfit."""
    with figure(path, 9, 3.6, style={"font.size": 8}) as drawn:
        left, right = drawn.subplots(1, 2)
        for kind in ("cosine", "window", "lag", "blocks"):
            own = _of(values["models"], kind)
            left.loglog(
                [_block(m) for m in own],
                [m["theta_eff"] for m in own],
                "o",
                color=COLOURS[kind],
                ms=4,
                label=NAMES[kind],
            )
        ends = np.array([BLOCKS[0], BLOCKS[-1]])
        left.loglog(ends, math.pi / ends, color="black", lw=0.8, ls="--")
        left.text(8, 1.2 * math.pi / 8, "pi / B")
        left.set_xlabel("block B, tokens")
        left.set_ylabel("effective frequency, radians per token")
        for kind in NAMES:
            own = [p for p in values["pairs"] if p["pair"].startswith(f"{kind}:") and p["seeds"]]
            kept = [max(-1.0, float(np.mean(pair["kept"]))) for pair in own]
            right.plot([p["misfit"] for p in own], kept, "o", color=COLOURS[kind], ms=4, label=NAMES[kind])
        right.axhline(KEPT, color="black", lw=0.8)
        right.axvline(MISFIT, color="black", lw=0.8, ls="--")
        right.set_xlabel("misfit of the dilated kernel")
        right.set_ylabel("share of what was known that is kept (at least -1)")
        left.set_xticks(BLOCKS, [str(block) for block in BLOCKS])
        left.minorticks_off()
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        drawn.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)


def main(folder: Path | None) -> None:
    if folder is not None:
        with replacing(RESULT) as unfinished:
            unfinished.write_text(json.dumps(_short(collected(folder)), indent=1, allow_nan=False) + "\n")
        for file in folder.glob("*-predictions.json"):
            with replacing(RESULT.with_name(file.name)) as unfinished:
                unfinished.write_bytes(file.read_bytes())
    values = json.loads(RESULT.read_text())["values"]
    tables: dict[str, Callable[[], str]] = {
        "confusion": lambda: confusion_table(values["pairs"]),
        "pairs": lambda: pairs_table(values["pairs"]),
        "addition": lambda: addition_table(values["pairs"]),
        "calibration": lambda: calibration_table(values["models"]),
        "followed": lambda: followed_table(json.loads(FOLLOWED.read_text())["values"]),
    }
    page = PAGE.read_text()
    for marker, table in tables.items():
        page = with_table(page, table(), marker)
    PAGE.write_text(page)
    draw(values, FIGURE)
    print(f"wrote {PAGE.relative_to(ROOT)} and {FIGURE.relative_to(ROOT)}; fine above {FINE:.2f}")


def _short(value: Any) -> Any:
    """The same with numbers of five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    arguments = parser("validation_tables", __doc__)
    arguments.add_argument("folder", type=Path, nargs="?")
    main(arguments.parse_args().folder)

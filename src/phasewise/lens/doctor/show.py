"""A diagnosis on the terminal and in a report."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phasewise.lens.charts import Axis, Figure, Line, Lines
from phasewise.lens.doctor.diagnosis import Diagnosis, Finding, Number
from phasewise.lens.doctor.repair import Repair

COLOUR = {"wrong": "bold red", "warning": "yellow", "note": "cyan"}


def table(diagnosis: Diagnosis) -> RenderableType:
    """Findings with their numbers, the worst first, then what passed and what was not made."""
    shown: list[RenderableType] = []
    if diagnosis.findings:
        findings = Table(show_lines=True)
        findings.add_column("check", min_width=8)
        findings.add_column("numbers", overflow="fold", ratio=2)
        findings.add_column("what it is, and the remedy", overflow="fold", ratio=3)
        for finding in diagnosis.findings:
            findings.add_row(
                Text.assemble((finding.severity, COLOUR[finding.severity]), "\n", finding.check),
                Text("\n".join(f"{name}: {number(value)}" for name, value in finding.evidence.items())),
                Text(f"{finding.said}.\nRemedy: {finding.remedy}."),
            )
        shown.append(findings)
    for outcome in ("passed", "not made"):
        shown += [Text(f"{outcome}: {said}") for said in _grouped(diagnosis, outcome)]
    shown.append(Text(verdict(diagnosis)))
    return Group(*shown)


def _grouped(diagnosis: Diagnosis, outcome: str) -> list[str]:
    """Checks of one outcome, those with the same words in one line."""
    by_words: dict[str, list[str]] = {}
    for check in diagnosis.checks:
        if check.outcome == outcome:
            by_words.setdefault(check.said, []).append(check.name)
    return [", ".join(names) + (f" ({said})" if said else "") for said, names in by_words.items()]


def verdict(diagnosis: Diagnosis) -> str:
    """One line: how many findings of each kind."""
    counts = {level: sum(f.severity == level for f in diagnosis.findings) for level in COLOUR}
    found = (
        f"{counts['wrong']} wrong, {_count(counts['warning'], 'warning')}, {_count(counts['note'], 'note')}"
    )
    made = sum(check.outcome != "not made" for check in diagnosis.checks)
    where = f"{diagnosis.checkpoint} at {diagnosis.length:,} tokens"
    return f"{where}: {found}; {made} of {len(diagnosis.checks)} checks made"


def summary(diagnosis: Diagnosis) -> dict[str, str]:
    """The table at the top of a report."""
    trained = diagnosis.trained_length
    said = {
        "verdict": verdict(diagnosis),
        "model": f"{diagnosis.family}{'' if diagnosis.dtype is None else f', in {diagnosis.dtype}'}",
        "trained length": "not known" if trained is None else f"{trained:,} tokens",
    }
    for place, finding in enumerate(diagnosis.findings, 1):
        said[f"{place}. {finding.severity}: {finding.check}"] = _in_words(finding)
    for outcome in ("passed", "not made"):
        said[outcome] = "; ".join(_grouped(diagnosis, outcome))
    return {name: words for name, words in said.items() if words}


def figures(diagnosis: Diagnosis) -> list[Figure]:
    """What was measured: phase error by position, turns of each frequency."""
    drawn = []
    if diagnosis.phase_error is not None:
        curve = diagnosis.phase_error
        rows = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if x > 0]
        line = Line(name=curve.name, x=[x for x, _ in rows], y=[y for _, y in rows])
        chart = Lines(
            x=Axis(title="position", scale="log"),
            y=Axis(title="largest phase error, radians", scale="log"),
            lines=[line],
        )
        text = (
            "How far the phase of the worst frequency is from position times rate in float64. It grows with "
        )
        text += "position where rates or products are rounded; in half precision it starts at the rounding of cosines."
        drawn.append(Figure(name="phases", title="Phase error by position", text=text, views={"": chart}))
    if diagnosis.turns:
        lines = [Line(name=curve.name, x=curve.x, y=curve.y) for curve in diagnosis.turns]
        lines.append(
            Line(name="one turn", x=[0, max(line.x[-1] for line in lines)], y=[1.0, 1.0], dash="dot")
        )
        chart = Lines(x=Axis(title="frequency"), y=Axis(title="turns", scale="log"), lines=lines)
        text = "Frequencies below one turn in training have been seen in part only; where the served line lies above "
        text += "the trained one there, they meet phases that training never showed."
        drawn.append(Figure(name="turns", title="Turns of each frequency", text=text, views={"": chart}))
    return drawn


def repaired(done: Repair) -> str:
    """What --fix did, a line each."""
    lines = [f"changed: {line}" for line in done.changed] or ["changed: nothing"]
    return "\n".join([*lines, *(f"left alone: {line}" for line in done.left)])


def number(value: Number) -> str:
    """Whole numbers with commas, others to four digits; everything else as it is."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return f"{value:,.0f}" if isinstance(value, float) or type(value) is int else str(value)


def _in_words(finding: Finding) -> str:
    evidence = "; ".join(f"{name} {number(value)}" for name, value in finding.evidence.items())
    return f"{finding.said}. {evidence}. Remedy: {finding.remedy}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"

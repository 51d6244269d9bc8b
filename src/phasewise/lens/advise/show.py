"""Advice as a table, in words, and as the figures of its report."""

from __future__ import annotations

import json
import math

from rich import box
from rich.table import Table

from phasewise.lens.advise.advice import Advice, Advised
from phasewise.lens.advise.measured import by_position
from phasewise.lens.charts import Axis, Figure, HeatMap, Line, Lines


def table(advice: Advice) -> Table:
    """One row a setting: predicted rank, loss before and after, passkeys found."""
    caption = (
        f"nats a token at {advice.trained} and {advice.wanted} tokens, and passkeys found at {advice.wanted}; "
        "rank as predicted"
    )
    shown = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("setting", no_wrap=True)
    for title in ("rank", f"at {advice.trained}", f"at {advice.wanted}", "found"):
        shown.add_column(title, justify="right", no_wrap=True)
    shown.add_column("confidence")
    for one in advice.options:
        option, measured = one.option, one.measured
        rank = "refused" if option.refused else str(option.rank)
        cells = ("-", "-", "-")
        if measured is not None:
            found = measured.found(advice.wanted)
            losses = (f"{measured.loss(length):.3f}" for length in (advice.trained, advice.wanted))
            cells = (*losses, "-" if found is None else f"{found:.0%}")
        shown.add_row(option.kind, rank, *cells, option.confidence)
    if advice.as_it_is is not None:
        losses = [f"{advice.as_it_is.loss(length):.3f}" for length in (advice.trained, advice.wanted)]
        found = advice.as_it_is.found(advice.wanted)
        shown.add_row("as it is", "-", *losses, "-" if found is None else f"{found:.0%}", "-")
    return shown


def words(advice: Advice) -> str:
    """The verdict, its reasons, disagreements, and what to paste."""
    lines = [f"Verdict: {advice.verdict.kind}" + ("" if advice.verdict.measured else " (predicted)")]
    lines += [f"  {reason}" for reason in advice.verdict.reasons]
    lines += [f"Against the prediction: {said}" for said in advice.disagreements]
    best = next((one for one in advice.options if one.option.kind == advice.verdict.option), None)
    if best is not None and best.settings is not None and best.option.kind != "leave alone":
        lines += ["", f"Settings of {best.option.kind}:", *(f"  {line}" for line in pasteable(best))]
    lines += ["", advice.limits]
    return "\n".join(lines)


def pasteable(advised: Advised) -> list[str]:
    """A line an engine, ready to paste, and the notes."""
    settings = advised.settings
    assert settings is not None
    lines = []
    if settings.transformers is not None:
        lines.append(f"transformers config.json: {json.dumps(settings.transformers)}")
    for name, flags in (("vllm serve", settings.vllm), ("llama.cpp", settings.llama_cpp)):
        if flags is not None:
            lines.append(f"{name}: {flags}")
    lines.append(f"phasewise rule: {settings.phasewise.model_dump_json(exclude_none=True)}")
    return lines + [f"{engine}: {note}" for engine, note in settings.notes.items()]


def summary(advice: Advice) -> dict[str, str]:
    """The head of the report."""
    lines = {
        "verdict": advice.verdict.kind + ("" if advice.verdict.measured else " (predicted, not measured)"),
        "why": "; ".join(advice.verdict.reasons),
        "lengths": f"{advice.trained} tokens as it is, {advice.wanted} wanted",
        "data": f"{advice.corpus}, {advice.split} split",
    }
    if advice.disagreements:
        lines["prediction and measurement"] = "; ".join(advice.disagreements)
    if advice.evidence is not None:
        profile = advice.evidence.profile
        lines["profile"] = f"{profile.verdict.kind}: {'; '.join(profile.verdict.reasons)}"
        effective = advice.evidence.theta_eff
        if effective is not None:
            lines["effective frequency"] = f"{effective:.4g} radians a token"
    for one in advice.options:
        option = one.option
        said = [f"refused: {option.refused}"] if option.refused else [f"predicted {_ordinal(option.rank)}"]
        if one.measured is not None:
            losses = (f"{loss.loss:.3f} at {loss.length}" for loss in one.measured.losses)
            said.append(f"measured {', '.join(losses)} nats a token")
        said += option.reasons
        if one.settings is not None and option.kind != "leave alone":
            said += pasteable(one)
        lines[option.kind] = "; ".join(said)
    lines["limits"] = advice.limits
    return lines


def figures(advice: Advice) -> list[Figure]:
    """Loss by length, loss by position, passkeys by length and depth, and the grids."""
    tried = [(one.option.kind, one.measured) for one in advice.options if one.measured is not None]
    if advice.as_it_is is not None:
        tried.append(("leave alone", advice.as_it_is))
    found = []
    if tried:
        found += [
            Figure(
                name="length",
                title="Loss by length",
                text="The same held-out tokens in windows of each length. A setting is worth its length where "
                "its line is no higher than that of the unchanged checkpoint at its own.",
                views={
                    "": Lines(
                        x=Axis(title="window, tokens", scale="log"),
                        y=Axis(title="loss, nats a token"),
                        lines=[
                            Line(
                                name=kind,
                                x=[loss.length for loss in measured.losses],
                                y=[loss.loss for loss in measured.losses],
                            )
                            for kind, measured in tried
                        ],
                    )
                },
            ),
            Figure(
                name="position",
                title=f"Loss by position within {advice.wanted} tokens",
                text="Where in its window a token stands; more is seen further right.",
                views={
                    "": Lines(
                        x=Axis(title="place in the window, tokens"),
                        y=Axis(title="loss, nats a token"),
                        lines=[
                            Line(name=kind, x=places, y=losses)
                            for kind, measured in tried
                            for places, losses in [by_position(measured, advice.wanted)]
                        ],
                    )
                },
            ),
        ]
    if tried and tried[0][1].retrieval is not None:
        found.append(
            Figure(
                name="passkeys",
                title="Passkeys found, by length and depth",
                text="The share of five-digit numbers repeated exactly, by where they stood: 0 at the start.",
                views={kind: _retrieval(measured) for kind, measured in tried},
            )
        )
    if advice.evidence is not None:
        found.append(_grids(advice))
    return found


def _retrieval(measured) -> HeatMap:
    cells = measured.retrieval.cells
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    share = {(cell.length, cell.depth): cell.exact for cell in cells}
    return HeatMap(
        x=Axis(title="depth"),
        y=Axis(title="tokens"),
        value=Axis(title="found"),
        columns=[f"{depth:g}" for depth in depths],
        rows=[str(length) for length in lengths],
        z=[[share.get((length, depth), math.nan) for depth in depths] for length in lengths],
        low=0.0,
    )


def _grids(advice: Advice) -> Figure:
    assert advice.evidence is not None
    lines = [
        Line(
            name=one.option.kind,
            x=list(range(len(one.option.rates))),
            y=[2 * math.pi / rate if rate > 0 else math.nan for rate in one.option.rates],
            dash="solid" if one.option.kind in ("leave alone", advice.verdict.option) else "dot",
        )
        for one in advice.options
        if one.option.rates
    ]
    places = [0, len(advice.evidence.rates) - 1]
    for name, length in (("trained length", advice.trained), ("wanted length", advice.wanted)):
        lines.append(Line(name=name, x=places, y=[length, length], dash="dash"))
    views = {
        "wavelengths": Lines(
            x=Axis(title="frequency, the fastest first"),
            y=Axis(title="tokens a turn", scale="log"),
            lines=lines,
        )
    }
    if advice.evidence.share is not None:
        views["use"] = Lines(
            x=Axis(title="frequency, the fastest first"),
            y=Axis(title="share of the energy"),
            lines=[
                Line(
                    name="use",
                    x=list(range(len(advice.evidence.share))),
                    y=list(advice.evidence.share),
                )
            ],
        )
    return Figure(
        name="grid",
        title="Old and new rates, as tokens a turn",
        text="Above the trained length a frequency makes no whole turn in training: served further, it shows "
        "phases that the model has never seen. The second view says how much each frequency is used.",
        views=views,
    )


def _ordinal(rank: int | None) -> str:
    return "unranked" if rank is None else f"number {rank}"

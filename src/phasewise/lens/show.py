"""An inspection for the eye: its figures, its summary in words, its table on a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median

from rich.table import Table

from phasewise.lens.charts import Axis, Figure, HeatMap, Line, Lines
from phasewise.lens.inspect import Inspection
from phasewise.lens.phase import Phase
from phasewise.lens.spectrum import Spectrum, Use
from phasewise.model.sight import Bound, Sight

LEAST = 0.01  # shares below a hundredth of the uniform one get the darkest colour
FORMS: dict[str, Callable[[Spectrum], Use | None]] = {
    "all pairs of tokens": lambda layer: layer.mean,
    "keys up to the query": lambda layer: layer.causal,
    "weighted by attention": lambda layer: layer.weighted,
}
EXCESS = Axis(title="share / uniform share", scale="log")


def figures(found: Inspection) -> list[Figure]:
    """The figures of a report: those of spectra, of PoPE and of TAPA, as far as there are such layers."""
    spectra = [layer for layer in found.layers if isinstance(layer, Spectrum)]
    phases = [layer for layer in found.layers if isinstance(layer, Phase)]
    polar = [layer for layer in spectra if layer.polar is not None]
    drawn = _of_spectra(found, spectra) if spectra else []
    return drawn + (_of_pope(polar) if polar else []) + (_of_tapa(phases) if phases else [])


def summary(found: Inspection) -> dict[str, str]:
    """What the table at the top of a report says."""
    spectra = [layer for layer in found.layers if isinstance(layer, Spectrum)]
    said = {
        "model": f"{found.family}, {found.parameters:,} parameters, read in {found.dtype}",
        "layers": f"{len(found.layers)} of {found.model_layers} with rates or a phase",
        "trained length": "not known" if found.trained_length is None else f"{found.trained_length:,} tokens",
        "data": f"{found.corpus}, {found.split} split, {found.tokens:,} tokens, {found.context:,} at a time",
    }
    if found.wanted_length is not None:
        said["wanted length"] = f"{found.wanted_length:,} tokens"
    bound = Bound.of(Sight(rates=True, window=layer.window) for layer in spectra)
    if bound is not None and bound.window <= (found.trained_length or bound.window):
        said["windows"] = (
            f"no layer with rates sees more than {bound.window:,} tokens: a rule for longer contexts would change what "
            "these layers do within their windows, and reach nothing beyond"
        )
    if spectra:
        waves = [2 * math.pi / theta for layer in spectra if (theta := layer.mean.theta_eff)]
        used = [use / len(layer.rates) for layer in spectra if (use := layer.mean.participation)]
        if waves:
            said["effective wavelength"] = f"{_length(median(waves))} tokens (median layer)"
            said["frequencies in use"] = f"{median(used):.0%} (median layer)"
    arguments = [head.rms for layer in found.layers if isinstance(layer, Phase) for head in layer.heads]
    if arguments:
        said["phase argument"] = f"{median(arguments):.3g} radians at distance 1 (rms, median head)"
    frozen = [layer.polar.frozen for layer in spectra if layer.polar is not None]
    if frozen:
        said["frozen phases"] = f"{sum(frozen) / len(frozen):.1%}"
    return said


def table(found: Inspection) -> Table:
    """A line a layer: wavelengths in tokens, how many frequencies are in use, where the largest share lies and
    how large it is, the coherent part, and the part of channels that do not turn.
    """
    caption = "\n".join(f"{name}: {said}" for name, said in summary(found).items())
    shown = Table(caption=caption, caption_justify="left")
    spectra = [layer for layer in found.layers if isinstance(layer, Spectrum)]
    phases = [layer for layer in found.layers if isinstance(layer, Phase)]
    shown.add_column("layer", justify="right")
    if spectra:
        columns = ("theta_eff", "wavelength", "in use", "peak at", "peak", "coherent", "still")
        for column in columns:
            shown.add_column(column, justify="right")
    if phases:
        for column in ("argument, rms", f"gate at {phases[0].distances[-1]}", "change by distance"):
            shown.add_column(column, justify="right")
    for layer in found.layers:
        cells = [_spectrum_cells(layer) if isinstance(layer, Spectrum) else [""] * 7] if spectra else []
        cells += [_phase_cells(layer) if isinstance(layer, Phase) else [""] * 3] if phases else []
        shown.add_row(str(layer.layer), *(cell for group in cells for cell in group))
    return shown


def _spectrum_cells(layer: Spectrum) -> list[str]:
    use = layer.mean
    if use.theta_eff is None or use.participation is None:
        return ["no energy", "", "", "", "", "", ""]
    top = max(range(len(use.share)), key=use.share.__getitem__)
    return [
        f"{use.theta_eff:.3g}",
        _length(2 * math.pi / use.theta_eff),
        f"{use.participation:.1f}/{len(use.share)}",
        _length(layer.wavelengths[top]),
        f"{use.share[top]:.0%}",
        f"{layer.coherent:.0%}",
        f"{use.zero_share:.0%}",
    ]


def _phase_cells(layer: Phase) -> list[str]:
    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(layer.heads)

    return [
        f"{mean(head.rms for head in layer.heads):.3g}",
        f"{mean(head.gate[-1] for head in layer.heads):.2f}",
        f"{mean(head.change[-1] for head in layer.heads):.2f}",
    ]


def _of_spectra(found: Inspection, spectra: Sequence[Spectrum]) -> list[Figure]:
    same = len({layer.rates for layer in spectra}) == 1
    widest = max(spectra, key=lambda layer: len(layer.rates))
    notes = [_notes(layer) for layer in (spectra[:1] if same else spectra)]

    def over_layers(value: Axis, z: Sequence[Sequence[float]], low: float) -> HeatMap:
        width = len(widest.rates)
        return HeatMap(
            x=_frequency(same),
            y=Axis(title="layer"),
            value=value,
            columns=_columns(widest, same),
            rows=[str(layer.layer) for layer in spectra],
            z=[[*row, *[math.nan] * (width - len(row))] for row in z],
            notes=[[*row, *[""] * (width - len(row))] for row in notes],
            low=low,
        )

    forms = {
        name: over_layers(EXCESS, [use.excess for use in uses], LEAST)
        for name, form in FORMS.items()
        if len(uses := [use for layer in spectra if (use := form(layer)) is not None]) == len(spectra)
    }
    heads = {
        f"layer {layer.layer}": _over_heads(layer, EXCESS, [head.mean.excess for head in layer.heads], LEAST)
        for layer in spectra
    }
    coherent = over_layers(Axis(title="coherent part"), [_coherent(layer) for layer in spectra], 0.0)
    drawn = [
        Figure(
            name="layers",
            title="Energy by layer and frequency",
            text="How much more (bright) or less (dark) than an even share of its energy a layer gives each "
            "frequency, on average over heads. Short wavelengths resolve neighbours; long ones tell apart "
            "what is far, without wrapping.",
            views=forms,
        ),
        Figure(
            name="heads",
            title="Energy by head and frequency",
            text="The same for each query head of one layer, over all pairs of tokens.",
            views=heads,
        ),
        Figure(
            name="wavelength",
            title="Effective wavelength by layer",
            text="Where a layer's energy lies on average (geometric mean); shaded: from the lowest to the "
            "highest head.",
            views={"": _wavelengths(found, spectra)},
        ),
        Figure(
            name="coherent",
            title="What is left without content",
            text="The part of each frequency's energy that stays when queries and keys are averaged over "
            "tokens: near 1, the frequency says where to look whatever the tokens are.",
            views={"": coherent},
        ),
    ]
    return drawn + ([_turns(found, spectra)] if spectra[0].turns_trained or spectra[0].turns_wanted else [])


def _of_pope(spectra: Sequence[Spectrum]) -> list[Figure]:
    phases, queries, keys = {}, {}, {}
    for layer in spectra:
        polar, name = layer.polar, f"layer {layer.layer}"
        assert polar is not None
        phases[name] = _over_heads(layer, Axis(title="phase, radians"), polar.phase, None)
        magnitude = Axis(title="mean magnitude", scale="log")
        queries[f"queries, {name}"] = _over_heads(layer, magnitude, polar.query_magnitude, None)
        keys[f"keys, {name}"] = _over_heads(layer, magnitude, polar.key_magnitude, None)
    return [
        Figure(
            name="phases",
            title="Learned phases",
            text="The phase that PoPE adds at each frequency: divided by the rate, it is the distance in tokens "
            "at which the frequency helps most.",
            views=phases,
        ),
        Figure(
            name="magnitudes",
            title="Mean magnitudes",
            text="What content gives each frequency on average.",
            views=queries | keys,
        ),
    ]


def _of_tapa(layers: Sequence[Phase]) -> list[Figure]:
    distance = Axis(title="distance, tokens", scale="log")
    curves = {}
    for layer in layers:
        lines = []
        for name, quantity in (
            ("mean of the cosine", "gate"),
            ("its spread over contents", "spread"),
            ("its change since distance 1", "change"),
        ):
            curve = list(zip(*(getattr(head, quantity) for head in layer.heads), strict=True))
            mean = [sum(values) / len(values) for values in curve]
            low, high = [min(values) for values in curve], [max(values) for values in curve]
            lines.append(Line(name=name, x=layer.distances, y=mean, low=low, high=high))
        curves[f"layer {layer.layer}"] = Lines(x=distance, y=Axis(title="cosine"), lines=lines)
    arguments = {
        f"layer {layer.layer}": HeatMap(
            x=Axis(title="argument at distance 1, radians"),
            y=Axis(title="head"),
            value=Axis(title="share of pairs", scale="log"),
            columns=[_short(middle) for middle in _middles(layer.bins)],
            rows=[str(head) for head in range(len(layer.heads))],
            z=[head.argument for head in layer.heads],
            low=1e-4,
        )
        for layer in layers
    }
    return [
        Figure(
            name="distance",
            title="How distance changes TAPA's cosine",
            text="Mean over heads, shaded from the lowest to the highest. A falling mean is a bias towards near "
            "keys; a change near 0 says that distance does nothing, near 1 that it decides everything.",
            views=curves,
        ),
        Figure(
            name="arguments",
            title="The argument of TAPA's cosine",
            text="How it is spread over pairs of tokens; at distance r it is r^alpha times as wide.",
            views=arguments,
        ),
    ]


def _over_heads(layer: Spectrum, value: Axis, z: Sequence[Sequence[float]], low: float | None) -> HeatMap:
    return HeatMap(
        x=_frequency(True),
        y=Axis(title="head"),
        value=value,
        columns=_columns(layer, True),
        rows=[str(head) for head in range(len(z))],
        z=z,
        notes=[_notes(layer)],
        low=low,
    )


def _wavelengths(found: Inspection, spectra: Sequence[Spectrum]) -> Lines:
    def wave(theta: float | None) -> float:
        return math.nan if theta is None else 2 * math.pi / theta

    x = [layer.layer for layer in spectra]
    lines = []
    for name, form in FORMS.items():
        uses = [form(layer) for layer in spectra]
        if all(use is not None for use in uses):
            y = [wave(use.theta_eff) for use in uses if use is not None]
            lines.append(Line(name=name, x=x, y=y))
    heads = [[wave(head.mean.theta_eff) for head in layer.heads] for layer in spectra]
    known = [[value for value in row if math.isfinite(value)] or [math.nan] for row in heads]
    first = lines[0]
    lines[0] = Line(name=first.name, x=x, y=first.y, low=list(map(min, known)), high=list(map(max, known)))
    if found.trained_length is not None:
        level = [found.trained_length] * len(x)
        lines.append(Line(name="trained length", x=x, y=level, dash="dot"))
    return Lines(x=Axis(title="layer"), y=Axis(title="wavelength, tokens", scale="log"), lines=lines)


def _turns(found: Inspection, spectra: Sequence[Spectrum]) -> Figure:
    views = {}
    for layer in spectra:
        lines = []
        for name, length, turns in (
            ("trained", found.trained_length, layer.turns_trained),
            ("wanted", found.wanted_length, layer.turns_wanted),
        ):
            if turns is not None:
                lines.append(Line(name=f"{name} length, {length:,}", x=list(range(len(turns))), y=turns))
        lines.append(Line(name="one turn", x=[0, len(layer.rates) - 1], y=[1.0, 1.0], dash="dot"))
        view = Lines(x=Axis(title="frequency"), y=Axis(title="turns", scale="log"), lines=lines)
        if view not in views.values():
            views[f"layer {layer.layer} on" if views else f"layer {layer.layer}"] = view
    return Figure(
        name="turns",
        title="Full turns of each frequency",
        text="A frequency that makes less than one turn within the trained length was never seen whole; those "
        "that pass one turn at the wanted length for the first time are what extending has to deal with.",
        views=views,
    )


def _coherent(layer: Spectrum) -> list[float]:
    """Each frequency's coherent part over the heads' energies."""
    parts = []
    for place in range(len(layer.rates)):
        energy = [head.mean.energy * head.mean.share[place] for head in layer.heads]
        whole = sum(energy)
        kept = sum(e * head.coherent[place] for e, head in zip(energy, layer.heads, strict=True))
        parts.append(kept / whole if whole > 0 else math.nan)
    return parts


def _notes(layer: Spectrum) -> list[str]:
    notes = []
    for place, (rate, wave) in enumerate(zip(layer.rates, layer.wavelengths, strict=True)):
        note = f"frequency {place}: {rate:.3g} radians a token, wavelength {_length(wave)} tokens"
        for name, turns in (("trained", layer.turns_trained), ("wanted", layer.turns_wanted)):
            if turns is not None:
                note += f"<br>{turns[place]:,.3g} turns in the {name} length"
        notes.append(note)
    return notes


def _columns(layer: Spectrum, same: bool) -> list[str]:
    """Wavelengths where every row has the same, else numbers."""
    return [_short(wave) if same else str(place) for place, wave in enumerate(layer.wavelengths)]


def _length(tokens: float) -> str:
    """Four digits, as 6.283 or 27,660."""
    return f"{float(f'{tokens:.4g}'):,.10g}"


def _short(tokens: float) -> str:
    """Three digits, as 6.28, 627 or 27.7k."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(tokens) >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.3g}"


def _frequency(same: bool) -> Axis:
    return Axis(title="wavelength, tokens" if same else "frequency")


def _middles(edges: Sequence[float]) -> list[float]:
    return [(low + high) / 2 for low, high in pairwise(edges)]

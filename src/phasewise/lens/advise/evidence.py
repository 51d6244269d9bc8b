"""What is known before any setting is tried: the checkpoint's rates and their use, and what the data ask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.progress import Progress

from phasewise.data import Corpus
from phasewise.frequencies import AnyFrequencies, Geometric
from phasewise.lens.advise.grid import reaching, share_beyond
from phasewise.lens.advise.published import correction_range
from phasewise.lens.dependency import dependency
from phasewise.lens.granularity import BY_UNIT, sequences
from phasewise.lens.inspect import Inspection
from phasewise.lens.prediction import Prediction, predict_interpolation
from phasewise.lens.profile import DISTANCES, Profiled, read, spread
from phasewise.lens.spectrum import Spectrum, Values
from phasewise.lens.thresholds import LONG_INPUT
from phasewise.lens.width import Kernel, kernel


class Evidence(Values):
    """The numbers that advice is drawn from. Rates are in radians a token, lengths and widths in tokens.

    rule, rates: what the checkpoint serves at its own length. share: each rate's part of the energy, the mean
    over heads and over the layers that see the whole context; None where it was not measured.
    theta_eff: exp(sum share ln rate). critical: the first pair without a whole turn within `trained`.
    ramp: YaRN's, for geometric rates. input_length: the 95th percentile of the corpus's documents.
    profile: of the corpus, in the model's tokens. beyond: of its dependences in a window of the wanted length,
    the share beyond the trained one; None where too much lies below the noise to tell.
    interpolation: what dividing every rate by the stretch is expected to do.
    """

    rule: AnyFrequencies
    rates: tuple[float, ...]
    trained: int
    wanted: int
    share: tuple[float, ...] | None
    theta_eff: float | None
    critical: int
    ramp: tuple[int, int] | None
    input_length: int
    profile: Profiled
    beyond: float | None
    interpolation: Prediction

    @property
    def stretch(self) -> float:
        """How many times the trained length is wanted."""
        return self.wanted / self.trained


@dataclass(frozen=True)
class DataNeed:
    """A corpus's dependencies in the tokens of a model, with the kernel itself."""

    profile: Profiled
    kernel: Kernel | None
    input_length: int


def need_of(
    corpus: Corpus,
    longest: int,
    *,
    progress: Progress,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> DataNeed:
    """Measure the training split's dependencies up to `longest` tokens, or as far as its documents reach."""
    cut = sequences(corpus, BY_UNIT[corpus.unit][0])
    reach = max(1, min(longest, int(cut.lengths.max()) - 1))
    bar = progress.add_task(f"{corpus.name}, dependencies", total=DISTANCES)
    curve = dependency(
        cut.classes,
        cut.lengths,
        distances=spread(reach),
        seed=seed,
        on_distance=lambda done: progress.update(bar, completed=done),
        stop=stop,
    )
    progress.remove_task(bar)
    if stop():
        raise KeyboardInterrupt
    return DataNeed(read(curve), kernel(curve), int(np.quantile(cut.lengths, LONG_INPUT)))


def weigh(
    rule: AnyFrequencies,
    *,
    channels: int,
    trained: int,
    wanted: int,
    inspection: Inspection | None,
    need: DataNeed,
) -> Evidence:
    """Put together what was measured. Rates are those that the rule has at the trained length."""
    rates = rule.at(trained, channels).rates(channels).tolist()
    shares = None if inspection is None else _shares(inspection, rates)
    theta_eff = None
    if shares is not None:
        turning = [(share, rate) for share, rate in zip(shares, rates, strict=True) if rate > 0]
        theta_eff = math.exp(sum(share * math.log(rate) for share, rate in turning))
    slow = [place for place, rate in enumerate(rates) if rate * trained < 2 * math.pi]
    profile, beyond = need.profile, None
    if need.kernel is not None and profile.width.kind != "hidden":
        reached = reaching(need.kernel, profile.power_law, wanted)
        beyond = share_beyond(reached, trained=trained, wanted=wanted)
    return Evidence(
        rule=rule,
        rates=tuple(rates),
        trained=trained,
        wanted=wanted,
        share=shares,
        theta_eff=theta_eff,
        critical=slow[0] if slow else channels,
        ramp=correction_range(channels, rule.base, trained) if isinstance(rule, Geometric) else None,
        input_length=need.input_length,
        profile=profile,
        beyond=beyond,
        interpolation=predict_interpolation(
            wanted / trained,
            dilation=profile.dilation,
            unevenness=profile.unevenness,
            width=profile.width.width or None,
            theta_eff=theta_eff,
        ),
    )


def _shares(inspection: Inspection, rates: list[float]) -> tuple[float, ...] | None:
    """The mean share of each rate, 0 for those that do not turn; of layers with these rates and no window."""
    turning = [place for place, rate in enumerate(rates) if rate > 0]
    layers = [
        layer
        for layer in inspection.layers
        if isinstance(layer, Spectrum) and layer.window is None and len(layer.rates) == len(turning)
    ]
    if not layers:
        return None
    mean = np.mean([layer.mean.share for layer in layers], axis=0)
    shares = np.zeros(len(rates))
    shares[turning] = mean / mean.sum()
    return tuple(shares.tolist())

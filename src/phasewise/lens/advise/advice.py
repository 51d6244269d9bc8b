"""advise: every setting for a longer context, predicted, then measured; the verdict follows the measurement."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.progress import Progress

from phasewise.data import Corpus
from phasewise.hf.language_model import LanguageModel, open_language_model
from phasewise.lens.advise.evidence import Evidence, need_of, weigh
from phasewise.lens.advise.measured import Bench, Measured, Trial
from phasewise.lens.advise.options import Kind, Option, options
from phasewise.lens.advise.settings import Settings, own_settings, settings
from phasewise.lens.inspect import Inspection, Request, inspect
from phasewise.lens.spectrum import Values
from phasewise.lens.thresholds import MISSED, SAME, TUNABLE
from phasewise.model.reading import require_count
from phasewise.model.sight import Bound, Sight
from phasewise.progress import bars

VerdictKind = Literal[Kind, "needs fine-tuning", "will not work", "nothing to scale"]
RATES_READ = 8192
OWN = "phasewise"
NO_RATES = (
    "its positions have no rates: there is nothing to scale, it serves longer inputs as it is or not at all"
)

LIMITS = (
    "Mutual information between two tokens says nothing on retrieval; passkeys are one narrow form of it. "
    "Losses hold for this text. The predicted order comes from shares of energy, not from losses."
)


class Advised(Values):
    """A setting with what to paste and what it did; measured: None where it was refused or not reached."""

    option: Option
    settings: Settings | None
    measured: Measured | None


class Verdict(Values):
    """kind: the setting to take, or that none will do. option: the best setting, whatever the verdict."""

    kind: VerdictKind
    option: Kind | None
    measured: bool
    reasons: tuple[str, ...]


class Advice(Values):
    """Everything `advise` found. options: the best first, as measured where it was, as predicted otherwise.

    evidence: None where there is nothing to scale: a model without rates, or one whose layers with rates see no
    further than it serves now, which is `bound`. as_it_is: what such a model does at the wanted length.
    disagreements: where the measurement contradicts the prediction.
    """

    family: str
    corpus: str
    corpus_sha256: str
    split: str
    trained: int
    wanted: int
    evidence: Evidence | None
    options: tuple[Advised, ...]
    as_it_is: Measured | None
    verdict: Verdict
    disagreements: tuple[str, ...]
    limits: str
    partial: str | None
    bound: Bound | None = None


@dataclass(frozen=True)
class Wanted:
    """What is asked for. length: tokens to serve.

    trained_length: tokens that the checkpoint serves well as it is; None: what its config says.
    measure: None: only predict. read: tokens of the test split, on which the use of each rate is measured.
    kinds: settings to consider beside "leave alone"; None: all.
    """

    length: int
    trained_length: int | None = None
    measure: Trial | None = field(default_factory=Trial)
    read: int = RATES_READ
    kinds: tuple[Kind, ...] | None = None

    def __post_init__(self) -> None:
        require_count("length", self.length)
        require_count("read", self.read, least=2)
        if self.trained_length is not None:
            require_count("trained_length", self.trained_length, least=2)


def advise(
    checkpoint: str | Path,
    corpus: Corpus,
    wanted: Wanted,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    console: Console | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Advice:
    """Advise on serving a checkpoint at a longer length, on a corpus in its tokens.

    `console` shows the progress. `stop` is asked between measurements: when it says so, what is known is
    returned, marked partial; before there is any option, KeyboardInterrupt is raised.

    Raises ValueError for a checkpoint that cannot be opened, a length that it serves already, a trained
    length that nobody says, and a corpus of other tokens or without a document of the wanted length.
    """
    model = open_language_model(checkpoint, dtype=dtype, device=device)
    trained = _trained(model, wanted)
    corpus.require_known(model.config.vocab_size)
    with bars(console) as progress:
        bench = None
        if wanted.measure is not None:
            bench = Bench(
                model,
                corpus,
                wanted.measure,
                trained=trained,
                wanted=wanted.length,
                device=torch.device(device),
                stop=stop,
            )
        found = _Found(model, corpus, wanted, trained, model.sights)
        bound = Bound.of(found.sights)
        if bound is not None and bound.window <= trained:
            said = (
                f"{bound}. None with rates sees beyond the {trained:,} tokens that are served now, so another rule "
                f"gains nothing at {wanted.length:,} and changes what those layers do within their windows: leave "
                "rates and scaling as they are, and raise max_position_embeddings alone"
            )
            return _as_it_is(said, found, bench, progress, bound)
        if model.channels is None:
            return _as_it_is(NO_RATES, found, bench, progress)
        return _with_rates(found, bench, progress, stop)


@dataclass(frozen=True)
class _Found:
    model: LanguageModel
    corpus: Corpus
    wanted: Wanted
    trained: int
    sights: tuple[Sight, ...]

    def advice(
        self,
        verdict: Verdict,
        *,
        evidence: Evidence | None = None,
        advised: Sequence[Advised] = (),
        as_it_is: Measured | None = None,
        disagreements: Sequence[str] = (),
        partial: str | None = None,
        bound: Bound | None = None,
    ) -> Advice:
        return Advice(
            family=self.model.config.family,
            corpus=self.corpus.name,
            corpus_sha256=self.corpus.sha256,
            split="test" if self.wanted.measure is None else self.wanted.measure.split,
            trained=self.trained,
            wanted=self.wanted.length,
            evidence=evidence,
            options=tuple(advised),
            as_it_is=as_it_is,
            verdict=verdict,
            disagreements=tuple(disagreements),
            limits=LIMITS,
            partial=partial,
            bound=bound,
        )


def _trained(model: LanguageModel, wanted: Wanted) -> int:
    trained = wanted.trained_length or model.config.native_length
    if trained is None:
        raise ValueError(
            f"the config of this {model.config.family} model does not say its trained length; give trained_length"
        )
    if wanted.length <= trained:
        raise ValueError(
            f"length {wanted.length} is within the {trained} tokens that the checkpoint serves as it is: nothing "
            "is to be changed, any scaling of its own stays; ask for more"
        )
    return trained


def _as_it_is(
    said: str, found: _Found, bench: Bench | None, progress: Progress, bound: Bound | None = None
) -> Advice:
    """Advice where no rule is of use, for the reason `said`: what the model does, measured."""
    measured = partial = None
    reasons = [said]
    if bench is not None:
        bar = progress.add_task("as it is", total=bench.steps())
        try:
            measured = bench.measure(None, lambda: progress.advance(bar))
        except KeyboardInterrupt:
            partial = "interrupted before the model was measured"
        else:
            reasons += [
                _against(measured, measured, found.trained, found.wanted.length),
                held(measured, found.trained, found.wanted.length),
            ]
    verdict = Verdict(
        kind="nothing to scale", option=None, measured=measured is not None, reasons=tuple(reasons)
    )
    return found.advice(verdict, as_it_is=measured, partial=partial, bound=bound)


def held(measured: Measured, trained: int, wanted: int) -> str:
    """What a model that is left as it is makes of the longer input, in words."""
    rise = measured.loss(wanted) - measured.loss(trained)
    if rise <= SAME:
        return f"it serves {wanted} tokens as it is"
    if rise <= TUNABLE:
        return f"{rise:.3f} nats worse there: fine-tune it at {wanted} tokens, with its rates as they are"
    return f"{rise:.3f} nats worse there: windows of {trained} tokens predict better"


def _with_rates(found: _Found, bench: Bench | None, progress: Progress, stop: Callable[[], bool]) -> Advice:
    model, wanted = found.model, found.wanted
    rule, channels = model.frequencies, model.channels
    assert rule is not None
    assert channels is not None
    need = need_of(found.corpus, wanted.length, progress=progress, stop=stop)
    evidence = weigh(
        rule,
        channels=channels,
        trained=found.trained,
        wanted=wanted.length,
        inspection=_inspected(found, stop),
        need=need,
    )
    advised = [
        Advised(
            option=option,
            settings=_pasted(option, found),
            measured=None,
        )
        for option in options(evidence)
        if wanted.kinds is None or option.kind in (*wanted.kinds, "leave alone")
    ]
    partial = None
    if bench is not None:
        advised, partial = _measured(advised, bench, progress)
    fits = evidence.input_length <= found.trained
    ordered, verdict = judge(advised, found.trained, wanted.length, fits=fits)
    if verdict.option != "leave alone":
        verdict = verdict.model_copy(update={"reasons": (*verdict.reasons, *_changed_beside(found))})
    return found.advice(
        verdict,
        evidence=evidence,
        advised=ordered,
        disagreements=disagreements(ordered, wanted.length),
        partial=partial,
    )


def _changed_beside(found: _Found) -> tuple[str, ...]:
    """What a setting does beside what it is for, to layers that gain nothing by it."""
    windows = [sight.window for sight in found.sights if sight.rates and sight.window is not None]
    if not windows or max(windows) > found.trained or not found.model.one_rule:
        return ()
    count = sum(sight.rates for sight in found.sights)
    return (
        f"one rule is written for all {count} layers with rates: it also changes the {len(windows)} with windows of "
        f"{max(windows):,} tokens at most, which gain nothing by it",
    )


def _pasted(option: Option, found: _Found) -> Settings | None:
    if option.rule is None or option.refused is not None:
        return None
    model = found.model
    if model.config.family == OWN:
        return own_settings(option.rule)
    assert model.channels is not None
    return settings(
        option.rule,
        head_dim=model.head_dim,
        channels=model.channels,
        trained=found.trained,
        wanted=found.wanted.length,
        fraction=2 * model.channels / model.head_dim,
    )


def _inspected(found: _Found, stop: Callable[[], bool]) -> Inspection:
    own = found.model.config.family == OWN
    reader = found.model.reader(trained_length=found.trained if own else None)
    context = min(found.trained, 2048, int(found.corpus.split("test").lengths.max()))
    request = Request(tokens=found.wanted.read, context=context, queries=0)
    return inspect(reader, found.corpus, request, stop=stop)


def _measured(
    advised: Sequence[Advised], bench: Bench, progress: Progress
) -> tuple[list[Advised], str | None]:
    """Leave alone first, as everything is compared with it; then in the predicted order."""
    possible = [one for one in advised if one.option.refused is None]
    possible.sort(key=lambda one: one.option.kind != "leave alone")
    done: dict[Kind, Measured] = {}
    partial = None
    bar = progress.add_task("measuring", total=len(possible) * bench.steps())
    for one in possible:
        progress.update(bar, description=one.option.kind)
        try:
            unchanged = one.option.kind == "leave alone"
            done[one.option.kind] = bench.measure(
                None if unchanged else one.option.rule, lambda: progress.advance(bar)
            )
        except KeyboardInterrupt:
            partial = f"interrupted: {len(done)} of {len(possible)} settings measured"
            break
    return [one.model_copy(update={"measured": done.get(one.option.kind)}) for one in advised], partial


def judge(
    advised: Sequence[Advised], trained: int, wanted: int, *, fits: bool = False
) -> tuple[tuple[Advised, ...], Verdict]:
    """The settings in order, measured ones first, and what follows. Measurement decides where there is one.

    The mark is the checkpoint's own loss at its own length: a window of that length can always be served.
    fits: nearly all inputs fit the trained length, so that nothing is changed for the others.
    """
    possible = [one for one in advised if one.option.refused is None]
    refused = [one for one in advised if one.option.refused is not None]
    alone = next((one for one in possible if one.option.kind == "leave alone"), None)
    if alone is None or alone.measured is None:
        first = possible[0].option
        reasons = (f"ranked first of {len(possible)} by prediction, not measured", *first.reasons)
        kind = Verdict(kind=first.kind, option=first.kind, measured=False, reasons=reasons)
        return (*possible, *refused), kind
    mark = alone.measured.loss(trained)
    tried = [(one, one.measured) for one in possible if one.measured is not None]
    lowest = min(measured.loss(wanted) for _, measured in tried)

    def grade(measured: Measured) -> int:
        return bisect_left((SAME, TUNABLE), measured.loss(wanted) - mark)

    def order(pair: tuple[Advised, Measured]) -> tuple[float, ...]:
        measured = pair[1]
        loss, share = measured.loss(wanted), measured.found(wanted)
        near = loss <= lowest + SAME
        short = measured.loss(trained)
        return (grade(measured), not near, -(share or 0.0) if near else 0.0, short if near else loss, loss)

    tried.sort(key=order)
    best, measured = tried[0]
    left = [one for one in possible if one.measured is None]
    ordered = (*(one for one, _ in tried), *left, *refused)
    rise = measured.loss(wanted) - mark
    reasons = [_against(measured, alone.measured, trained, wanted)]
    if best is not alone:
        cost = measured.loss(trained) - mark
        reasons.append(f"inputs of {trained} tokens {_changed(cost)} with it")
    if fits:
        kind = "leave alone"
        reasons.append(f"nearly all inputs fit {trained} tokens; for the others, {best.option.kind} is best")
    elif grade(measured) == 0:
        kind = best.option.kind
    elif grade(measured) == 1:
        kind = "needs fine-tuning"
        reasons.append(
            f"{best.option.kind} is the best start: {rise:.3f} nats above the mark, at most {TUNABLE}"
        )
    else:
        kind = "will not work"
        reasons.append(
            f"the best setting, {best.option.kind}, is {rise:.3f} nats above the mark, more than {TUNABLE}: windows "
            f"of {trained} tokens predict better"
        )
    verdict = Verdict(kind=kind, option=best.option.kind, measured=True, reasons=tuple(reasons))
    return ordered, verdict


def disagreements(advised: Sequence[Advised], wanted: int) -> tuple[str, ...]:
    """Where what was measured contradicts what was predicted, or passkeys contradict the loss."""
    tried = [(one.option, one.measured) for one in advised if one.measured is not None]
    if len(tried) < 2:
        return ()
    said = []
    best, measured = tried[0]
    first = min(tried, key=lambda pair: pair[0].rank or len(tried) + 1)
    if first[1].loss(wanted) > measured.loss(wanted) + SAME:
        said.append(
            f"{first[0].kind} was predicted best, but loses {first[1].loss(wanted):.3f} nats at {wanted} tokens "
            f"where {best.kind} loses {measured.loss(wanted):.3f}; the verdict follows the measurement"
        )
    finder = max(tried, key=lambda pair: pair[1].found(wanted) or 0.0)
    shares = finder[1].found(wanted), measured.found(wanted)
    if shares[0] is not None and shares[1] is not None and shares[0] >= shares[1] + MISSED:
        said.append(
            f"{best.kind} has the lower loss, but finds {shares[1]:.0%} of the passkeys at {wanted} tokens where "
            f"{finder[0].kind} finds {shares[0]:.0%}: take that one where retrieval is what counts"
        )
    return tuple(said)


def _against(measured: Measured, unchanged: Measured, trained: int, wanted: int) -> str:
    said = (
        f"{measured.loss(wanted):.3f} nats a token at {wanted} tokens; unchanged {unchanged.loss(wanted):.3f} "
        f"there and {unchanged.loss(trained):.3f} at its own {trained}"
    )
    found, before = measured.found(wanted), unchanged.found(trained)
    if found is not None and before is not None:
        said += f"; finds {found:.0%} of the passkeys, unchanged at its own length {before:.0%}"
    return said


def _changed(cost: float) -> str:
    if abs(cost) <= SAME:
        return f"cost nothing ({cost:+.3f} nats)"
    return f"lose {cost:.3f} nats" if cost > 0 else f"gain {-cost:.3f} nats"

"""Whether a loaded model turns its channels as its config says: rates, precision at length, pairing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.encodings import RoPE
from phasewise.frequencies import Frequencies, Geometric, Proportional, YaRN
from phasewise.lens.doctor.config import FALLBACK
from phasewise.lens.doctor.diagnosis import Curve, Finding, NotMade, Severity
from phasewise.lens.doctor.examined import READ_TOKENS, Examined, Read, Result, Wanted, rounding
from phasewise.lens.doctor.patient import OwnPatient, Turned

RATE = 1e-4
"""Relative. Rates read from float32 cosines at 64 places agree to about 1e-6, from half precision to twice its
rounding; a scaling that is missing or doubled moves some by a quarter or more."""

EXACT = 1e-3
"""Radians, beyond the rounding of cos and sin: what this library keeps at a million positions."""

PRODUCT = 0.03
NOTICEABLE = 0.3
"""Radians. A float32 product of position and rate is up to 0.008 off at 131 072 and 0.06 at a million. Positions
in bfloat16 are 0.6 off at 512, so 0.3, a twentieth of a turn, lies between the two causes."""

PLACES = 64

CLEAR = 1.5
MOST = 0.9
LEAST_LAYERS = 8
"""When weights are said to be of the other pairing: the channels of its pairs are nearer in energy (mean over
heads, of random tokens) in nine layers of ten, by half as much again on average, in no less than eight layers.
SmolLM2-135M: in use further apart in none of 30 layers, 0.55 against 0.86 in ln energy; with the rows of q and k
in the other order in all 30, 1.10 against 0.56. Without training, either is nearer by chance: 8 of 8 in 1 of 256."""

RELOAD = "build the model again from the corrected config, as `from_pretrained` does"


def config_read(examined: Examined) -> Result:
    """Whether the config that the model holds says what config.json says."""
    wanted = examined.rules()
    other = [layer for layer, want in wanted.items() if examined.stated.get(layer, want).rule != want.rule]
    if not other:
        return [], "the model holds the rule of config.json"
    layer = other[0]
    found = Finding(
        check="config read",
        severity="wrong",
        said="the model was built from other settings than config.json states: its reader lost some",
        evidence={
            "layers": f"{len(other)} of {len(wanted)}",
            "stated": str(examined.stated[layer].rule),
            "held": str(wanted[layer].rule),
        },
        remedy="write the settings in the form that this version of the reader takes",
        by_hand="which form its reader takes is not in the config",
    )
    return [found], ""


def buffers(examined: Examined) -> Result:
    """Buffers of rates: finite, not all zero, at least float32."""
    buffers = [
        (name, values) for name, values in examined.patient.model.named_buffers() if "inv_freq" in name
    ]
    broken = [(name, values) for name, values in buffers if not _are_rates(values)]
    cast = [(name, values) for name, values in buffers if values.dtype.itemsize < 4 and _are_rates(values)]
    found = []
    if broken:
        name, values = broken[0]
        found.append(
            Finding(
                check="buffers",
                severity="wrong",
                said=f"{name} holds no rates: it was never filled in, as after loading on the meta device",
                evidence={
                    "buffers": f"{len(broken)} of {len(buffers)}",
                    "not finite": int((~values.isfinite()).sum()),
                    "below 0": int((values < 0).sum()),
                    "zero": int((values == 0).sum()),
                    "of": values.numel(),
                },
                remedy=RELOAD + "; after to_empty() fill rate buffers as the model's own constructor does",
                by_hand="a buffer is not in the config",
            )
        )
    if cast:
        name, values = cast[0]
        off = rounding(values.dtype) / 2
        found.append(
            Finding(
                check="buffers",
                severity="wrong",
                said=f"{name} was cast to {str(values.dtype).removeprefix('torch.')}",
                evidence={
                    "buffers": f"{len(cast)} of {len(buffers)}",
                    "rounding of a rate, relative, at most": off,
                    "tokens after which the fastest may be a radian off": round(
                        1 / off / values.max().item()
                    ),
                },
                remedy="load in that dtype (from_pretrained(dtype=...)) rather than cast afterwards",
                by_hand="a buffer is not in the config",
            )
        )
    return found, f"{len(buffers)} buffers of rates, finite and in float32 or wider"


def _are_rates(values: Tensor) -> bool:
    return bool((values.isfinite() & (values >= 0)).all()) and bool(values.any())


def rates(examined: Examined) -> Result:
    """Rates and factor of every layer against the config's, at the first places."""
    wanted = examined.rules()
    if isinstance(examined.patient, OwnPatient):
        raise NotMade("they are computed from the config at every call")
    from phasewise.hf.reading import NoRates

    try:
        layers = examined.read
    except NoRates as error:
        return [_no_rates(error)], ""
    length = READ_TOKENS
    tolerance = max(RATE, 2 * rounding(examined.patient.dtype))
    worst, off = 0.0, []
    for read in layers:
        want = wanted.get(read.layer.index)
        has = _pairs(read)
        if want is None or has != want.n:
            if has != (0 if want is None else want.n) and not (
                has == 0 and read.layer.index in examined.still
            ):
                off.append((read, want, math.inf))
            continue
        error = _apart(read, want.rule, length)
        worst = max(worst, error)
        if error > tolerance:
            off.append((read, want, error))
    if not off:
        return [], f"{len(layers)} layers, largest relative difference {worst:.1e}"
    return [_other_rates(off, len(layers), tolerance)], ""


def _no_rates(error: Exception) -> Finding:
    return Finding(
        check="rates",
        severity="wrong",
        said="what the layers are given to turn by are no rotations of any rate",
        evidence={"problem": str(error).partition(":")[0]},
        remedy=RELOAD,
        by_hand="the model's own buffers are at fault",
    )


def _other_rates(off: list[tuple[Read, Wanted | None, float]], layers: int, tolerance: float) -> Finding:
    read, want, error = max(off, key=lambda found: found[2])
    evidence: dict[str, float | int | str | None] = {
        "layers": f"{len(off)} of {layers}",
        "layer": read.layer.index,
    }
    if want is None or math.isinf(error):
        evidence |= {"pairs that turn": _pairs(read), "pairs by the config": 0 if want is None else want.n}
        said = "layers turn another number of pairs than the config says"
    else:
        has, meant = _rates_of(read), want.rule.rates(want.n, length=READ_TOKENS)
        pair = int(((has - meant).abs() / meant.clamp(min=1e-30)).argmax())
        evidence |= {
            "largest relative difference": error,
            "pair": pair,
            "rate in the model": has[pair].item(),
            "rate by the config": meant[pair].item(),
            "factor in the model": _factor(read),
            "factor by the config": want.rule.attention_factor(want.n, length=READ_TOKENS),
        }
        named = [name for name, rule in _readings(want.rule) if _apart(read, rule, READ_TOKENS) <= tolerance]
        said = "layers turn at other rates than the config says" + (f": {named[0]}" if named else "")
    return Finding(
        check="rates",
        severity="wrong",
        said=said,
        evidence=evidence,
        remedy=RELOAD + "; a setting changed after loading does nothing",
        by_hand="the config says one thing and the model does another",
    )


def _readings(rule: Frequencies) -> Iterator[tuple[str, Frequencies]]:
    """What a model may do instead, in words."""
    base, fraction = getattr(rule, "base", None), getattr(rule, "fraction", None)
    if base is not None:
        yield "as without scaling, the base alone", Geometric(base=base)
    yield "as with a base of 10 000", Geometric(base=FALLBACK)
    if isinstance(rule, YaRN):
        yield "as with the opposite truncate", rule.model_copy(update={"truncate": not rule.truncate})
        yield "with another attention factor", rule.model_copy(update={"attention": 1.0})
    if isinstance(rule, Geometric) or fraction is not None:
        for share in (0.25, 0.5, 0.75):
            yield f"as proportional rotation of {share}", Proportional(base=rule.base, fraction=share)  # type: ignore[attr-defined]


def phases(examined: Examined) -> Result:
    """Phases at places up to the length served, and on either side of a change of rates, against float64."""
    wanted = examined.rules()
    lengths = {examined.length}
    for want in wanted.values():
        ends = [last for _, last in want.rule.regimes or () if last is not None]
        lengths |= {length for end in ends for length in (end, end + 1) if 2 <= length <= examined.length}
    measured = [_measured(examined, wanted, length) for length in sorted(lengths)]
    found = max(measured, key=lambda one: one.beyond)
    if found.beyond > EXACT:
        return [found.finding()], ""
    count, last = len(places(examined.length)), examined.length - 1
    return [], f"at most {found.largest:.1e} radians off at {count} places up to {last:,}"


def error_by_position(examined: Examined) -> Curve:
    """The largest phase error at each place up to the length served."""
    found = _measured(examined, examined.rules(), examined.length)
    x, y = found.index.double().tolist(), found.off.max(1).values.tolist()
    return Curve(name=f"layer {found.turned.layer}", x=tuple(x), y=tuple(y))


@dataclass(frozen=True)
class _Measured:
    """How far phases are off where the worst layer is, float64 [T, n], when `length` tokens are served."""

    turned: Turned
    index: Tensor
    off: Tensor
    length: int

    @property
    def largest(self) -> float:
        return self.off.max().item()

    @property
    def beyond(self) -> float:
        return self.largest - self.turned.rounding

    def finding(self) -> Finding:
        place, pair = divmod(int(self.off.argmax()), self.off.shape[1])
        severity: Severity = (
            "note" if self.beyond <= PRODUCT else "warning" if self.beyond <= NOTICEABLE else "wrong"
        )
        return Finding(
            check="phases",
            severity=severity,
            said="phases are off at the length served"
            + (
                ": positions or rates were rounded to half precision, or are others"
                if severity == "wrong"
                else ""
            ),
            evidence={
                "largest error, radians": self.largest,
                "at position": int(self.index[place]),
                "of a length of": self.length,
                "pair": pair,
                "layer": self.turned.layer,
                "error at the middle place": self.off[len(self.index) // 2].max().item(),
                "rounding of cos and sin": self.turned.rounding,
            },
            remedy="form positions times rates in float32 at least, and never cast rates or positions; change rates "
            "one token past the original length"
            if severity == "wrong"
            else "none is needed below a hundredth of a turn; float64 products take it away",
            by_hand="precision is the code's, not the config's",
        )


def _measured(examined: Examined, wanted: Mapping[int, Wanted], length: int) -> _Measured:
    """The layer whose phases are furthest off when `length` tokens are served."""
    index = places(length)
    found = []
    for turned in examined.patient.turned(index):
        want = wanted.get(turned.layer)
        if want is None or want.n != turned.phase.shape[1]:
            raise NotMade("a layer turns another number of pairs than the config says")
        if not turned.phase.isfinite().all():
            raise NotMade("cosines and sines are not finite")
        found.append(_Measured(turned, index, _error(turned, want.rule, index), length))
    if not found:
        raise NotMade("no layer turns with position")
    return max(found, key=lambda one: one.beyond)


def _error(turned: Turned, rule: Frequencies, index: Tensor) -> Tensor:
    """Radians by which phases are off, float64 [T, n]."""
    rates_at = rule.at(int(index[-1]) + 1, turned.phase.shape[1]).rates(turned.phase.shape[1])
    off = turned.phase - index.double()[:, None] * rates_at
    return (off - (off / (2 * math.pi)).round() * (2 * math.pi)).abs()


def places(length: int) -> Tensor:
    """Places from 0 to length - 1, dense at first and then in even ratios, int64 [T]."""
    spread = torch.logspace(0, math.log2(max(length - 1, 2)), PLACES, base=2, dtype=torch.float64)
    return torch.unique(
        torch.cat([torch.tensor([0, length - 1]), spread.round().long()]).clamp(max=length - 1)
    )


def pairing(examined: Examined) -> Result:
    """Which channels turn together, and whether the weights look as if they were made for it."""
    sides = {turned.layer: turned.half_split for turned in examined.patient.turned(places(2))}
    used, other = [], []
    for read in examined.turning:
        half_split, n = sides.get(read.layer.index), _pairs(read)
        if half_split is None or n < 2:
            continue
        energy = read.energy[: 2 * n].clamp(min=1e-30).log()
        used.append(_spread(energy[:n], energy[n:]))
        raw = energy if half_split else torch.stack([energy[:n], energy[n:]], 1).flatten()
        alternative = (raw[0::2], raw[1::2]) if half_split else (raw[:n], raw[n:])
        other.append(_spread(*alternative))
    if not used:
        raise NotMade("no layer turns channels in pairs")
    mine, theirs = sum(used) / len(used), sum(other) / len(other)
    further = sum(one > two for one, two in zip(used, other, strict=True))
    name = "half-split" if all(sides.values()) else "interleaved" if not any(sides.values()) else "mixed"
    if len(used) >= LEAST_LAYERS and further >= MOST * len(used) and mine > CLEAR * theirs:
        wrong = Finding(
            check="pairing",
            severity="wrong",
            said=f"the weights look as if made for the other pairing than {name}: a conversion left out its "
            "permutation. At position 0 nothing shows",
            evidence={
                "pairing in use": name,
                "ln energy apart within pairs": mine,
                "within the other pairing": theirs,
                "layers where the other is nearer": f"{further} of {len(used)}",
            },
            remedy="convert the checkpoint again, permuting the rows of q and k (and of their biases and norms)",
            by_hand="the weights must change, not the config",
        )
        return [wrong], ""
    return [], f"{name}; ln energy {mine:.2f} apart within pairs, {theirs:.2f} within the other pairing"


def _spread(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().mean().item()


def _pairs(read: Read) -> int:
    encoding = read.layer.encoding
    return encoding.channels if isinstance(encoding, RoPE) else 0


def _rates_of(read: Read) -> Tensor:
    encoding = read.layer.encoding
    assert isinstance(encoding, RoPE)
    return encoding.frequencies.rates(encoding.channels)


def _factor(read: Read) -> float:
    encoding = read.layer.encoding
    assert isinstance(encoding, RoPE)
    return encoding.frequencies.attention_factor(encoding.channels)


def _apart(read: Read, rule: Frequencies, length: int) -> float:
    """The largest relative difference of a rate or the factor."""
    n = _pairs(read)
    meant, has = rule.rates(n, length=length), _rates_of(read)
    largest = torch.maximum(meant, has).clamp(min=1e-30)
    factor = rule.attention_factor(n, length=length)
    return max(((has - meant).abs() / largest).max().item(), abs(_factor(read) / factor - 1))

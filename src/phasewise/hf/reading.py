"""Reading any Hugging Face decoder that is given rotations, knowing no architecture.

A decoder computes cos and sin once and hands them to its attention layers as `position_embeddings`. A layer
is asked what its queries and keys are under other rotations than the true ones, and stopped there:

- under none (cos 1, sin 0) they are what the projections and norms gave: what a reader wants;
- under a quarter turn (cos 0, sin 1) each channel shows its partner, so pairing and the channels that do not
  turn are found, whatever the layout;
- turned by one of sixteen angles in each entry of cos and sin, a digit of the entry's number in base 16, it shows
  which entry it uses; so for each digit;
- under the true rotation it shows that all of this is right: its scores are those of what was read, or it is refused.

Rates and attention factor follow from the true cos and sin at consecutive positions. So what is read is what the
model does, not what its config says.

Letters: B rows, T tokens, H heads, D head dim, r width of cos and sin, N values of a channel.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from phasewise.encodings import NoPE, RoPE
from phasewise.encodings.base import products
from phasewise.frequencies import Explicit
from phasewise.hf.rotary import forget
from phasewise.hf.settings import trained_length
from phasewise.model.reading import Facts, Layer, Reader, Sink

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3", "gpt_neox")
"""Model types held to be read exactly by the tests; others are read when they are built the same way."""

READ = f"read are {', '.join(FAMILIES)} and what is built like them"
ROTATION = "position_embeddings"
ASKING = "phasewise-asking"
PROBE_TOKENS = 4
DIGITS = 16
OFF = 0.02
"""Of the largest score, up to which scores read are the layer's own: half precision rounds what it turns."""


class _Answer(Exception):
    """Raised to leave a layer as soon as it has told its queries and keys."""

    def __init__(self, q: Tensor, k: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> None:
        self.q, self.k, self.mask, self.options = q, k, mask, options


def _answer(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    _value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> None:
    raise _Answer(query, key, attention_mask, options)


AttentionInterface.register(ASKING, _answer)


class NoRates(ValueError):
    """What a layer is given to turn by are no rotations of any rate."""


class HFReader(Reader):
    """Reads a decoder of transformers with rotary positions.

    Raises ValueError, at the first reading, for a model none of whose layers is given rotations, or whose
    layers do something else with them than turning channels in pairs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        self.facts = Facts(
            family=model.config.model_type,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            dtype=str(model.dtype).removeprefix("torch."),
            trained_length=trained_length(config),
        )
        self._turnings: dict[nn.Module, _Turning | None] = {}
        """Of each module that is given rotations; None for one that makes no use of them."""

    @torch.no_grad()
    def read(self, tokens: Tensor, sink: Sink) -> None:
        reached: list[int] = []

        def before(call: _Call) -> None:
            if call.module not in self._turnings:
                self._turnings[call.module] = None if call.unused() else _turning(call, self.facts.family)
            turning = self._turnings[call.module]
            if turning is None:
                return
            answer = call.ask(torch.ones_like(call.cos), torch.zeros_like(call.cos))
            reached.append(turning.layer.index)
            sink(turning.layer, turning.ordered(answer.q), turning.ordered(answer.k))

        with _calls(self.model, before):
            self.model.base_model(input_ids=tokens.to(self.model.device), use_cache=False)
        if not reached:
            raise ValueError(
                f"no layer of this {self.facts.family} model is given rotary positions: it has none, or its "
                f"architecture is not read; {READ}"
            )

    @torch.no_grad()
    def rotations(self, index: Tensor) -> list["Rotation"]:
        """What each layer turns its pairs by when it serves places `index` int64 [T], the first of them 0.

        Raises ValueError as `read`.
        """
        index = index.to(self.model.device)
        if not self._turnings:
            self.read(torch.zeros(1, PROBE_TOKENS, dtype=torch.int64), lambda *_read: None)
        found: list[Rotation] = []

        def before(call: _Call) -> None:
            turning = self._turnings[call.module]
            if turning is not None:
                cos, sin = (x[0][:, list(turning.entries)].double().cpu() for x in (call.cos, call.sin))
                found.append(Rotation(turning.layer, cos, sin, half_split=turning.half_split))

        with _calls(self.model, before):
            tokens, seen = torch.zeros_like(index)[None], torch.ones_like(index)[None]
            self.model.base_model(
                input_ids=tokens, attention_mask=seen, position_ids=index[None], use_cache=False
            )
        return found


@dataclass(frozen=True)
class Rotation:
    """cos and sin float64 [T, pairs] that a layer is given at some places, in the order of its pairs' rates.

    half_split: whether channel c turns with channel c + pairs; else the pairs are neighbours.
    """

    layer: Layer
    cos: Tensor
    sin: Tensor
    half_split: bool


def _takers(model: nn.Module) -> list[nn.Module]:
    """The innermost modules that take rotations: attention layers, not the blocks around them."""
    taking = {
        name: module
        for name, module in model.named_modules()
        if ROTATION in inspect.signature(module.forward).parameters
    }
    return [
        module
        for name, module in taking.items()
        if not any(other.startswith(f"{name}.") for other in taking if other != name)
    ]


@dataclass(frozen=True)
class _Call:
    """A call of an attention layer that is about to happen, and can be tried with other rotations."""

    module: nn.Module
    signature: inspect.Signature
    arguments: Mapping[str, Any]
    hidden: Tensor
    cos: Tensor
    sin: Tensor
    sin_first: bool

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call | None":
        """None when the layer is given no rotation."""
        signature = inspect.signature(module.forward)
        arguments = signature.bind(*args, **kwargs).arguments
        match arguments.get(ROTATION):
            case None:
                return None
            case [Tensor() as first, Tensor() as second]:
                pass
            case _:
                raise ValueError(
                    f"{type(module).__name__} is given rotations in another form than cos and sin, and is not read; "
                    f"{READ}"
                )
        sin_first = not first[:, 0].any()  # at position 0, sin is 0 and cos is not
        cos, sin = (second, first) if sin_first else (first, second)
        return cls(module, signature, arguments, arguments["hidden_states"], cos, sin, sin_first)

    def ask(self, cos: Tensor, sin: Tensor, hidden: Tensor | None = None) -> _Answer:
        """Queries and keys under another rotation, with what else the layer tells its attention function."""
        try:
            with _asking(self.module.config):
                self._made(cos, sin, self.hidden if hidden is None else hidden)
        except _Answer as answer:
            return answer.with_traceback(None)  # its frames hold everything that the layer computed
        raise self._by_itself()

    def unused(self) -> bool:
        """Whether the module has no attention of its own and rotations change nothing, as around linear attention.

        Raises ValueError for one that is no module of transformers' attention interface and does use them.
        """
        if getattr(self.module, "config", None) is not None:
            return False
        one, zero = torch.ones_like(self.cos), torch.zeros_like(self.cos)
        results = [self._made(*rotation, self.hidden) for rotation in ((one, zero), (zero, one))]
        if not torch.equal(*(each if isinstance(each, Tensor) else each[0] for each in results)):
            raise self._by_itself()
        return True

    def _made(self, cos: Tensor, sin: Tensor, hidden: Tensor) -> Any:
        """What the module makes of `hidden` under another rotation."""
        rotation = (sin, cos) if self.sin_first else (cos, sin)
        changed = {**self.arguments, "hidden_states": hidden, ROTATION: rotation}
        call = inspect.BoundArguments(self.signature, changed)  # type: ignore[arg-type]
        return self.module.forward(*call.args, **call.kwargs)

    def _by_itself(self) -> ValueError:
        return ValueError(
            f"{type(self.module).__name__} computes attention by itself, not through transformers' attention "
            f"interface, and is not read; {READ}"
        )


@contextmanager
def _calls(model: PreTrainedModel, before: Callable[[_Call], None]) -> Iterator[None]:
    """Tell `before` of every call of an attention layer that is given a rotation, in a pass that follows no other."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = _Call.of(module, args, kwargs)
        if call is not None:
            before(call)

    forget(model)
    with ExitStack() as hooks:
        for module in _takers(model):
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


@contextmanager
def _asking(config: Any) -> Iterator[None]:
    chosen = config._attn_implementation
    config._attn_implementation = ASKING
    try:
        yield
    finally:
        config._attn_implementation = chosen


@dataclass(frozen=True)
class _Turning:
    """How a layer turns its channels: an encoding of ours, and the order that makes pairs half-split."""

    layer: Layer
    order: Tensor
    entries: tuple[int, ...]

    @property
    def half_split(self) -> bool:
        return torch.equal(self.order, torch.arange(len(self.order)))

    def ordered(self, x: Tensor) -> Tensor:
        return x if self.half_split else x.index_select(-1, self.order.to(x.device))


def _turning(call: _Call, family: str) -> _Turning:
    index = getattr(call.module, "layer_idx", None)
    if index is None or call.cos.ndim != 3:
        raise ValueError(f"{family} gives its layers rotations of another form and is not read; {READ}")
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(PROBE_TOKENS, call.hidden.shape[-1], generator=generator)
    # As long as what the layer is given: it may do more with each place than turn it.
    rows, length = call.hidden.shape[:2]
    hidden = sample.repeat(-(-length // PROBE_TOKENS), 1)[:length].expand(rows, -1, -1).to(call.hidden)
    one, zero = torch.ones_like(call.cos), torch.zeros_like(call.cos)
    angles = [one * digits for digits in _digits(one.shape[-1]).mul(2 * math.pi / DIGITS).to(one.device)]
    rotations = [(one, zero), (zero, one), *((angle.cos(), angle.sin()) for angle in angles)]
    answers = [call.ask(cos.to(one), sin.to(one), hidden) for cos, sin in rotations]
    channels = [torch.cat([answer.q, answer.k], 1)[:1, :, :PROBE_TOKENS].flatten(0, 2) for answer in answers]
    still = answers[0]
    pairs, passing = _pairs(channels[0].float(), channels[1].float(), family)
    if len(passing) == still.q.shape[-1]:
        rates, factor, entries = (), 1.0, []
    else:
        all_rates, factor = _rates(call.cos[0], call.sin[0])
        entries = _entries(*(x.double().cpu() for x in (channels[0], *channels[2:])), pairs=pairs)
        rates = tuple(all_rates[entry] for entry in entries)
    order = [first for first, _ in pairs] + [second for _, second in pairs] + passing
    layer = Layer(
        index,
        _encoding(rates, factor, head_dim=still.q.shape[-1]),
        scale=still.options.get("scaling"),
        window=still.options["sliding_window"] if "sliding_window" in still.options else _window(still.mask),
        softcap=still.options.get("softcap"),
    )
    turning = _Turning(layer, torch.tensor(order), tuple(entries))
    _require_scores(turning, call, still, call.ask(call.cos, call.sin, hidden), family)
    return turning


def _require_scores(turning: _Turning, call: _Call, still: _Answer, turned: _Answer, family: str) -> None:
    """Raise ValueError unless the layer's own scores are those of what was read of it, turned as it is told to."""
    n, length = len(turning.entries), still.q.shape[2]
    places = torch.linspace(0, length - 1, min(length, PROBE_TOKENS), dtype=torch.float64).round().long()
    cos, sin = (x[0].double().cpu()[places][:, list(turning.entries)] for x in (call.cos, call.sin))

    def turn(x: Tensor) -> Tensor:
        wide = turning.ordered(x[:1])[:, :, places].double().cpu()
        first, second = wide[..., :n], wide[..., n : 2 * n]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, wide[..., 2 * n :]], -1)

    read = products(turn(still.q), turn(still.k))
    own = products(*(x[:1, :, places].double().cpu() for x in (turned.q, turned.k)))
    if not (read - own).abs().max() <= OFF * own.abs().max():
        raise ValueError(
            f"the layers of this {family} model do more than turn their channels in pairs; {READ}"
        )


def _digits(width: int) -> Tensor:
    """The digits of each entry's number in base `DIGITS`, lowest first, [places, r]."""
    places = max(1, math.ceil(math.log(width, DIGITS)))
    return torch.stack([torch.arange(width) // DIGITS**place % DIGITS for place in range(places)]).float()


def _window(mask: Tensor | None) -> int | None:
    """How many keys the last query sees where a layer is told by its mask [B, 1 or H, T, S] alone: all are None."""
    if mask is None:
        return None
    last = mask[0, 0, -1]
    seen = int((last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2).sum())
    return None if seen == len(last) else seen


def _pairs(still: Tensor, quarter: Tensor, family: str) -> tuple[list[tuple[int, int]], list[int]]:
    """Pairs (i, j) that a quarter turn takes to (-j, i), and channels that it leaves; inputs [N, D]."""
    width = still.shape[1]
    stays = (still == quarter).all(0)
    minus = (quarter[:, :, None] == -still[:, None, :]).all(0) & ~stays[:, None]
    plus = (quarter[:, :, None] == still[:, None, :]).all(0) & ~stays[:, None]
    pairs = [(i, j) for i, j in (minus & plus.T).nonzero().tolist()]
    passing = stays.nonzero().flatten().tolist()
    if sorted([*passing, *(channel for pair in pairs for channel in pair)]) != list(range(width)):
        raise ValueError(f"the layers of this {family} model do not turn their channels in pairs; {READ}")
    return pairs, passing


def _entries(still: Tensor, *turned: Tensor, pairs: list[tuple[int, int]]) -> list[int]:
    """The entry of cos and sin that each pair uses, a digit from each of `turned`; inputs [N, D].

    By least squares over N, as a norm after the rotation may change the size of all channels together.
    """
    first, second = (still[:, list(channels)] for channels in zip(*pairs, strict=True))
    inner = [[(one * other).sum(0) for other in (first, second)] for one in (first, second)]
    entries = torch.zeros(len(pairs), dtype=torch.int64)
    for place, answer in enumerate(turned):
        shown = answer[:, [channel for channel, _ in pairs]]
        along, across = (shown * first).sum(0), (shown * second).sum(0)
        cos = along * inner[1][1] - across * inner[0][1]
        sin = along * inner[1][0] - across * inner[0][0]
        digit = (torch.atan2(sin, cos) * DIGITS / (2 * math.pi)).round().long() % DIGITS
        entries += digit * DIGITS**place
    return entries.tolist()


def _rates(cos: Tensor, sin: Tensor) -> tuple[list[float], float]:
    """Radians per position of each entry, and the attention factor, from cos and sin [T, r] of 0, 1, 2, ..

    The angle at twice the distance doubles the precision of the rate: the whole turns are known by then.
    """
    wide_cos, wide_sin = cos.double(), sin.double()
    angle = torch.atan2(wide_sin, wide_cos)
    rate, place = angle[1], 2
    while place < len(angle):
        turns = ((rate * place - angle[place]) / (2 * math.pi)).round()
        rate, place = (angle[place] + turns * 2 * math.pi) / place, 2 * place
    return rate.tolist(), torch.hypot(wide_cos, wide_sin).mean().item()


def _encoding(rates: tuple[float, ...], factor: float, *, head_dim: int) -> RoPE | NoPE:
    if not rates:
        return NoPE()
    if not (all(math.isfinite(rate) and rate >= 0 for rate in rates) and 0 < factor < math.inf):
        raise NoRates(
            "a layer turns channels by rates that are nan, infinite or below 0, or scales by such a factor: "
            "correct the rotary settings in config.json"
        )
    share = 2 * len(rates) / head_dim
    fraction = share if int(head_dim * share) == 2 * len(rates) else math.nextafter(share, 1.0)
    return RoPE(head_dim=head_dim, frequencies=Explicit(values=rates, attention=factor), fraction=fraction)

"""How far back each layer of a decoder of transformers sees, and whether it turns, asked of the model without weights.

The model that a config describes is built on the meta device and run over two tokens, its attention replaced by a
function that looks: a layer turns when its queries depend on what the modules that hold rates gave, and sees what its
mask says for each distance, or the window that it names. So neither weights nor a list of families is needed.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from phasewise.hf.checkpoint import quiet
from phasewise.hf.rotary import rotary
from phasewise.model.sight import Bound, Sight

LOOKING = "phasewise-looking"
WINDOWS = ("window", "attention_chunk", "local_att")
"""A config with a window has it, under one of these words; without any, no model is built to ask it."""

MOST_QUESTIONS = 2**12
"""Values that a pass may ask for: more than any decoder does, unless it loops until one changes."""

FURTHEST = 2**20
"""Distances that a mask is asked for; what sees further counts as seeing everything."""


class _Yes(TorchDispatchMode):
    """Answers questions for values that there are none of: of one, yes or 1; of several beside real ones, 0."""

    questions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in args if isinstance(each, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.questions += 1
            if self.questions > MOST_QUESTIONS:
                raise RuntimeError(f"more than {MOST_QUESTIONS} values asked for")
            return args[0].dtype == torch.bool or 1
        if len({each.is_meta for each in given}) > 1:
            args = [
                torch.zeros_like(x, device="cpu") if isinstance(x, Tensor) and x.is_meta else x for x in args
            ]
        return func(*args, **(kwargs or {}))


class _Mask(Tensor):
    """What stands for a mask: the number of keys that any query sees; None for all."""

    seen: int | None


def _mask(*_sizes: Any, mask_function: Callable[..., Tensor], **_options: Any) -> Tensor:
    """Of all queries, how many see the first key: as many as a query sees keys."""
    first = torch.zeros((), dtype=torch.int64)
    sees = mask_function(first, first, torch.arange(FURTHEST), first).broadcast_to(FURTHEST)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool).as_subclass(_Mask)
    mask.seen = None if sees.all() else int(sees.sum())
    return mask


def sights(config: Any) -> tuple[Sight, ...] | None:
    """Every layer of attention of the decoder that a config of transformers describes, in the order of its pass.

    None where the model is not built, or does not run, without values, or attends by other means than transformers'
    interface.
    """
    found: list[Sight] = []

    def attend(
        _layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        named = (options.get("sliding_window"), getattr(attention_mask, "seen", None))
        windows = [window for window in named if window is not None]
        found.append(Sight(query.requires_grad or key.requires_grad, min(windows, default=None)))
        rows, heads, tokens, _ = query.shape
        return value.new_zeros(rows, tokens, heads, value.shape[-1]), None

    AttentionInterface.register(LOOKING, attend)
    AttentionMaskInterface.register(LOOKING, _mask)
    try:
        with quiet(), torch.device("meta"):
            network: Any = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=LOOKING, experts_implementation="batched_mm"
            )
        network.eval().requires_grad_(False)
        for module in rotary(network).values():
            module.register_forward_hook(_traced)
        with _Yes(), torch.enable_grad():
            network(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="meta"), use_cache=False)
    except Exception:  # of as many kinds as there are models that ask for values, or for sizes a config lacks
        return None
    return tuple(found)


def bound(config: Any) -> Bound | None:
    """How far layers with rates see, where each of them has a window; None also where `sights` is."""
    return Bound.of(windowed(config))


def windowed(config: Any) -> tuple[Sight, ...]:
    """As `sights`, of a decoder that may have windows; none of one that has not, or cannot be asked.

    config: of transformers, or the content of its file.
    """
    if isinstance(config, Mapping):
        try:
            config = AutoConfig.for_model(**config)
        except Exception:  # as `read_config`'s, of a content that may be anything
            return ()
    settings = config.get_text_config().to_dict()
    if not any(settings[key] for key in settings if any(word in key for word in WINDOWS)):
        return ()
    return sights(config) or ()


def _traced(_module: nn.Module, _given: Any, output: Any) -> None:
    """Let what depends on rates be told from what does not."""
    for each in output if isinstance(output, tuple | list) else (output,):
        if isinstance(each, Tensor):
            each.requires_grad_()

"""A Hugging Face checkpoint with other rates for a longer context: its config rewritten, its weights as they are."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from phasewise.frequencies import AnyFrequencies
from phasewise.frequencies_hf import require_length
from phasewise.model.folder import CONFIG
from phasewise.model.sight import Bound
from phasewise.train.continuation import ExtendRecipe
from phasewise.train.folder import appearing, ask, require_free
from phasewise.train.rules import Present, Search

WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack")
TEMPLATES = "additional_chat_templates"
"""Where tokenizers of transformers save the chat templates that are not the default, and look for them."""


def rewrite(recipe: ExtendRecipe, out: Path, *, stop: Callable[[], bool] = lambda: False) -> AnyFrequencies:
    """Write a folder like the recipe's checkpoint whose config serves its length, and give the rule in it.

    Weights are linked, or copied where the disk has no links; all other files are copied, since who saves a
    tokenizer there would write through a link, and of subfolders the tokenizer's further chat templates. Nothing is
    trained or measured: that is for other programs, or `phasewise evaluate`. stop: asked before each file; when it says
    so, nothing is left and Interrupted raised.

    Raises ValueError without transformers, for steps, a search, several lengths, weights that are not whole, a
    length not above the one the config serves, a config without rates or with rates for layers alone whose windows
    end within what it serves, and a rule that does not start from its rates; Unwritten when `out` cannot be written,
    as on a full disk. A folder written in part is never left.
    """
    try:
        from phasewise.hf.checkpoint import read_config, require_weights
        from phasewise.hf.settings import global_settings, in_both_forms, native_length, write
        from phasewise.hf.sight import sights
    except ModuleNotFoundError as error:
        raise ValueError(
            f"Hugging Face checkpoints need {error.name}: pip install 'phasewise[hf,train]'"
        ) from error
    folder, way = Path(recipe.checkpoint), recipe.rule
    if recipe.steps != (0,) or isinstance(way, Search):
        raise ValueError(
            f"{folder} is a Hugging Face checkpoint, which is not trained or searched here: give one --length, "
            "--steps 0 and a rule that is a formula, and fine-tune what is written elsewhere"
        )
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG} to rewrite; give a folder of safetensors")
    require_free(out, resumed=False)
    require_weights(folder)
    config = read_config(folder)
    text, length = config.get_text_config(), recipe.length[0]
    settings, served, seen = global_settings(config), native_length(text), sights(config)
    turns = any(sight.rates for sight in seen) if seen else bool(settings)
    if served is None or not turns:
        raise ValueError(
            f"the config in {folder} has no rates and length to change; give a model with rotary positions"
        )
    if length <= served:
        raise ValueError(f"length {length} is not above {served}, which {folder} serves: choose a longer one")
    rule = way.at(
        Present(settings[0].frequencies if settings else None, served, Bound.of(seen or ())), length
    )
    assert rule is not None
    require_length(rule, length)
    write(config, rule)
    text.max_position_embeddings = length
    _require_read_back(config, rule, length)
    with appearing(out) as unfinished:
        for path in sorted([*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]):
            ask(stop)
            if path.is_file() and path.name != CONFIG:
                _bring(path, unfinished / path.relative_to(folder))
        content = in_both_forms(json.loads(config.to_json_string()))
        (unfinished / CONFIG).write_text(
            json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    return rule


def _require_read_back(config: object, rule: AnyFrequencies, length: int) -> None:
    from phasewise.hf.settings import global_settings, head_dim

    for group in global_settings(config):
        n = group.channels(head_dim(config))
        for served in (1, length):
            held, asked = group.frequencies.at(served, n), rule.at(served, n)
            if not (
                torch.allclose(held.rates(n), asked.rates(n), rtol=1e-9, atol=0)
                and math.isclose(held.attention_factor(n), asked.attention_factor(n))
            ):
                raise ValueError(f"this config cannot hold {rule.model_dump_json()}: give another rule")


def _bring(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in WEIGHTS:
        try:
            os.link(path.resolve(), to)
            return
        except OSError:  # another disk, or one without links
            pass
    shutil.copy2(path, to)

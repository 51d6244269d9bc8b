"""phasewise export."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from phasewise.cli.terminal import at_once, written

EXPORT = """Write a trained model as a Hugging Face checkpoint, for transformers and the programs that read its folders.

The checkpoint is a folder of this library's (a run, or its model) with RoPE or without positions. Writes config.json,
model.safetensors, generation_config.json and the tokenizer, opens them with transformers and compares logits: a folder
is there whole and computing the same, or not at all."""


def export(arguments: Sequence[str]) -> int:
    """Write a trained model as a Hugging Face checkpoint, once it computes the same."""
    import tyro

    from phasewise.train.export import export

    @dataclass(kw_only=True)
    class Options:
        checkpoint: tyro.conf.Positional[Path]
        """Folder of the checkpoint: a run, or a model."""
        out: Path
        """Folder of the Hugging Face checkpoint: a new one."""
        length: int | None = None
        """Tokens it is for: max_position_embeddings. None: what its rule says, or its last training."""
        dtype: str | None = None
        """Store in float32 | bfloat16 | float16. None: as it is stored."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print what was written as JSON on stdout instead of a sentence."""

    options = tyro.cli(Options, prog="phasewise export", args=arguments, description=EXPORT)
    with at_once() as stop:
        found = export(options.checkpoint, options.out, length=options.length, dtype=options.dtype, stop=stop)
    if options.as_json:
        print(found.model_dump_json(indent=2))
        return 0
    tokens = {None: "no tokenizer of text is known, so none was written", "bytes": "its tokens are bytes"}
    print(
        f"{found.architecture} of {found.parameters:,} parameters in {found.dtype}, for {found.length:,} tokens: its "
        f"logits in float32 are the model's within {found.difference:.1e}, of {found.largest:.3g} at most; "
        f"{tokens.get(found.tokenizer, f'its tokenizer is {found.tokenizer}')}"
    )
    if found.passed_over:
        print(
            f"transformers computes {' and '.join(found.passed_over)}; llama.cpp, among others, passes over it"
        )
    print(written(options.out))
    return 0

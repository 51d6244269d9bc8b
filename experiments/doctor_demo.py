"""What doctor finds in a broken config, and in SmolLM2 as it is and broken on purpose, into results/doctor/.

Run as `python -m experiments.doctor_demo`; with a folder that holds SmolLM2-135M-Instruct, as
experiments/inspect_smollm2.py converts it, the second part is made too.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from experiments.command import parser
from phasewise.hf.checkpoint import load
from phasewise.lens.doctor.diagnosis import Diagnosis
from phasewise.lens.doctor.examine import doctor
from phasewise.lens.doctor.repair import repair
from phasewise.lens.doctor.show import verdict
from phasewise.record import record

RESULTS = Path("results/doctor")
LENGTH = 4096
BROKEN = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128_256,
    "head_dim": None,
    "max_position_embeddings": 131_072,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "attention_factor": 1.0,
        "betafast": 32,
    },
}
"""Llama 3.1's config after its scaling was overwritten: the base is lost, keys of llama3 are left, the longest
length is still that of a factor of 16, and a key is misspelt."""


def main(folder: Path | None) -> None:
    with TemporaryDirectory() as scratch:
        path = Path(scratch, "config.json")
        path.write_text(json.dumps(BROKEN))
        found = doctor(path, length=LENGTH)
    fixed, done = repair(BROKEN, found)
    values = {"verdict": said(found), "diagnosis": dumped(found), "fixed": fixed, "repair": done.model_dump()}
    record(RESULTS / "broken-config.json", recipe={"config": BROKEN, "length": LENGTH}, values=values)
    if folder is not None:
        record(
            RESULTS / "smollm2.json", recipe={"checkpoint": "SmolLM2-135M-Instruct"}, values=smollm2(folder)
        )


def smollm2(folder: Path) -> dict[str, object]:
    def cast() -> torch.nn.Module:
        return load(folder).to(torch.bfloat16)

    def other_pairing() -> torch.nn.Module:
        model = load(folder)
        width = model.config.head_dim
        with torch.no_grad():
            for layer in model.model.layers:
                for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                    rows = projection.weight.unflatten(0, (-1, 2, width // 2))
                    projection.weight.copy_(rows.transpose(1, 2).reshape(projection.weight.shape))
        return model

    def scaled_after_loading() -> torch.nn.Module:
        model = load(folder)
        rope = {"rope_type": "yarn", "rope_theta": 100_000.0, "factor": 4.0}
        model.config.rope_parameters = {**rope, "original_max_position_embeddings": 8192}
        return model

    cases = {
        "as it is": lambda: doctor(folder),
        "in bfloat16": lambda: doctor(folder, dtype="bfloat16"),
        "in float16": lambda: doctor(folder, dtype="float16"),
        "at 131 072 tokens": lambda: doctor(folder, length=131_072),
        "cast to bfloat16 after loading": lambda: doctor(cast()),
        "rows of q and k in the other order": lambda: doctor(other_pairing()),
        "yarn set after loading": lambda: doctor(scaled_after_loading(), length=32_768),
    }
    values = {}
    for name, examine in cases.items():
        started = perf_counter()
        found = examine()
        print(f"{name}: {said(found)}", flush=True)
        values[name] = {
            "verdict": said(found),
            "seconds": round(perf_counter() - started, 1),
            **dumped(found),
        }
    return values


def dumped(found: Diagnosis) -> dict[str, object]:
    return found.model_dump(mode="json", exclude={"checkpoint"})


def said(found: Diagnosis) -> str:
    """The verdict without the path, which is this run's alone."""
    return verdict(found.model_copy(update={"checkpoint": "examined"}))


if __name__ == "__main__":
    arguments = parser("doctor_demo", __doc__)
    arguments.add_argument("folder", type=Path, nargs="?")
    main(arguments.parse_args().folder)

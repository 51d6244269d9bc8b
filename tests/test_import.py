"""`import phasewise` is light: torch, numpy and pydantic, and little time beyond torch's own."""

import json
import os
import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement

BASE = ("torch", "numpy", "pydantic")
HEAVY = ("triton", "transformers", "matplotlib", "tyro", "rich", "accelerate")
# CPU seconds rather than wall seconds: the same claim, less moved by what else the machine is doing. What torch left to
# the garbage collector, 0.1 s, is torch's, whoever's import it falls into.
MEASURE = """
import gc, json, sys, time
import torch
gc.collect()
gc.freeze()
before = set(sys.modules)
start = time.process_time()
import phasewise
seconds = time.process_time() - start
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"seconds": seconds, "loaded": sorted(loaded)}))
"""


def measure() -> dict:
    # Compiling sources anew is no part of importing what is installed.
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, env=given
    )
    return json.loads(done.stdout)


def base_packages() -> set[str]:
    """Import names of the base packages and of what they require."""
    wanted, seen = list(BASE), set()
    while wanted:
        name = wanted.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    owners = metadata.packages_distributions()
    return {top for top, names in owners.items() if {name.lower().replace("_", "-") for name in names} & seen}


def test_import_loads_only_torch_numpy_and_pydantic():
    loaded = {name for name in measure()["loaded"] if not name.startswith("_sysconfigdata")}
    loaded -= set(sys.stdlib_module_names)
    assert not loaded & set(HEAVY)
    assert loaded - base_packages() == {"phasewise"}


def test_import_takes_at_most_300_milliseconds_beyond_torch():
    measure()  # the first import also compiles bytecode
    assert min(measure()["seconds"] for _ in range(5)) <= 0.3, "another process only adds"

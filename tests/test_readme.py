"""Every example in the README, the documentation and the docstrings runs and prints what it says."""

import doctest
import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

import phasewise
from experiments.readme_figure import MARKER, encodings_table, with_table

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "phasewise"
NEEDS = {
    "phasewise.hf": "transformers",
    "phasewise.kernels": "triton",
    "phasewise.kernels.flash": "flash_attn",
    "phasewise.kernels.tapa_flash": "flash_attn",
}
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
# What is only subclassed or only returned; settings are shown by what they set.
NO_EXAMPLE = {"Choice", "Encoding", "Frequencies", "RopeSettings"} | {
    f"{kind}Config" for kind in ("NoPE", "RoPE", "PoPE", "TAPA", "ALiBi")
}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": page}
    for block in python_blocks((ROOT / page).read_text()):
        exec(compile(block, page, "exec"), namespace)


def test_readme_has_a_snippet_of_at_most_six_lines():
    snippet = python_blocks((ROOT / "README.md").read_text())[0]
    assert 0 < len(snippet.splitlines()) <= 6


def test_readme_table_is_the_recorded_demo():
    report = ROOT / "results" / "demo" / "report.json"
    if not report.exists():
        pytest.skip("results/demo/report.json is not recorded yet, so the README has no table to check")
    readme = (ROOT / "README.md").read_text()
    assert readme == with_table(readme, encodings_table(json.loads(report.read_text())), MARKER)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_print_what_they_say(name, tmp_path, monkeypatch):
    for package, requirement in NEEDS.items():
        if name.startswith(package) and importlib.util.find_spec(requirement) is None:
            pytest.skip(f"{name} needs {requirement}, which is optional and not installed")
    monkeypatch.chdir(tmp_path)
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert failed == 0


@pytest.mark.parametrize("name", phasewise.__all__)
def test_public_name_is_documented_with_an_example(name):
    documentation = getattr(phasewise, name).__doc__
    assert documentation
    assert name in NO_EXAMPLE or ">>>" in documentation, f"phasewise.{name} has no example in its docstring"

"""Imports go strictly down the ranks, or stay inside one's folder; files stay small."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "phasewise"
RANKS = {
    "positions": 0,
    "frequencies": 0,
    "problems": 0,
    "progress": 0,
    "record": 0,
    "interrupt": 0,
    "device": 0,
    "memory": 0,
    "lock": 0,
    "figures": 1,
    "frequencies_hf": 1,
    "encodings": 1,
    "kernels": 1,
    "blocked": 2,
    "fused": 2,
    "reference": 2,
    "attention": 3,
    "model": 4,
    "data": 5,
    "evaluate": 5,
    "hf": 5,
    "train": 6,
    "lens": 6,
    "bench": 6,
    "cli": 7,
    "__main__": 8,
    "phasewise": 8,
}
SOLE_USERS = {"triton": "kernels", "transformers": "hf"}
LINES, BYTES = 500, 1_000_000
LARGE_TEXT = PACKAGE / "data" / "austen.txt.xz"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(name: str, tree: ast.AST, *, is_package: bool) -> Iterator[str]:
    """Full dotted names that a module imports anywhere, functions included."""
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield inner if inner in MODULES else source


def folder(name: str) -> str:
    """The unit that has a rank: the first name below `phasewise`, or `phasewise` itself."""
    return name.split(".")[1] if "." in name else "phasewise"


def violations(name: str, source: str, *, is_package: bool = False) -> list[str]:
    """What the source of module `name` imports against the design."""
    home, found = folder(name), []
    if home not in RANKS:
        return [f"{name}: {home} has no rank; known: {', '.join(RANKS)}"]
    for target in imported(name, ast.parse(source), is_package=is_package):
        top = target.split(".")[0]
        if SOLE_USERS.get(top, home) != home:
            found.append(f"{name} imports {target}: only {SOLE_USERS[top]} may")
        if top in ("experiments", "tests"):
            found.append(f"{name} imports {target}: the library stands alone")
        if top == "phasewise" and folder(target) != home and RANKS.get(folder(target), 9) >= RANKS[home]:
            found.append(f"{name} (rank {RANKS[home]}) imports {target}: not below it")
    return found


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_only_what_lies_below_it(name):
    path = MODULES[name]
    assert violations(name, path.read_text(), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("phasewise.positions", "from phasewise.encodings import RoPE"),
        ("phasewise.positions", "from phasewise.frequencies import Geometric"),
        ("phasewise.encodings.rope", "import phasewise.kernels.tiles"),
        ("phasewise.kernels.tiles", "from ..encodings.base import angles"),
        ("phasewise.attention", "def late():\n    from phasewise.model import Transformer"),
        ("phasewise.attention", "from phasewise import Transformer"),
        ("phasewise.data.music", "from phasewise.evaluate import perplexity"),
        ("phasewise.attention", "import triton"),
        ("phasewise.model.transformer", "from transformers import AutoConfig"),
        ("phasewise.train.loop", "from experiments.readme_figure import draw"),
        ("phasewise.helpers", "import math"),
    ],
)
def test_forbidden_import_is_reported(name, source):
    assert len(violations(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("phasewise.encodings.rope", "from phasewise.frequencies import Geometric"),
        ("phasewise.encodings.rope", "from .base import angles"),
        ("phasewise.kernels.separable", "import triton.language as tl"),
        ("phasewise.train.loop", "from ..data import batch\nfrom ..evaluate import perplexity"),
        ("phasewise.cli", "from phasewise import train"),
    ],
)
def test_import_from_below_or_within_the_folder_is_allowed(name, source):
    assert violations(name, source) == []


def imported_at_once(name: str) -> set[str]:
    """What importing the module imports directly; what its functions import comes later."""
    path = MODULES[name]
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return set(imported(name, ast.Module(top, []), is_package=path.name == "__init__.py"))


def test_only_kernels_load_triton_when_imported():
    direct = {name: imported_at_once(name) for name in MODULES}
    loads = {name for name, targets in direct.items() if any(t.split(".")[0] == "triton" for t in targets)}
    while more := {name for name, targets in direct.items() if targets & loads} - loads:
        loads |= more
    assert {folder(name) for name in loads} <= {"kernels"}
    assert "phasewise.kernels" not in loads


def files(*folders: str, suffix: str = "") -> Iterator[Path]:
    for name in folders:
        for path in sorted((ROOT / name).rglob(f"*{suffix}")):
            if path.is_file() and not {"__pycache__", "phasewise.egg-info"} & set(path.parts):
                yield path


def test_source_files_have_at_most_500_lines():
    long = {
        str(path.relative_to(ROOT)): count
        for path in files("src", "tests", "experiments", suffix=".py")
        if (count := len(path.read_text().splitlines())) > LINES
    }
    assert long == {}


def test_files_are_at_most_one_megabyte():
    paths = files("src", "tests", "experiments", "docs", "results", ".ci")
    large = [str(path.relative_to(ROOT)) for path in paths if path.stat().st_size > BYTES]
    assert set(large) <= {str(LARGE_TEXT.relative_to(ROOT))}

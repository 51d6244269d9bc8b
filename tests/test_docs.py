"""Every command that README.md and the documentation show is taken by its own parser."""

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from phasewise.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
HISTORY = ("docs/log.md",)
"""What a dated page shows was a command on its day."""
LAUNCHED = re.compile(
    r"(\w+=\S+ )*((torchrun|accelerate launch) (.* )?-m|python -m) (?=\w+(\.[a-z_0-9]+)*( |$))"
)


class Parsed(BaseException):
    """A parser has taken its arguments: the command ends here, before it does anything."""


def code(page: str) -> list[str]:
    """The lines of a page's blocks, those that go on joined, and its code in prose that has arguments."""
    text = (ROOT / page).read_text()
    fenced = r"^( *)```(\w*)\n(.*?)^\1```"
    blocks = [body for _, language, body in re.findall(fenced, text, re.M | re.S) if language != "python"]
    lines = [line.strip() for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    prose = re.sub(fenced, "", text, flags=re.M | re.S)
    return lines + [span for span in re.findall(r"`([^`\n]+)`", prose) if len(span.split()) > 2]


def commands() -> list[tuple[str, str, tuple[str, ...]]]:
    """Page, module and arguments of each command."""
    found = []
    for page in PAGES:
        for line in code(page) if page not in HISTORY else ():
            launched = LAUNCHED.match(line)
            if launched or re.match(rf"phasewise ({'|'.join(COMMANDS)}) ", line):
                module, *arguments = shlex.split(line[launched.end() if launched else 0 :], comments=True)
                found.append((page, module, tuple(arguments)))
    return found


@pytest.mark.parametrize(
    ("page", "module", "arguments"),
    commands(),
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_command_of_a_page_parses(page, module, arguments, tmp_path, monkeypatch):
    import tyro

    def ending(parse):
        def parsed(*given, **options):
            parse(*given, **options)
            raise Parsed

        return parsed

    monkeypatch.setattr(tyro, "cli", ending(tyro.cli))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", ending(argparse.ArgumentParser.parse_args))
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.chdir(tmp_path)
    if module == "phasewise":
        with pytest.raises((Parsed, SystemExit, ValueError)) as ended:
            COMMANDS[arguments[0]](arguments[1:])
        helped = isinstance(ended.value, SystemExit) and ended.value.code == 0
        assert ended.type is Parsed or helped or "holds no run to resume" in str(ended.value)
        return
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{page} shows {module}, which there is not"
    assert spec.origin is not None
    if arguments and "ArgumentParser" in Path(spec.origin).read_text():
        with pytest.raises(Parsed):
            runpy.run_path(spec.origin, run_name="__main__")


def test_every_command_is_shown_by_a_page():
    assert {arguments[0] for _, module, arguments in commands() if module == "phasewise"} == set(COMMANDS)


@pytest.mark.parametrize("page", sorted(set(PAGES) - set(HISTORY)))
def test_targets_and_extras_that_a_page_shows_exist(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "\n".join([*code(page), *re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())])
    for target in re.findall(r"^make ([a-z-]+)", text, re.M):
        assert target in targets
    for names in re.findall(r"\.\[([a-z, ]+)\]", text):
        assert set(names.replace(" ", "").split(",")) <= set(extras)

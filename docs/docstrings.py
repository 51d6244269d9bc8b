"""A griffe extension: our plain docstrings as Markdown, arguments as a list and examples as code."""

import re

import griffe

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


def to_markdown(docstring: str) -> str:
    """Fences around `>>>` blocks; a list item for every line of the prose that starts with `name: `."""
    paragraphs = []
    for paragraph in EXAMPLE.sub(lambda found: f"```pycon\n{found.group()}\n```", docstring).split("\n\n"):
        if not paragraph.startswith("```") and ARGUMENT.match(paragraph):
            paragraph = ARGUMENT.sub(r"- `\1`: ", paragraph)
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


class PlainDocstrings(griffe.Extension):
    """Rewrites each docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)

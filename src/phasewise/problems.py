"""What pydantic found wrong with settings, in words of one line."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

Given = TypeVar("Given", bound=Sequence[Any])
Place = tuple[int | str, ...]
TOLD = ("value_error", "missing", "json_invalid", "union_tag_not_found")
"""Kinds of problems whose message has the value, or for which there is none."""


def problems(error: ValidationError) -> list[tuple[Place, str]]:
    """The place and the words of the first problem of each field; what merely follows from another is left out.

    >>> from pydantic import TypeAdapter
    >>> try:
    ...     TypeAdapter(dict[str, int]).validate_python({"layers": 1.5})
    ... except ValidationError as error:
    ...     problems(error)
    [(('layers',), 'Input should be a valid integer, got a number with a fractional part, but is 1.5')]
    """
    found: dict[Place, tuple[Place, str]] = {}
    for problem in error.errors():
        if problem["type"] != "default_factory_not_called":
            found.setdefault(problem["loc"][:1], (problem["loc"], _words(problem)))
    return list(found.values())


def first(error: ValidationError) -> str:
    """The first problem, after its place.

    >>> from pydantic import TypeAdapter
    >>> try:
    ...     TypeAdapter(dict[str, list[int]]).validate_python({"lengths": [1, "x"]})
    ... except ValidationError as error:
    ...     first(error)
    "lengths.1: Input should be a valid integer, unable to parse string as an integer, but is 'x'"
    """
    place, words = problems(error)[0]
    return ": ".join([*([".".join(map(str, place))] if place else []), words])


def once(values: Given) -> Given:
    """The values, none of which is given twice: ValueError names one that is.

    >>> once((1024, 4096))
    (1024, 4096)
    """
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is given twice: give it once")
    return values


def _words(problem: Mapping[str, Any]) -> str:
    more = problem.get("ctx", {})
    if problem["type"] == "too_short":
        return f"give at least {more['min_length']}"
    if problem["type"] == "union_tag_invalid":
        what = more["discriminator"].strip("'")
        return f"unknown {what} {more['tag']!r:.100}; choose from {more['expected_tags']}"
    message = problem["msg"].removeprefix("Value error, ")
    return message if problem["type"] in TOLD else f"{message}, but is {problem['input']!r:.100}"

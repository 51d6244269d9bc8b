"""Models by name: shapes from 10 million to 1.5 billion parameters.

A name counts the weights of the layers up to 50M, where vocabularies are small; from 124M on it counts those of
GPT-2's vocabulary too, shared with the head, as GPT-2's own names do.
"""

from typing import NamedTuple


class Shape(NamedTuple):
    """Width, layers and heads of a decoder, and whether its head shares the embedding's weight."""

    width: int
    layers: int
    heads: int
    tied: bool


SIZES = {
    "10M": Shape(384, 6, 6, False),
    "25M": Shape(512, 8, 8, False),
    "50M": Shape(640, 10, 10, False),
    "124M": Shape(768, 12, 12, True),
    "253M": Shape(1024, 16, 16, True),
    "355M": Shape(1024, 24, 16, True),
    "774M": Shape(1280, 36, 20, True),
    "1.5B": Shape(1600, 48, 25, True),
}

"""Packed rows: several documents side by side, each a segment of its own, and no place left empty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from phasewise.data.corpus import Split
from phasewise.positions import Positions


class Piece(NamedTuple):
    """`size` targets of a document from token `start` on; whole when these are all the document has."""

    document: int
    start: int
    size: int
    whole: bool


class Packed(NamedTuple):
    """Tokens and targets, int64 [rows, context], and their places."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: Positions


def pack(documents: Split, random: np.random.Generator, *, context: int, rows: int) -> Packed:
    """Rows full of pieces drawn from `documents`, every token about equally often.

    Pieces are drawn until they fill all rows together: a document of at most `context` targets whole, of a
    longer one a window of that size. Documents are laid whole into the first row with room; what fits
    nowhere, and windows, are cut to fill what is left. A cut loses no target: each part is followed by the
    next token of its document.
    """
    drawn = _draw(documents, random, context, rows * context)
    used = sorted({piece.document for piece in drawn})
    contents = dict(zip(used, documents.take(np.array(used)), strict=True))
    tokens, targets, index, segment = (np.empty((rows, context), dtype=np.int64) for _ in range(4))
    for row, pieces in enumerate(_lay(drawn, context, rows)):
        place = 0
        for number, (document, start, size, _) in enumerate(pieces):
            here = slice(place, place + size)
            tokens[row, here] = contents[document][start : start + size]
            targets[row, here] = contents[document][start + 1 : start + size + 1]
            index[row, here] = np.arange(size)
            segment[row, here] = number
            place += size
        assert place == context
    return Packed(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        Positions(torch.from_numpy(index), torch.from_numpy(segment)),
    )


def _draw(documents: Split, random: np.random.Generator, context: int, total: int) -> list[Piece]:
    """Pieces of `total` targets together; only the last may be cut to that end."""
    pieces: list[Piece] = []
    left = total
    while left > 0:
        drawn = documents.draw(random, 1 + left // context, context)
        for document, start, size in zip(*(each.tolist() for each in drawn), strict=True):
            size = min(size, left)
            if size:
                pieces.append(Piece(document, start, size, whole=size == documents.lengths[document] - 1))
            left -= size
    return pieces


def _lay(drawn: list[Piece], context: int, rows: int) -> list[list[Piece]]:
    laid: list[list[Piece]] = [[] for _ in range(rows)]
    room = [context] * rows
    loose: list[Piece] = []
    for piece in drawn:
        row = next((row for row in range(rows) if piece.whole and room[row] >= piece.size), None)
        if row is None:
            loose.append(piece)
        else:
            laid[row].append(piece)
            room[row] -= piece.size
    windows = [piece for piece in loose if piece.size == context]
    empty = [row for row in range(rows) if room[row] == context]
    for row, piece in zip(empty, windows, strict=False):
        laid[row].append(piece)
        room[row] = 0
        loose.remove(piece)
    cuts = _cuts(loose, [left for left in room if left])
    for row in range(rows):
        while room[row]:
            piece = next(cuts)
            laid[row].append(piece)
            room[row] -= piece.size
    return laid


def _cuts(pieces: list[Piece], gaps: list[int]) -> Iterator[Piece]:
    """The pieces end to end, cut where a gap ends; gaps and pieces hold equally much."""
    waiting = iter(gaps)
    gap = next(waiting, 0)
    for document, start, size, _ in pieces:
        while size:
            part = min(size, gap)
            yield Piece(document, start, part, whole=False)
            start, size, gap = start + part, size - part, gap - part
            if not gap:
                gap = next(waiting, 0)

"""What a tokenizer learns from where the text is larger than it needs: documents drawn by their content."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable

from phasewise.data.shards import Learned

MOST_LEARNED = 1 << 28


def drawn(documents: Iterable[bytes], most: int) -> tuple[list[bytes], Learned]:
    """The documents with the smallest hashes that hold `most` bytes, in their order, and what was drawn.

    All of them where they hold less; otherwise the one with the largest hash is cut to what is wanting. Which are
    drawn does not depend on the order of the documents. At most so many bytes and one document are in memory.

    >>> drawn([b"one", b"two", b"three"], 8)[0]
    [b'one', b'three']
    """
    kept: list[tuple[int, int, bytes]] = []
    held = number = size = 0
    for content in documents:
        key = int.from_bytes(hashlib.sha256(b"learn\0" + content).digest()[:8], "big")
        heapq.heappush(kept, (-key, -number, content))
        number, size, held = number + 1, size + len(content), held + len(content)
        while held - len(kept[0][2]) >= most:
            held -= len(heapq.heappop(kept)[2])
    if held > most:
        key, place, content = heapq.heappop(kept)
        heapq.heappush(kept, (key, place, _cut(content, len(content) - (held - most))))
    chosen = [content for _, _, content in sorted(kept, key=lambda each: -each[1])]
    held = sum(len(content) for content in chosen)
    return chosen, Learned(documents=len(chosen), text_bytes=held, of_documents=number, of_text_bytes=size)


def _cut(content: bytes, size: int) -> bytes:
    """The first `size` bytes, less those of a UTF-8 character that they would end within."""
    while size and content[size] & 0xC0 == 0x80:
        size -= 1
    return content[:size]

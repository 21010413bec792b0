"""How encoded data exceed the bounds on values and levels, counted without decoding them; pure, no I/O.

Decoded, a value of one byte can take a hundred bytes of memory, so what others wrote is counted first. Functions
named `…_excess` return text for an error, such as "more than 101 levels of nesting", or "" for none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tstore.format.bounds import DOCUMENT_BYTES, DOCUMENT_LEVELS, DOCUMENT_VALUES

__all__ = ["child_count", "packed_excess", "text_excess"]

_BLOCK = 1 << 20
# bytes to drop before brackets, or brackets and commas, are counted; quotes are still needed to find strings
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
_ALL_BUT_BRACKETS_AND_COMMAS = bytes(set(_ALL_BUT_BRACKETS) - set(b","))


def packed_excess(data: bytes | memoryview, values: int, levels: int, count: int = 0) -> str:
    """Return how msgpack data exceed these bounds; "" if they do not or are truncated.

    Counting starts at `count` and stops at the first value beyond the bounds.
    """
    if len(data) <= min(values - count, levels):  # each value and each level takes a byte or more
        return ""
    at, size = 0, len(data)
    remaining: list[int] = []  # values to come in each enclosing container
    while at < size:
        count += 1
        if count > values:
            return f"more than {values:,} values"
        children, at = _value_at(data, at)
        if children:
            remaining.append(children)
            if len(remaining) > levels:
                return f"more than {levels} levels of nesting"
            continue
        while remaining and remaining[-1] == 1:  # the last value of a container also ends the container
            remaining.pop()
        if remaining:
            remaining[-1] -= 1
    return ""


def child_count(data: bytes | memoryview) -> int:
    """Return the number of values directly in the first value of msgpack data: items, or keys and values."""
    return _value_at(data, 0)[0] if len(data) else 0


_LENGTHS = {
    **dict.fromkeys((0xCC, 0xD0), 1),
    **dict.fromkeys((0xCD, 0xD1), 2),
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 4),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 8),
    **{0xD4 + i: 1 + (1 << i) for i in range(5)},
}
"""By first byte, for numbers and extensions of fixed length: the number of bytes that follow it."""

_PREFIXED = {
    **dict.fromkeys((0xC4, 0xD9), (">B", 0)),
    **dict.fromkeys((0xC5, 0xDA), (">H", 0)),
    **dict.fromkeys((0xC6, 0xDB), (">I", 0)),
    0xC7: (">B", 1),
    0xC8: (">H", 1),
    0xC9: (">I", 1),
}
"""By first byte, for text, bytes and extensions: the `struct` format of the length, and the bytes not in it."""

_CONTAINERS = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}
"""By first byte, for arrays and maps: the `struct` format of the length, and the number of values in an item."""


def _value_at(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number of values directly in the value at this offset, and the offset of the next value."""
    first = data[at]
    if first < 0x80 or first >= 0xE0:  # a small integer
        return 0, at + 1
    if first < 0xA0:  # a short map, or from 0x90 on a short array
        return ((first & 15) * (2 if first < 0x90 else 1)), at + 1
    if first < 0xC0:  # a short text
        return 0, at + 1 + (first & 31)
    try:
        if first in _PREFIXED:
            form, more = _PREFIXED[first]
            [length] = struct.unpack_from(form, data, at + 1)
            return 0, at + 1 + struct.calcsize(form) + length + more
        if first in _CONTAINERS:
            form, each = _CONTAINERS[first]
            [length] = struct.unpack_from(form, data, at + 1)
            return length * each, at + 1 + struct.calcsize(form)
    except struct.error:
        return 0, len(data)  # truncated; the parser raises for it
    return 0, at + 1 + _LENGTHS.get(first, 0)


def text_excess(document: bytes, values: int = DOCUMENT_VALUES, levels: int = DOCUMENT_LEVELS) -> str:
    """Return how JSON exceeds these bounds or `DOCUMENT_BYTES`; "" if it does not."""
    if len(document) > DOCUMENT_BYTES:
        return f"{len(document):,} bytes, more than {DOCUMENT_BYTES:,}"
    if len(document) <= levels:
        return ""
    # first count with those in strings, which is fast: most documents have fewer
    opening = document.count(b"[") + document.count(b"{")
    if len(document) > values and opening + document.count(b",") > values:
        blocks = _without_strings(document, _ALL_BUT_BRACKETS_AND_COMMAS)
        if sum(np.count_nonzero((signs != ord("]")) & (signs != ord("}"))) for signs in blocks) > values:
            return f"more than {values:,} values"
    if opening > levels and _depth(document) > levels:
        return f"more than {levels} levels of nesting"
    return ""


def _depth(document: bytes) -> int:
    """Return how deep a document's brackets are nested, without those in its strings."""
    depth = deepest = 0
    for signs in _without_strings(document, _ALL_BUT_BRACKETS):
        steps = np.where((signs == ord("[")) | (signs == ord("{")), np.int32(1), np.int32(-1))
        depths = depth + steps.cumsum(dtype=np.int32)
        deepest, depth = max(deepest, int(depths.max(initial=0))), depth + int(steps.sum())
    return deepest


def _without_strings(document: bytes, others: bytes) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield a document without its strings and the bytes in `others`, in blocks, so that masks stay small."""
    bare = document.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, others)
    before = np.uint8(0)  # 1 within a string
    for start in range(0, len(bare), _BLOCK):
        signs = np.frombuffer(bare, np.uint8, min(_BLOCK, len(bare) - start), start)
        quotes = signs == ord('"')
        inside = (np.cumsum(quotes, dtype=np.uint8) + before) & 1
        before = inside[-1]
        yield signs[(inside == 0) & ~quotes]

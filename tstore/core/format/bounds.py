"""The bounds on bytes, values and levels of metadata, checked before anything is parsed; pure, no I/O.

    object                       key                         bytes at most
    marker                       tstore.json                 4 KiB
    hint                         latest                      64
    record                       commits/<20 digits>         8 MiB
    record of a gc               commits/<20 digits>         32 MiB   (it lists the living versions)
    archive of records           archives/<20 digits>        32 MiB   (longer records stay as they are)
    damaged record               damaged/…                   32 MiB   (set aside by `tstore repair`)
    root                         roots/<20 digits>           1 GiB
    manifest                     txn/<id>/manifest…          1 GiB
    fragment                     txn/<id>/part-…             8 MiB
    merged fragment              txn/<id>/merge-…            1 GiB    (with the manifests of many hosts)
    claim to merge               txn/<id>/merging-…          64       (or its withdrawal)
    heartbeat                    txn/<id>/alive-…            4 KiB
    pack                         txn/<id>/pack-…             unbounded: it is never read whole

    part of an object            at most
    metadata of a commit            1 MiB, 131,072 values, 101 levels
    metadata of one node         64 MiB, 2,097,152 values, 700 levels
    value of one host (PerHost)  2,097,152 values, 700 levels, arrays of less than 4 GiB
    structure of a fragment      64 bytes (the checksum of the structure of the tree)
    checksums of a fragment      65,536 (of values that every host has; writers combine those over 256 KiB)
    path of a node               4,096 characters, 256 levels (names between slashes)
    nodes and documents of a manifest, or of one of its pages: 131,072 each; of a root, 1,048,576
    names in one list            1,048,576 (packs, paths, objects, expired versions, dropped tags)
    tags that a record sets      65,536 of its own version, and 65,536 of earlier versions
    all tags of a snapshot       262,144, and 8 MiB: writers and servers refuse to add more; readers accept
                                 1,048,576. The record of a gc lists all of these tags.
    metrics of a commit          4,096: writers and servers refuse more; readers accept more
    living versions              419,430
    values in a record           524,288: names in its lists, 2 for each tag of an earlier version, and the
                                 metadata of all its transactions
    values in a gc's record      2,097,152: 5 for each living version, 2 for each metric and each expired tag, 1
                                 for each other name or number; a client needs about 250 MiB to decode them

A call that would exceed a bound raises `InvalidArgument`. The bounds allow a saved tree of 10^5 leaves, whose
structure takes about 10^6 values in the metadata of the root group, and 10^5 living versions with a tag and 7
metrics each (about 20 MiB).

The first 8 bytes of a record show whether a gc wrote it, so that a receiver can stop early (`max_size_from_head`).
Values are counted in the encoded data: decoded, a value of a single byte can take a hundred bytes of memory.
Functions named `…_excess_message` return text for an error, such as "more than 101 levels of nesting", or ""
within the bounds.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from tstore.core.format.layout import HINT, MARKER

__all__ = [
    "ARCHIVE_BYTES",
    "COLLECTION_BYTES",
    "COLLECTION_VALUES",
    "HEAD_BYTES",
    "LIVING_VALUES",
    "MANIFEST_BYTES",
    "MANIFEST_NODES",
    "MARKER_BYTES",
    "MAX_LIVING",
    "MAX_METRICS",
    "MAX_NAMES",
    "MAX_TAGS_SET",
    "METADATA_BYTES",
    "METADATA_LEVELS",
    "METADATA_VALUES",
    "PATH_LEVELS",
    "RECORD_BYTES",
    "RECORD_VALUES",
    "ROOT_BYTES",
    "STRUCTURE_BYTES",
    "child_count",
    "json_excess_message",
    "max_object_size",
    "max_size_from_head",
    "msgpack_excess_message",
    "path_excess_message",
    "tags_excess_message",
]

MARKER_BYTES = 4 << 10
HINT_BYTES = 64
RECORD_BYTES = 8 << 20
COLLECTION_BYTES = 32 << 20
ARCHIVE_BYTES = 32 << 20
ROOT_BYTES = 1 << 30
MANIFEST_BYTES = 1 << 30
FRAGMENT_BYTES = 8 << 20
CLAIM_BYTES = 64
HEARTBEAT_BYTES = 4 << 10

METADATA_BYTES, METADATA_VALUES, METADATA_LEVELS = 1 << 20, 1 << 17, 101  # of a commit
NODE_METADATA_BYTES, NODE_METADATA_VALUES, NODE_METADATA_LEVELS = 64 << 20, 1 << 21, 700
STRUCTURE_BYTES = 64
PATH_CHARACTERS, PATH_LEVELS = 4 << 10, 256
MAX_NAMES = 1 << 20
MANIFEST_NODES = 1 << 17  # in one frame; a longer manifest is in pages
MAX_TAGS_SET, _MAX_TAGS, _TAG_BYTES = 1 << 16, 1 << 18, 8 << 20
MAX_METRICS = 1 << 12
RECORD_VALUES = 1 << 19
COLLECTION_VALUES = 1 << 21
LIVING_VALUES = 5  # values in the entry of a living version, without the values in its lists
MAX_LIVING = COLLECTION_VALUES // LIVING_VALUES

HEAD_BYTES = 8
"""The length of a record's head, which shows whether a garbage collection wrote it."""

_FILE_SIZES = {MARKER: MARKER_BYTES, HINT: HINT_BYTES}
_FOLDER_SIZES = {
    "archives": ARCHIVE_BYTES,
    "commits": COLLECTION_BYTES,
    "damaged": COLLECTION_BYTES,
    "roots": ROOT_BYTES,
}
_TRANSACTION_SIZES = {
    "manifest": MANIFEST_BYTES,
    "part-": FRAGMENT_BYTES,
    "merge-": MANIFEST_BYTES,
    "merging-": CLAIM_BYTES,
    "alive-": HEARTBEAT_BYTES,
}
"""Maximum sizes of the objects in the folder of a transaction, by the prefix of the name."""

_GC_HEAD = b"tstoreR\2"


def max_object_size(key: str) -> int | None:
    """Return the maximum size of the object at this key, or None for a pack or an unknown key."""
    folder, slash, name = key.partition("/")
    if not slash:
        return _FILE_SIZES.get(key)
    if folder != "txn":
        return _FOLDER_SIZES.get(folder)
    name = name.partition("/")[2]
    return next((size for prefix, size in _TRANSACTION_SIZES.items() if name.startswith(prefix)), None)


def max_size_from_head(key: str, head: bytes | bytearray) -> int | None:
    """Return the maximum size of an object that begins with `head`; the head of a record shows if a gc wrote it.

    If `head` is too short, or the key is not that of a record, return what `max_object_size` returns.
    """
    if key.startswith("commits/") and len(head) >= HEAD_BYTES:
        return COLLECTION_BYTES if head.startswith(_GC_HEAD) else RECORD_BYTES
    return max_object_size(key)


def path_excess_message(path: str) -> str:
    """Return the message for the path of a node that exceeds its bounds, else ""."""
    if len(path) > PATH_CHARACTERS:
        return f"{len(path):,} characters, more than {PATH_CHARACTERS:,}"
    levels = path.count("/") + 1
    return f"{levels:,} levels, more than {PATH_LEVELS}" if levels > PATH_LEVELS else ""


def tags_excess_message(tags: Collection[str]) -> str:
    """Return the message for the tags of a snapshot if they exceed their bounds, else ""."""
    if len(tags) > _MAX_TAGS:
        return f"{len(tags):,} tags, more than {_MAX_TAGS:,}"
    size = len("".join(tags).encode())
    return f"tags of {size:,} bytes, more than {_TAG_BYTES:,}" if size > _TAG_BYTES else ""


_BLOCK = 1 << 20
# bytes to drop before brackets, or brackets and commas, are counted; quotes are still needed to find strings
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
_ALL_BUT_BRACKETS_AND_COMMAS = bytes(set(_ALL_BUT_BRACKETS) - set(b","))


def msgpack_excess_message(data: bytes | memoryview, values: int, levels: int, count: int = 0) -> str:
    """Return the message for msgpack data that exceed these bounds, or have a key that is not text, else "".

    Counting starts at `count` and stops at the first value beyond the bounds. Keys of other types are refused
    before parsing, because Python's hashes of arrays and numbers have no secret, so many keys could collide.
    """
    if len(data) <= min(values - count, levels):  # each value and each level takes a byte or more
        return ""
    at, size = 0, len(data)
    remaining: list[int] = []  # remaining values of each enclosing container
    in_map: list[bool] = []  # whether it is a map: then a key comes next if `remaining` is even
    while at < size:
        count += 1
        if count > values:
            return f"more than {values:,} values"
        first = data[at]
        if remaining and in_map[-1] and not remaining[-1] % 2 and not (0xA0 <= first < 0xC0 or first in _TEXT):
            return "a key that is not text"
        children, at = _value_at(data, at)
        if children:
            remaining.append(children)
            in_map.append(first < 0x90 or first >= 0xDE)
            if len(remaining) > levels:
                return f"more than {levels} levels of nesting"
            continue
        while remaining and remaining[-1] == 1:  # the last value of a container also ends the container
            remaining.pop()
            in_map.pop()
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
"""By first byte, for text, bytes and extensions: the `struct` format of the length, and the number of bytes that
the length does not count (1 for the type of an extension)."""

_TEXT = (0xD9, 0xDA, 0xDB)
"""The first bytes of text that is not short."""

_CONTAINERS = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}
"""By first byte, for arrays and maps: the `struct` format of the length, and the values per item (2 in a map)."""


def _value_at(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number of values directly in the value at this offset, and the offset of the next value."""
    first = data[at]
    if first < 0x80 or first >= 0xE0:  # a small integer
        return 0, at + 1
    if first < 0xA0:  # a short map (0x80) or a short array (0x90)
        return ((first & 15) * (2 if first < 0x90 else 1)), at + 1
    if first < 0xC0:  # a short text
        return 0, at + 1 + (first & 31)
    try:
        if first in _PREFIXED:
            length_format, uncounted = _PREFIXED[first]
            [length] = struct.unpack_from(length_format, data, at + 1)
            return 0, at + 1 + struct.calcsize(length_format) + length + uncounted
        if first in _CONTAINERS:
            length_format, per_item = _CONTAINERS[first]
            [length] = struct.unpack_from(length_format, data, at + 1)
            return length * per_item, at + 1 + struct.calcsize(length_format)
    except struct.error:
        return 0, len(data)  # truncated; the parser raises for it
    return 0, at + 1 + _LENGTHS.get(first, 0)


def json_excess_message(
    document: bytes, values: int = NODE_METADATA_VALUES, levels: int = NODE_METADATA_LEVELS
) -> str:
    """Return the message for JSON that exceeds these bounds or `NODE_METADATA_BYTES`, else ""."""
    if len(document) > NODE_METADATA_BYTES:
        return f"{len(document):,} bytes, more than {NODE_METADATA_BYTES:,}"
    if len(document) <= levels:
        return ""
    # first count brackets and commas inside strings too, which is fast: most documents stay within the bounds
    opening = document.count(b"[") + document.count(b"{")
    if len(document) > values and opening + document.count(b",") > values:
        blocks = _without_strings(document, _ALL_BUT_BRACKETS_AND_COMMAS)
        if sum(np.count_nonzero((chars != ord("]")) & (chars != ord("}"))) for chars in blocks) > values:
            return f"more than {values:,} values"
    if opening > levels and _depth(document) > levels:
        return f"more than {levels} levels of nesting"
    return ""


def _depth(document: bytes) -> int:
    """Return the nesting depth of a document's brackets, ignoring those in strings."""
    depth = deepest = 0
    for chars in _without_strings(document, _ALL_BUT_BRACKETS):
        steps = np.where((chars == ord("[")) | (chars == ord("{")), np.int32(1), np.int32(-1))
        depths = depth + steps.cumsum(dtype=np.int32)
        deepest, depth = max(deepest, int(depths.max(initial=0))), depth + int(steps.sum())
    return deepest


def _without_strings(document: bytes, omitted: bytes) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield a document without its strings and the bytes in `omitted`, in blocks, so that masks stay small."""
    bare = document.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, omitted)
    before = np.uint8(0)  # 1 within a string
    for start in range(0, len(bare), _BLOCK):
        chars = np.frombuffer(bare, np.uint8, min(_BLOCK, len(bare) - start), start)
        quotes = chars == ord('"')
        inside = (np.cumsum(quotes, dtype=np.uint8) + before) & 1
        before = inside[-1]
        yield chars[(inside == 0) & ~quotes]

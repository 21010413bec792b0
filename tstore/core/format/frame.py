"""The frame around every metadata object: its kind, format version and checksum; pure, no I/O.

b"tstore"      6 bytes
kind           1 byte    R record, M manifest, F fragment, T root (a tree), A archive of records
version        1 byte    the format version: 1; 2 for the record of a garbage collection; 3 for a record that drops
                         tags or tags earlier versions, 4 for an object with a manifest with segments, 5 for an
                         object that refers to one in pages, 6 for a root that refers to another or has pages, 7
                         for an object with a manifest of appended values, 8 for the record of a copy; an older
                         tstore must refuse these, not ignore what it does not know
body           msgpack
link           40 bytes  only in a record: the log to which it belongs and an earlier record (`Link`)
check          16 bytes  xxh3-128, big-endian, of all bytes before it
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tstore.core.format.bounds import ARCHIVE_BYTES, COLLECTION_BYTES, MANIFEST_BYTES, RECORD_BYTES, ROOT_BYTES
from tstore.core.format.checksums import CHECK_SIZE, digest
from tstore.core.format.plain_text import pluralize
from tstore.errors import Corrupt, UnsupportedFormat

__all__ = [
    "CHAINED",
    "COLLECTING",
    "COPYING",
    "EXTENDING",
    "LINK_SIZE",
    "MAGIC",
    "NO_RECORD",
    "PAGED",
    "PLAIN",
    "RETAGGING",
    "SEGMENTED",
    "SHORTEST_FRAME",
    "Link",
    "body_of",
    "check_of",
    "link_of",
    "linked",
    "seal",
    "unseal",
]

PLAIN, COLLECTING, RETAGGING, SEGMENTED, PAGED, CHAINED, EXTENDING, COPYING = range(1, 9)

MAGIC = b"tstore"
"""The first bytes of every frame."""

_HEADER = len(MAGIC) + 2

SHORTEST_FRAME = _HEADER + CHECK_SIZE
"""The length of a frame with an empty body, in bytes."""

NO_RECORD = bytes(CHECK_SIZE)
"""The checksum used for the nonexistent record of version 0."""

_LINK = struct.Struct(f"<16sQ{CHECK_SIZE}s")

LINK_SIZE = _LINK.size
"""The bytes of a link."""

_NAMES = {b"R": "a record", b"M": "a manifest", b"F": "a fragment", b"T": "a root", b"A": "an archive"}
_MAX_SIZES = {
    b"R": RECORD_BYTES,
    b"M": MANIFEST_BYTES,
    b"F": MANIFEST_BYTES,
    b"T": ROOT_BYTES,
    b"A": ARCHIVE_BYTES,
}


class Link(NamedTuple):
    """The link of a record to its place: the id of its log, and the version and checksum of an earlier record.

    The earlier record is the newest one against which the record had been validated when its bytes were made.
    """

    log_id: bytes = bytes(16)
    version: int = 0
    check: bytes = NO_RECORD


_NO_LINK = _LINK.pack(*Link())


def linked(data: bytes, link: Link) -> bytes:
    """Return the frame of a record with another link."""
    data = data[: -LINK_SIZE - CHECK_SIZE] + _LINK.pack(*link)
    return data + digest(data)


def link_of(data: bytes) -> Link:
    """Return the link in the frame of a record, without verifying the frame."""
    return Link(*_LINK.unpack_from(data, len(data) - LINK_SIZE - CHECK_SIZE))


def seal(kind: bytes, version: int, body: bytes) -> bytes:
    """Return a body in its frame; raise `Corrupt` if it is longer than readers accept.

    The link of a record is empty until `linked` sets it.
    """
    if kind == b"R":
        body += _NO_LINK
    _check_size(kind, version, _HEADER + len(body) + CHECK_SIZE)
    data = MAGIC + kind + bytes([version]) + body
    return data + digest(data)


def unseal(data: bytes, kind: bytes) -> memoryview:
    """Verify a frame and return its body; raise `Corrupt` if it is damaged, too long or of another kind.

    Raise `UnsupportedFormat` for a newer format version.
    """
    if data[: len(MAGIC)] != MAGIC or len(data) < SHORTEST_FRAME:
        raise Corrupt(
            f"expected a tstore object, got {pluralize(len(data), 'byte')}, which begin with {bytes(data[:8])!r}"
        )
    actual, version = data[len(MAGIC) : len(MAGIC) + 1], data[len(MAGIC) + 1]
    _check_size(actual, version, len(data))
    if digest(memoryview(data)[:-CHECK_SIZE]) != data[-CHECK_SIZE:]:
        raise Corrupt(f"the checksum of an object of {len(data)} bytes does not match: bits have changed")
    if version > COPYING:
        raise UnsupportedFormat(
            f"an object has format version {version}; this tstore reads up to {COPYING}: install a newer one"
        )
    if actual != kind:
        raise Corrupt(f"expected {_NAMES[kind]}, got {_NAMES.get(actual, f'an object of kind {actual!r}')}")
    return body_of(data)


def _check_size(kind: bytes, version: int, size: int) -> None:
    collecting = (kind, version) == (b"R", COLLECTING)
    limit = COLLECTION_BYTES if collecting else _MAX_SIZES.get(kind, COLLECTION_BYTES)
    if size > limit:
        raise Corrupt(f"an object of {size:,} bytes exceeds the limit of {limit:,} for its kind")


def body_of(data: bytes) -> memoryview:
    """Return the body of a frame, without verifying it."""
    end = len(data) - CHECK_SIZE - (LINK_SIZE if data[len(MAGIC)] == ord("R") else 0)
    return memoryview(data)[_HEADER : max(_HEADER, end)]


def check_of(data: bytes) -> bytes:
    """Return the checksum at the end of a frame, without verifying it."""
    return data[-CHECK_SIZE:]

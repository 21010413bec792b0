"""The bounds on bytes, values and levels of metadata, checked before anything is parsed; pure, no I/O.

    object                       name                        bytes at most
    marker                       tstore.json                 4 KiB
    hint                         latest                      64
    record                       commits/<20 digits>         8 MiB
    record of a gc               commits/<20 digits>         32 MiB   (it lists the living versions)
    damaged record               damaged/…                   32 MiB   (set aside by `tstore repair`)
    root                         roots/<20 digits>           1 GiB
    manifest                     txn/<id>/manifest…          1 GiB
    fragment                     txn/<id>/part-…             8 MiB
    merged fragment              txn/<id>/merge-…            1 GiB    (with the manifests of many hosts)
    claim to merge               txn/<id>/merging-…          64
    heartbeat                    txn/<id>/alive-…            4 KiB
    pack                         txn/<id>/pack-…             unbounded: it is never read whole

    part of an object            at most
    metadata of a commit            1 MiB, 131,072 values, 101 levels
    metadata of one node         64 MiB, 2,097,152 values, 700 levels
    structure of a fragment      64 bytes (a checksum)
    path of a node               65,536 characters, 256 levels (names between slashes)
    names in one list            1,048,576 (packs, paths, objects, expired versions, dropped tags)
    tags that a record sets      65,536
    tags of a version            262,144: writers and servers refuse to add more; readers accept 1,048,576
    metrics of a commit          4,096: writers and servers refuse more; readers accept more
    living versions              419,430
    values in a record           524,288: names in its lists, and the metadata of all its transactions
    values in a gc's record      2,097,152: 5 for each living version, 2 for each metric and each expired tag, 1
                                 for each other name or number; a client needs about 250 MiB to decode them

The first 8 bytes of a record show its kind, so that a receiver can stop early (`max_size_from_head`). A call that
would exceed a bound raises `InvalidArgument`. The bounds allow the structure of 10^5 leaves (about 10^6 values)
and 10^5 living versions with a tag and 7 metrics each (about 20 MiB).
"""

from __future__ import annotations

from tstore.format.layout import HINT, MARKER

__all__ = [
    "ALIVE_VALUES",
    "COLLECTION_BYTES",
    "COLLECTION_VALUES",
    "DOCUMENT_BYTES",
    "DOCUMENT_LEVELS",
    "DOCUMENT_VALUES",
    "HEAD_BYTES",
    "MANIFEST_BYTES",
    "MARKER_BYTES",
    "MAX_ALIVE",
    "MAX_METRICS",
    "MAX_NAMES",
    "MAX_TAGS",
    "MAX_TAGS_SET",
    "METADATA_BYTES",
    "METADATA_LEVELS",
    "METADATA_VALUES",
    "PATH_LEVELS",
    "RECORD_BYTES",
    "RECORD_VALUES",
    "ROOT_BYTES",
    "STRUCTURE_BYTES",
    "max_object_size",
    "max_size_from_head",
    "path_excess",
]

MARKER_BYTES = 4 << 10
HINT_BYTES = 64
RECORD_BYTES = 8 << 20
COLLECTION_BYTES = 32 << 20
ROOT_BYTES = 1 << 30
MANIFEST_BYTES = 1 << 30
FRAGMENT_BYTES = 8 << 20
CLAIM_BYTES = 64
HEARTBEAT_BYTES = 4 << 10

METADATA_BYTES, METADATA_VALUES, METADATA_LEVELS = 1 << 20, 1 << 17, 101
DOCUMENT_BYTES, DOCUMENT_VALUES, DOCUMENT_LEVELS = 64 << 20, 1 << 21, 700
STRUCTURE_BYTES = 64
PATH_CHARACTERS, PATH_LEVELS = 64 << 10, 256
MAX_NAMES = 1 << 20
MAX_TAGS_SET, MAX_TAGS = 1 << 16, 1 << 18
MAX_METRICS = 1 << 12
RECORD_VALUES = 1 << 19
COLLECTION_VALUES = 1 << 21
ALIVE_VALUES = 5  # in the entry of a living version, without those in its lists
MAX_ALIVE = COLLECTION_VALUES // ALIVE_VALUES

HEAD_BYTES = 8
"""How many of a record's first bytes show its kind."""

_FILES = {MARKER: MARKER_BYTES, HINT: HINT_BYTES}
_FOLDERS = {"commits": COLLECTION_BYTES, "damaged": COLLECTION_BYTES, "roots": ROOT_BYTES}
_TRANSACTION = {
    "manifest": MANIFEST_BYTES,
    "part-": FRAGMENT_BYTES,
    "merge-": MANIFEST_BYTES,
    "merging-": CLAIM_BYTES,
    "alive-": HEARTBEAT_BYTES,
}
"""Maximum sizes in the folder of a transaction, by the beginning of the name."""

_GC_HEAD = b"tstoreR\2"


def max_object_size(key: str) -> int | None:
    """Return the maximum size of the object at this key, or None for a pack or an unknown key."""
    folder, slash, name = key.partition("/")
    if not slash:
        return _FILES.get(key)
    if folder != "txn":
        return _FOLDERS.get(folder)
    name = name.partition("/")[2]
    return next((size for begin, size in _TRANSACTION.items() if name.startswith(begin)), None)


def max_size_from_head(key: str, head: bytes | bytearray) -> int | None:
    """Return the maximum size of an object that begins with `head`; of all records, only a gc's may be long."""
    if key.startswith("commits/") and len(head) >= HEAD_BYTES:
        return COLLECTION_BYTES if head.startswith(_GC_HEAD) else RECORD_BYTES
    return max_object_size(key)


def path_excess(path: str) -> str:
    """Return how the path of a node exceeds its bounds, as text for an error, or "" if it does not."""
    if len(path) > PATH_CHARACTERS:
        return f"{len(path):,} characters, more than {PATH_CHARACTERS:,}"
    levels = path.count("/") + 1
    return f"{levels:,} levels, more than {PATH_LEVELS}" if levels > PATH_LEVELS else ""

"""The keys of the objects in a store; pure, no I/O.

tstore.json                        the marker
latest                             the hint to the newest version
commits/<20 digits>                a record
archives/<20 digits>               an archive: the records of `ARCHIVE_EVERY` versions, named by the last of them
roots/<20 digits>                  a root: the tree of a version, as changes to an earlier root or to a manifest
txn/<id>/<kind>…                   the objects of one transaction: packs (pack-…), manifests (manifest…), fragments
                                   (part-…), merged fragments (merge-…), claims (merging-…), heartbeats (alive-…)
damaged/<20 digits>-<32 hex>       a record that `tstore repair` voided, named by its version and xxh3-128
tiers/…                            what the hosts of a job with several tiers tell each other (`tstore.tiers`)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "ARCHIVE_EVERY",
    "HINT",
    "MARKER",
    "ROOT_EVERY",
    "TRANSACTIONS",
    "archive_end",
    "archive_key",
    "archive_versions",
    "are_packs",
    "commit_key",
    "first_link",
    "folder_of",
    "is_archive",
    "is_collectable",
    "is_manifest",
    "is_object",
    "is_pack",
    "is_record",
    "is_root",
    "is_transaction",
    "is_transaction_object",
    "owner_of",
    "parent_root",
    "root_chain",
    "root_key",
    "roots_for",
    "version_of",
]

MARKER = "tstore.json"
HINT = "latest"
TRANSACTIONS = "txn/"

ROOT_EVERY = 64
"""A commit whose version is a multiple of this also writes the version's root and renews the hint."""

ARCHIVE_EVERY = 512
"""The number of records in an archive, which ends at a version that is a multiple of this."""

_FAN_OUT = 4  # the fan-out of the tree of roots: see `parent_root`

_ID = re.compile("[A-Za-z0-9_-][A-Za-z0-9._-]{0,250}")
_RECORD = re.compile("commits/[0-9]{20}")
_ROOT = re.compile("roots/[0-9]{20}")
_ARCHIVE = re.compile("archives/[0-9]{20}")
_TRANSACTION_OBJECT = re.compile(f"txn/{_ID.pattern}/(?:(?:pack|part|merge|merging|alive)-[^/]+|manifest[^/]*)")
_PACKS = re.compile(f"(?:txn/{_ID.pattern}/pack-[^/\n]+\n)*+")
_OTHER_OBJECT = "(?:archives|commits|roots)/[0-9]{20}|damaged/[0-9]{20}-[0-9a-f]{32}|latest|tstore[.]json"
_TIERS = "tiers/(?:offers/[0-9a-f]{32}/[0-9]{5,6}|decisions/[0-9]{20}|pushes/[0-9]{1,20}-[0-9]{1,20})"
_OBJECT = re.compile(f"{_OTHER_OBJECT}|{_TIERS}|{_TRANSACTION_OBJECT.pattern}")


commit_key: Callable[[int], str] = "commits/{:020d}".format
"""Returns the key of a commit's record."""

root_key: Callable[[int], str] = "roots/{:020d}".format
"""Returns the key of the root of a version."""


def archive_end(version: int) -> int:
    """Return the last version of the archive that has, or will have, the record of a version."""
    return -(-version // ARCHIVE_EVERY) * ARCHIVE_EVERY


def archive_versions(version: int) -> range:
    """Return the versions of the archive that has, or will have, the record of a version."""
    return range(archive_end(version) - ARCHIVE_EVERY + 1, archive_end(version) + 1)


def archive_key(version: int) -> str:
    """Return the key of the archive that has, or will have, the record of a version."""
    return f"archives/{-(-version // ARCHIVE_EVERY) * ARCHIVE_EVERY:020d}"


def by_archive(versions: Iterable[int]) -> dict[int, list[int]]:
    """Return versions by the `archive_end` of each."""
    blocks: dict[int, list[int]] = {}
    for version in versions:
        blocks.setdefault(-(-version // ARCHIVE_EVERY) * ARCHIVE_EVERY, []).append(version)
    return blocks


def first_link(version: int) -> int:
    """Return the earliest version to which the link of a version's record may refer."""
    return (version - 1) // ROOT_EVERY * ROOT_EVERY


def parent_root(version: int) -> int:
    """Return the version of the root to which the root of `version` refers for older nodes; 0 for none.

    Root n refers to root n - 4^i, where 4^i is the highest power of four that divides n, and has the changes
    since. So the nodes of a version are in at most three roots for each digit of n in base four, and every change
    is written once for each digit. This depends on the version alone, so all processes write the same roots.
    """
    number, step = version // ROOT_EVERY, 1
    while number and number % (step * _FAN_OUT) == 0:
        step *= _FAN_OUT
    return max(0, number - step) * ROOT_EVERY


def root_chain(version: int) -> list[int]:
    """Return the versions of the roots that a version up to the next root may be read from, oldest first."""
    chain, version = list[int](), version - version % ROOT_EVERY
    while version:
        chain.append(version)
        version = parent_root(version)
    return chain[::-1]


def roots_for(versions: Iterable[int]) -> set[int]:
    """Return the versions of all roots from which the trees of these versions may be read."""
    newest = {version - version % ROOT_EVERY for version in versions}
    return {root for version in newest for root in root_chain(version)}


def version_of(key: str) -> int:
    """Return the version in the key of a record, archive, root or saved record."""
    return int(key.rpartition("/")[2][:20])


def folder_of(transaction: str) -> str:
    """Return the folder of the objects that a transaction writes."""
    return f"{TRANSACTIONS}{transaction}"


def is_object(key: str) -> bool:
    """Return whether this can be the key of an object in a store."""
    return _OBJECT.fullmatch(key) is not None


def is_record(key: str) -> bool:
    """Return whether this is the key of a record."""
    return _RECORD.fullmatch(key) is not None


def is_archive(key: str) -> bool:
    """Return whether this is the key of an archive."""
    return _ARCHIVE.fullmatch(key) is not None


def is_root(key: str) -> bool:
    """Return whether this is the key of a root."""
    return _ROOT.fullmatch(key) is not None


def is_transaction_object(key: str) -> bool:
    """Return whether this is the key of an object in a transaction's folder."""
    return _TRANSACTION_OBJECT.fullmatch(key) is not None


def is_collectable(key: str) -> bool:
    """Return whether this is the key of an object that garbage collection may delete."""
    return is_transaction_object(key) or is_root(key)


def is_pack(key: str) -> bool:
    """Return whether this is the key of a pack."""
    return is_transaction_object(key) and key.rpartition("/")[2].startswith("pack-")


def are_packs(keys: Sequence[str]) -> bool:
    """Return whether all of these are the keys of packs."""
    lines = "\n".join((*keys, ""))
    if _PACKS.fullmatch(lines) and lines.count("\n") == len(keys):
        return True  # the usual case, checked with one expression
    return all(map(is_pack, keys))


def is_manifest(key: str) -> bool:
    """Return whether this is the key of a manifest."""
    return is_transaction_object(key) and key.rpartition("/")[2].startswith("manifest")


def is_transaction(name: str) -> bool:
    """Return whether this can be the id of a transaction."""
    return _ID.fullmatch(name) is not None


def owner_of(key: str) -> str:
    """Return the id of the transaction that wrote an object, or "" for an object outside of `txn/`."""
    top, _, rest = key.partition("/")
    return rest.partition("/")[0] if top == "txn" else ""

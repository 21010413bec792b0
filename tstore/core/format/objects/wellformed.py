"""Checks of the values in records, manifests and roots, which any program may have written; pure, no I/O.

Each check raises `Corrupt` with the reason. Text, tags and metadata follow the rules of `arguments`, which
refuses the same values when a writer passes them.

NumPy's calls would take most of reading a manifest of few chunks, so `surely_valid_rows` checks it without them.
"""

from __future__ import annotations

import datetime
import itertools
import operator
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.format.arguments import checked_metadata_values, checked_tag
from tstore.core.format.bounds import NODE_METADATA_LEVELS, PATH_LEVELS, json_excess_message, path_excess_message
from tstore.core.format.checksums import BLOCK, CHECK_SIZE
from tstore.core.format.layout import are_packs, is_pack, is_transaction
from tstore.core.format.objects.chunk_rows import SHORT_COLUMN, ChunkRow, chunk_rows, largest, parse_column, total
from tstore.errors import Corrupt, InvalidArgument

__all__ = [
    "LONGEST_MESSAGE",
    "NodeColumns",
    "check_ascending",
    "check_documents",
    "check_keys",
    "check_metadata",
    "check_nodes",
    "check_order",
    "check_packs",
    "check_paths",
    "check_tags",
    "check_time",
    "check_transactions",
    "date_of",
    "surely_valid_rows",
]

LONGEST_MESSAGE = 64 << 10
"""The longest message of a commit, in characters."""

_END_OF_TIME = 253_402_300_800.0  # the year 10,000, beyond the range of datetime
_PLAIN_TAG = re.compile(r"step/(?:0|[1-9][0-9]{0,17})|[A-Za-z_][A-Za-z0-9_.-]{0,200}")
_PLAIN_TAGS = re.compile(rf"(?:(?:{_PLAIN_TAG.pattern})\n)*+")
_CONTROL = re.compile(r"[\x00-\x1f]")
_FORBIDDEN_NAMES = ("", ".", "..", "zarr.json")


def date_of(time: float) -> datetime.datetime:
    """Return the date of a record's time, or the nearest date if the time is outside of the calendar."""
    try:
        return datetime.datetime.fromtimestamp(time, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        nearest = datetime.datetime.max if time > 0 else datetime.datetime.min
        return nearest.replace(tzinfo=datetime.UTC)


def check_transactions(names: Iterable[str]) -> None:
    """Check the ids of transactions."""
    for name in names:
        if not is_transaction(name):
            raise Corrupt(f"{name[:60]!r} is not the id of a transaction")


def check_time(time: float) -> None:
    """Check a time in seconds since 1970."""
    if not 0 <= time < _END_OF_TIME:
        raise Corrupt(f"the time {time} is outside of the calendar")


def check_tags(tags: Iterable[str]) -> None:
    """Check tags, each of which may be listed only once."""
    listed = tuple(tags)
    if len(listed) > 1:
        if len(set(listed)) < len(listed):
            repeated = next(tag for tag, count in Counter(listed).items() if count > 1)
            raise Corrupt(f"the tag {repeated[:60]!r} is listed twice")
        lines = "\n".join((*listed, ""))
        if _PLAIN_TAGS.fullmatch(lines) and lines.count("\n") == len(listed):
            return  # the usual case, checked with one expression
    for tag in listed:
        if not _PLAIN_TAG.fullmatch(tag):
            try:
                checked_tag("tag", tag)
            except InvalidArgument as error:
                raise Corrupt(str(error)) from error


def check_paths(paths: Sequence[str]) -> None:
    """Check the paths of nodes by the rules of `tree.checked_new_path`, but all names at once."""
    joined = "/".join(("", *paths, "")) if paths else ""
    wrong = "//" in joined or "/./" in joined or "/../" in joined or "/zarr.json/" in joined
    if wrong or (not joined.isprintable() and _CONTROL.search(joined)):
        forbidden = {*_FORBIDDEN_NAMES}
        invalid = next(p for p in paths if _CONTROL.search(p) or not forbidden.isdisjoint(p.split("/")))
        raise Corrupt(f"{invalid[:60]!r} is not the path of a node")
    if len(joined) > PATH_LEVELS and max(map(len, paths)) > PATH_LEVELS:  # a shorter path has fewer levels
        for path in paths:
            if excess := path_excess_message(path):
                raise Corrupt(f"the path {path[:60]!r}… has {excess}")


def check_keys(keys: Iterable[str], allowed: Callable[[str], bool], what: str) -> None:
    """Check the keys of objects with `allowed`; `what` describes an allowed object in the error."""
    for key in keys:
        if not allowed(key):
            raise Corrupt(f"{key[:60]!r} is not the key of {what}")


def check_packs(keys: Sequence[str]) -> None:
    """Check the keys of packs."""
    if not are_packs(keys):
        check_keys(keys, is_pack, "a pack")


def check_ascending(versions: Sequence[int], what: str) -> None:
    """Check that versions are listed in ascending order, each once; `what` describes them in the error."""
    if versions and versions[0] < 1:
        raise Corrupt(f"version {versions[0]} is listed among the {what} versions")
    if any(later <= version for version, later in itertools.pairwise(versions)):
        raise Corrupt(f"the {what} versions are out of order, or one is listed twice")


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Check the metadata of a commit."""
    if metadata:
        try:
            checked_metadata_values(metadata)
        except InvalidArgument as error:
            raise Corrupt(str(error)) from error


def check_documents(documents: Iterable[bytes]) -> None:
    """Check the bounds of the metadata documents of nodes; each is parsed when its node is used."""
    for document in documents:
        if excess := json_excess_message(document):
            raise Corrupt(f"the metadata of a node has {excess}")


_U32 = [struct.Struct(f"<{count}I").unpack for count in range(SHORT_COLUMN + 1)]
_U64 = [struct.Struct(f"<{count}Q").unpack for count in range(SHORT_COLUMN + 1)]


class NodeColumns(NamedTuple):
    """The fields of a `Manifest` that describe its nodes."""

    documents: Sequence[bytes]
    paths: Sequence[str]
    document: bytes
    replaces_node: bytes
    counts: bytes


def surely_valid_rows(
    nodes: NodeColumns, packs: Sequence[bytes], chunks: tuple[bytes, bytes, bytes, bytes, bytes]
) -> list[ChunkRow] | None:
    """Return the few rows of a manifest without segments if it is certainly valid.

    `packs` are its packs, all inline, and `chunks` are its fields from `number` to `checks`. None says only that
    this check is too simple for the manifest.
    """
    number, pack, offset, length, checks = chunks
    n, rows = len(nodes.paths), len(pack) // 4
    if not (0 < n <= SHORT_COLUMN and 0 < rows <= SHORT_COLUMN):
        return None
    try:
        counts, positions = _U64[n](nodes.counts), _U32[n](nodes.document)
        numbers, lengths = _U64[rows](number), _U64[rows](length)
        places, offsets = _U32[rows](pack), _U64[rows](offset)
        check_paths(nodes.paths)
    except (struct.error, Corrupt):
        return None
    valid = (
        max(lengths) <= BLOCK  # so that each chunk has one checksum
        and len(checks) == CHECK_SIZE * rows
        and max(places) < len(packs)
        and (len(packs) == 1 or len(set(packs)) == len(packs))
        and max(offsets) < 1 << 62
        and sum(counts) == rows
        and (rows == 1 or all(map(operator.lt, numbers, numbers[1:])))
        and max(positions) < len(nodes.documents)
        and max(map(len, nodes.documents)) <= NODE_METADATA_LEVELS  # bytes, so it has no more levels or values
        and len(nodes.replaces_node) == n
        and max(nodes.replaces_node) <= 3
        and (n == 1 or all(map(operator.lt, nodes.paths, nodes.paths[1:])))
    )
    if not valid:
        return None
    split = [checks[at : at + CHECK_SIZE] for at in range(0, len(checks), CHECK_SIZE)]
    return chunk_rows(numbers, [packs[at] for at in places], offsets, lengths, split)


def check_nodes(nodes: NodeColumns, rows: int) -> None:
    """Raise `Corrupt` if the columns of the nodes are invalid, or their counts do not add up to `rows`."""
    n, paths = len(nodes.paths), nodes.paths
    if len(nodes.document) != 4 * n or len(nodes.replaces_node) != n or len(nodes.counts) != 8 * n:
        raise Corrupt("the columns of a manifest differ in length")
    if total(parse_column(nodes.counts, "<u8"), rows) != rows:
        raise Corrupt("the chunk counts in a manifest do not add up to its number of chunks")
    if n and largest(parse_column(nodes.document, "<u4")) >= len(nodes.documents):
        raise Corrupt("a manifest refers to a metadata document that it does not have")
    check_paths(list(filter(None, paths)))
    if not all(map(operator.lt, paths, itertools.islice(paths, 1, None))):
        raise Corrupt("the nodes of a manifest are out of order, or one is listed twice")
    if nodes.replaces_node.translate(None, b"\0\1\2\3"):
        raise Corrupt("a manifest has a flag that is none of 0, 1, 2 and 3")


def check_order(number: npt.NDArray[np.uint64], ends: npt.NDArray[np.int64]) -> None:
    """Raise `Corrupt` unless chunk numbers rise within each node; the rows of nodes end at `ends`."""
    rising = number[1:] > number[:-1]
    if rising.all():
        return
    rising[ends[(ends > 0) & (ends < len(number))] - 1] = True  # boundaries between nodes
    if not rising.all():
        raise Corrupt("the chunks of a node are out of order, or one is listed twice")

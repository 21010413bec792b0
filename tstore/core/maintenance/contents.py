"""The arrays of a version with their shapes, codecs and stored sizes; only metadata is read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from tstore.core.format.arrays.codecs import codecs_text
from tstore.core.format.arrays.dtypes import dtype_text
from tstore.core.format.layout import owner_of
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.paths import depth_first_order, is_at_or_below
from tstore.core.format.patterns import compile_patterns, extent_of
from tstore.core.format.tree.node import Node
from tstore.core.log.expiry import state_of
from tstore.core.log.reader import LogReader
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.errors import NotFound

__all__ = [
    "ArrayInfo",
    "DetailedArray",
    "DetailedListing",
    "DetailedTotal",
    "ListedArray",
    "Listing",
    "array_info",
    "contents",
    "detailed_listing",
    "glob_of",
    "listing",
    "selected_by",
]


class ArrayInfo(NamedTuple):
    """The type, shape, codec and size of one array. `stored_bytes` counts the encoded bytes of its chunks."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    codec: str
    stored_bytes: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per element, codec headers and the padding of edge chunks included; 0 for an empty array."""
        return 8 * self.stored_bytes / self.size if self.size else 0.0


def selected_by(snapshot: Snapshot, path: str) -> Callable[[str], bool]:
    """Return a predicate for the paths at and below `path`, or, if `path` is a pattern, for those that match it.

    The path of an existing array or group is not a pattern, even if it has wildcards.
    """
    top = path.strip("/")
    return compile_patterns(top) if _is_pattern(snapshot, top) else lambda p: is_at_or_below(p, top)


def glob_of(snapshot: Snapshot, path: str) -> str | None:
    """Return the glob that matches what `selected_by` selects; None for a path with wildcards, which has none."""
    top = path.strip("/")
    if _is_pattern(snapshot, top):
        return top
    return None if _has_wildcards(top) else f"{top}/**" if top else "**"


def _has_wildcards(top: str) -> bool:
    return any(wildcard in top for wildcard in "*?")


def _is_pattern(snapshot: Snapshot, top: str) -> bool:
    return _has_wildcards(top) and top not in snapshot.tree.nodes


def _nearby(snapshot: Snapshot, top: str) -> Iterable[str]:
    """Return the paths of the nodes that a path or pattern may select; reads only the pages that may have one."""
    nodes = snapshot.tree.nodes
    if not _is_pattern(snapshot, top):
        return nodes.at_or_below(top)
    extent = extent_of(top)
    if "" in extent.starts:
        return nodes
    starting = itertools.chain.from_iterable(map(nodes.starting_with, extent.starts))
    return dict.fromkeys((*filter(nodes.__contains__, extent.paths), *starting))


def contents(snapshot: Snapshot, path: str = "", scalars: Collection[str] = ()) -> list[ArrayInfo]:
    """Return the arrays at and below a path, or those that match a pattern such as `params/**/w`.

    `scalars` are the paths of Python scalars, which the result omits. Raise `NotFound`, with other paths to try,
    if there is nothing at the path, or neither an array nor a scalar matches the pattern.
    """
    top, selects = path.strip("/"), selected_by(snapshot, path)
    nodes = snapshot.tree.nodes
    selected = depth_first_order(filter(selects, _nearby(snapshot, top)))  # before a node is looked up
    nodes_by_path = nodes.many(selected)
    arrays: list[ArrayInfo] = []
    first_with_metadata: dict[int, ArrayInfo] = {}  # by identity: many arrays share their metadata
    for at in selected:
        if (node := nodes_by_path[at]).is_array:
            key = id(node.metadata)
            first = first_with_metadata.get(key) or first_with_metadata.setdefault(key, array_info(at, node))
            arrays.append(ArrayInfo(at, *first[1:-1], node.stored_bytes))
    if not arrays and top and top not in nodes and not any(map(selects, scalars)):
        paths = [*(p for p, node in nodes.items() if node.is_array), *scalars]
        names = list(dict.fromkeys(p.partition("/")[0] for p in paths))
        hint = f"its top-level paths are: {', '.join(names[:5])}" if names else "it has no arrays"
        hint += ", …" if len(names) > 5 else ""
        is_below = compile_patterns(f"{top}/**")
        if any(map(is_below, paths)):  # the pattern matches groups only
            hint = f"to select the arrays below, pass {top + '/**'!r}"
        elif any(p.startswith(top) and "/" not in p[len(top) :] for p in paths):
            hint += f"; to select those that begin so, pass {top + '*'!r}"
        raise NotFound(f"{snapshot.location} has no array or group {path!r}; {hint}")
    return arrays


class ListedArray(msgspec.Struct):
    """The row of an array in a `Listing`."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    codec: str
    stored_bytes: int
    bits_per_value: float


class DetailedArray(ListedArray):
    """The row of an array in a `DetailedListing`."""

    chunk_count: int
    value_bytes: int
    shared_bytes: int


class Total(msgspec.Struct):
    """The last row of a `Listing`."""

    arrays: int
    values: int
    stored_bytes: int
    bits_per_value: float


class DetailedTotal(Total):
    """The last row of a `DetailedListing`."""

    value_bytes: int
    shared_bytes: int


class Listing(msgspec.Struct):
    """A version, its tags, its arrays (those of `contents`) and totals."""

    version: int
    tags: list[str]
    arrays: list[ListedArray]
    total: Total


class DetailedListing(msgspec.Struct):
    """A `Listing` with the number of chunks, the bytes of the values and the shared bytes of each array.

    Shared bytes are those of chunks in packs that earlier versions wrote. Inline chunks are never shared.
    """

    version: int
    tags: list[str]
    arrays: list[DetailedArray]
    total: DetailedTotal


def listing(snapshot: Snapshot, path: str = "", scalars: Collection[str] = ()) -> Listing:
    """Return the arrays that `contents` returns as a `Listing`."""
    infos = contents(snapshot, path, scalars)
    stored, values = sum(a.stored_bytes for a in infos), sum(a.size for a in infos)
    tags = [tag for tag, version in snapshot.tags.items() if version == snapshot.version]
    arrays = [ListedArray(*a, a.bits_per_value) for a in infos]
    total = Total(len(arrays), values, stored, 8 * stored / values if values else 0.0)
    return Listing(snapshot.version, tags, arrays, total)


async def detailed_listing(
    log: LogReader, snapshot: Snapshot, path: str = "", scalars: Collection[str] = ()
) -> DetailedListing:
    """Return the arrays that `contents` returns as a `DetailedListing`."""
    version = await state_of(log, snapshot.version)
    own_transactions = frozenset((await log.record(version)).transactions) if version else frozenset()
    return await run(_detailed, snapshot, path, scalars, own_transactions)


def _detailed(
    snapshot: Snapshot, path: str, scalars: Collection[str], own_transactions: frozenset[str]
) -> DetailedListing:
    listed = listing(snapshot, path, scalars)
    arrays = []
    for array in listed.arrays:
        node = snapshot.tree.nodes[array.path]
        arrays.append(
            DetailedArray(
                **msgspec.structs.asdict(array),
                chunk_count=node.chunk_count,
                value_bytes=node.meta.size * node.meta.dtype.itemsize,
                shared_bytes=sum(_shared_bytes(part, own_transactions) for part in node.parts()),
            )
        )
    total = DetailedTotal(
        **msgspec.structs.asdict(listed.total),
        value_bytes=sum(array.value_bytes for array in arrays),
        shared_bytes=sum(array.shared_bytes for array in arrays),
    )
    return DetailedListing(listed.version, listed.tags, arrays, total)


def _shared_bytes(chunks: ChunkTable, own_transactions: frozenset[str]) -> int:
    """Return how many encoded bytes the chunks have in packs that other transactions wrote."""
    positions = np.unique(chunks.pack)
    packs = (chunks.packs[position] for position in positions.tolist())
    shared = positions[[isinstance(pack, str) and owner_of(pack) not in own_transactions for pack in packs]]
    return int(chunks.length[np.isin(chunks.pack, shared)].sum())


def array_info(path: str, node: Node) -> ArrayInfo:
    """Return the description of the array at a node."""
    meta = node.meta
    stored = node.stored_bytes
    return ArrayInfo(
        path, dtype_text(meta.dtype), meta.shape, meta.chunks, codecs_text(meta.chain.documents), stored
    )

"""Snapshots: the read-only tree of groups and arrays as of one commit."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import exmy
import numpy as np
import numpy.typing as npt

from tstore.core.array import Appended, Array, read_of
from tstore.core.calls import ArrayCall, Call
from tstore.core.data.destinations import check_distinct, note_partly_read
from tstore.core.data.pieces import ReadJob, StackJob
from tstore.core.data.planning import ReadPlan, planned_bytes, read_plan
from tstore.core.data.reader import SharedReads, is_local, read_chunks, read_local
from tstore.core.format.arguments import checked_text, quote
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import Selection, chunk_coordinates
from tstore.core.format.arrays.points import PointSelection
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.tables import last_number
from tstore.core.format.paths import checked_path
from tstore.core.format.tree.node import Node, check_in_grid
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE, Tree
from tstore.core.log.expiry import check_alive, guard_expiry, newest_tree
from tstore.core.log.pages import read_pages
from tstore.core.log.reader import LogReader
from tstore.core.runtime.pool import run
from tstore.core.storage.local.store import LocalStorage
from tstore.errors import InvalidArgument, Misuse, NotFound, SnapshotExpired, TStoreError

if TYPE_CHECKING:  # imported for reads of encoded chunks, for mapping, and for patches
    from tstore.core.data.changes import Patch
    from tstore.core.data.encoded_chunks import Deliver
    from tstore.core.data.mapping import MappedArray, NotMapped

__all__ = ["Snapshot", "SnapshotCall", "array_node", "head_snapshot", "snapshot_of"]


class Snapshot:
    """The groups and arrays of a store as of one version, which never changes under its reader."""

    def __init__(self, log: LogReader, tree: Tree) -> None:
        self.log = log
        """The log in which the version is."""
        self.tree = tree
        """The nodes and tags of this version."""

    @property
    def version(self) -> int:
        """The version, 0 for the empty store before its first commit."""
        return self.tree.version

    @functools.cached_property
    def _reads(self) -> SharedReads:
        return SharedReads(self.log.storage)

    @property
    def location(self) -> str:
        """The URL of the store and the version, for error messages."""
        return f"{self.log.storage.url} at version {self.version}"

    @property
    def tags(self) -> dict[str, int]:
        """All tags with the versions that they name, as of this version (for the head, as of opening it)."""
        return dict(self.tree.tags)

    def paths(self) -> list[str]:
        """Return the paths of all arrays, sorted."""
        with self._noticing_expiry():
            return sorted(self.tree.nodes.array_paths())

    def attributes(self, path: str = "") -> dict[str, Any]:
        """Return the attributes of the array or group at a path, {} if it has none or nothing is there."""
        with self._noticing_expiry():
            node = self.tree.nodes.get(checked_text("path", path).strip("/"))
        return {} if node is None else node.attributes

    @contextlib.contextmanager
    def _noticing_expiry(self) -> Iterator[None]:
        """Raise `SnapshotExpired` if the block finds that an object is missing; it can't await the log."""
        try:
            yield
        except NotFound as error:
            raise SnapshotExpired(
                f"{error}; if a garbage collection has removed version {self.version} since it was opened, open a "
                "newer version (tstore log lists those that are alive)"
            ) from error

    def reserved_attributes(self) -> dict[str, Any]:
        """Return tstore's own attributes of the root group, unchecked: another program may have written them."""
        reserved = self.attributes().get(RESERVED_ATTRIBUTE)
        return reserved if isinstance(reserved, dict) else {}

    def reserved_attribute(self, name: str) -> bytes:
        """Return the JSON of one of tstore's own attributes, not decoded, which is faster if it is long."""
        with self._noticing_expiry():
            node = self.tree.nodes.get("")
        return (None if node is None else node.metadata.attribute(RESERVED_ATTRIBUTE, name)) or b"null"

    async def read_nodes(self, paths: Collection[str] | None = None) -> None:
        """Read the metadata of the nodes at these paths, or of all nodes.

        The metadata of many arrays is read when it is needed. After this call, `paths` and `attributes` need not
        wait for the storage. Raise `SnapshotExpired` if the version has expired.
        """
        if self.tree.nodes.is_paged:
            await guard_expiry(self.log, self.version, read_pages(self.tree.nodes, paths))

    def array(self, path: str) -> ArrayCall:
        """Return the array at a path; raise `NotFound`, which names similar paths, if there is none.

        Its values can be read at once: `snapshot.array("w")[0:10].read()`.
        """
        return ArrayCall(self._array(path))

    def __getitem__(self, path: str) -> ArrayCall:
        """Return the array at a path, as `array` does."""
        return self.array(path)

    def __contains__(self, path: object) -> bool:
        """Return whether there is an array at a path."""
        with self._noticing_expiry():
            node = self.tree.nodes.get(path) if isinstance(path, str) else None
        return node is not None and node.is_array

    def __iter__(self) -> Iterator[str]:
        """Iterate over the paths of all arrays, sorted."""
        return iter(self.paths())

    async def _array(self, path: str) -> Array:
        path = checked_path(path)
        await self.read_nodes([path])
        return Array(self, path, array_node(self.tree, path, self.location).meta)

    async def read_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> None:
        """Read a selection into `out`, which has the axes of the selection's result."""
        await self.read_nodes([path])
        node = array_node(self.tree, path, self.location)
        await guard_expiry(self.log, self.version, self._reads.read(ReadJob(path, meta, node, selection, out)))

    def read_in_this_thread(
        self, view: Array, out: npt.NDArray[Any] | None = None, threads: int = 1
    ) -> npt.NDArray[Any] | None:
        """Return what `view.read(out)` returns if its chunks are local, else None.

        Blocking; takes `threads` at most, the calling one included. Return None if the read fails, too:
        `Array.read` raises the error. Raise `InvalidArgument` for an unsuitable `out`.
        """
        storage = self.log.storage
        _, path, shown, _ = view.parts
        try:
            node = array_node(self.tree, path, self.location)
            selection = shown.selection()
            if not is_local(storage):
                return None
            read = read_of(view, out)
            read_local(storage, ReadJob(path, read.meta, node, selection, read.target), threads)
            return read.finished()
        except TStoreError:
            return None

    async def patches(self, since: int | str) -> AsyncGenerator[Patch, None]:
        """Yield the values that differ from another version, a version number or a tag, array by array.

        Chunks that both have are not read. Values are compared bit for bit, so NaN equals NaN, and -0 is
        not 0. An array that is new, or has another shape or dtype, is yielded as a whole, as is one that is
        smaller than its differences would be; one that only the other version has is not yielded. Raise `NotFound`
        if there is no such version, and `SnapshotExpired` if garbage collection removed it: then read all arrays.

        Examples
        --------
        >>> import tstore.sync as tstore
        >>> for step in range(2):
        ...     _ = tstore.save("memory://of-patches", {"w": np.arange(8.0) + (np.arange(8) == 5) * step}, step)
        >>> for path, indices, values in tstore.open("memory://of-patches").snapshot().patches(since=1):
        ...     print(path, indices, values)
        w [5] [6.]
        """
        from tstore.core.data.changes import patches
        from tstore.core.log.history import version_named

        if isinstance(since, bool) or not isinstance(since, int | str | np.integer):
            raise InvalidArgument(f"since={quote(since)}: expected a version or a tag")
        newest = await self.log.newest()
        number = await version_named(self.log, since if isinstance(since, str) else int(since), newest)
        before = await snapshot_of(self.log, number, newest)
        paths = await run(before.tree.nodes.apart, self.tree.nodes)
        for snapshot in (before, self):
            await snapshot.read_nodes(paths)
        old, new = before.tree.nodes, self.tree.nodes
        pairs = [
            (earlier if earlier is not None and earlier.is_array else None, node)
            for path in sorted(paths)
            if (node := new.get(path)) is not None and node.is_array and node is not (earlier := old.get(path))
        ]
        found = patches(self.log.storage, pairs)

        async def next_patch() -> Patch | None:
            return await anext(found, None)

        while patch := await guard_expiry(self.log, number, guard_expiry(self.log, self.version, next_patch())):
            yield patch

    async def map_array(self, path: str) -> MappedArray | None:
        """Return an array in mapped memory, None if it can't be mapped."""
        from tstore.core.data.mapping import NotMapped

        await self.read_nodes([path])
        [mapped] = await self.map_nodes([array_node(self.tree, path, self.location)])
        return None if isinstance(mapped, NotMapped) else mapped

    async def map_nodes(self, nodes: Iterable[Node]) -> list[MappedArray | NotMapped]:
        """Return arrays in mapped memory, or why each can't be mapped."""
        from tstore.core.data.mapping import Mapper

        mapper = Mapper(self.log.storage)
        return await guard_expiry(self.log, self.version, run(lambda: [mapper.map(node) for node in nodes]))

    async def explain_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> ReadPlan:
        """Return what `read_array` with the same arguments would read."""
        await self.read_nodes([path])
        job = ReadJob(path, meta, array_node(self.tree, path, self.location), selection, out)
        return await guard_expiry(self.log, self.version, run(read_plan, self.log.storage, job))

    async def stored_chunks(self, path: str, meta: ArrayMeta) -> npt.NDArray[np.int64]:
        """Return the numbers of the chunks of an array that exist, ascending; raise `Corrupt`."""
        await self.read_nodes([path])
        node = array_node(self.tree, path, self.location)
        return await guard_expiry(self.log, self.version, run(node.numbers))

    async def read_many(
        self, views: Iterable[Array], out: Iterable[npt.NDArray[Any]] | None = None
    ) -> list[npt.NDArray[Any]]:
        """Return the values of arrays of this snapshot, or of views of them, as `Array.read` does, in their order.

        All are read in one call, so adjacent chunks of a pack are read together, even of different arrays. They
        are read into new arrays, or into those of `out`, one for each view, as for `Array.read`; these must not
        share memory. If that fails, a note on the error lists the arrays that are partly filled. Raise
        `InvalidArgument` for an array of another snapshot, and what `Array.read` raises.
        """
        reads = []
        views = list(views)
        outs = [None] * len(views) if out is None else list(out)
        if len(outs) != len(views):
            raise InvalidArgument(f"out has {len(outs)} arrays for {len(views)} views; pass one for each")
        for view, memory in zip(views, outs, strict=True):
            if not isinstance(view, Array):
                raise InvalidArgument(f"{quote(view)} is not an array of {self!r}, nor a view of one")
            reads.append(read_of(view, memory))
            if reads[-1].source is not self:
                raise InvalidArgument(f"{view!r} is not an array of {self!r}; read it with its own snapshot")
        if out is not None:
            check_distinct((read.path, read.memory) for read in reads)
        await self.read_nodes([read.path for read in reads])
        nodes = [array_node(self.tree, read.path, self.location) for read in reads]
        jobs = [
            ReadJob(read.path, read.meta, node, read.selection, read.target)
            for read, node in zip(reads, nodes, strict=True)
        ]
        unfinished: set[str] = set()
        try:
            await self.read_jobs(jobs, unfinished)
        except BaseException as error:
            if out is not None:
                note_partly_read(error, unfinished)
            raise
        return [read.finished() for read in reads]

    def planned_bytes(self, jobs: Iterable[ReadJob | StackJob]) -> int:
        """Return how many bytes of packs `read_jobs` would read."""
        return planned_bytes(self.log.storage, jobs)

    async def read_jobs(self, jobs: Iterable[ReadJob | StackJob], unfinished: set[str] | None = None) -> None:
        """Run read jobs on arrays of this snapshot in one call, as `read_chunks` does."""
        await guard_expiry(self.log, self.version, read_chunks(self.log.storage, jobs, unfinished))

    async def read_packed(self, path: str, region: tuple[slice, ...] | None = None) -> exmy.Quantized:
        """Return the eXmY codes of an array, or of a region: a slice with a start and a stop for each axis.

        A region of an array with offsets per block must be cut at multiples of 16 along that axis. Raise
        `NotFound`, or `InvalidArgument` for other codecs and for regions that cut blocks.
        """
        path = checked_path(path)
        await self.read_nodes([path])
        shape = array_node(self.tree, path, self.location).meta.shape
        sides = [slice(None)] * len(shape) if region is None else region
        try:
            is_region = isinstance(sides, list | tuple) and all(side.step in (None, 1) for side in sides)
            limits = [side.indices(n) for side, n in zip(sides, shape, strict=True)] if is_region else None
        except (AttributeError, TypeError, ValueError):
            limits = None
        if limits is None:
            raise InvalidArgument(
                f"{path}: region={quote(region)}: expected a tuple with a slice of step 1 for each of "
                f"{len(shape)} axes"
            )
        [codes] = await self.read_packed_regions([(path, tuple(slice(a, max(a, b)) for a, b, _ in limits))])
        return codes

    async def read_packed_regions(self, regions: Sequence[tuple[str, tuple[slice, ...]]]) -> list[exmy.Quantized]:
        """Return the eXmY codes of regions of arrays whose nodes were read; raise one error for all of them."""
        nodes = [(array_node(self.tree, path, self.location), region) for path, region in regions]
        from tstore.core.data.exmy_chunks import PackedRegion, read_packed

        requests = [PackedRegion(node.path, node.meta, node, region) for node, region in nodes]
        return await guard_expiry(self.log, self.version, read_packed(self.log.storage, requests))

    async def references(self, path: str, numbers: range) -> ChunkTable:
        """Return the references to the chunks of an array with these numbers, as far as they exist.

        Raise `NotFound` if one was never written and the array is not sparse.
        """
        await self.read_nodes([path])
        node = array_node(self.tree, path, self.location)
        references = await guard_expiry(self.log, self.version, run(node.select, numbers))
        if len(references) < len(numbers) and not node.meta.sparse:
            absent = min(set(numbers).difference(references.number.tolist()))
            at = chunk_coordinates(absent, node.meta.counts)
            raise NotFound(f"{self.location}: chunk {at} of {path} was never written; write it first")
        return references

    async def all_references(self, path: str, size: int) -> AsyncIterator[ChunkTable]:
        """Yield the references to all chunks of an array, at most `size` at a time, sorted by number.

        For a sparse array, the time depends on the chunks that exist, not on its grid. Raise `NotFound` if a chunk
        was never written and the array is not sparse, and `Corrupt` if one is outside of the grid.
        """
        await self.read_nodes([path])
        node = array_node(self.tree, path, self.location)
        if not node.meta.sparse:
            for start in range(0, node.meta.chunk_count, size):
                yield await self.references(path, range(start, min(start + size, node.meta.chunk_count)))
            return
        check_in_grid(path, node.meta, last_number(node.tables))
        parts = node.parts()
        while (part := await guard_expiry(self.log, self.version, run(next, parts, None))) is not None:
            for start in range(0, len(part), size):
                yield part.part(start, min(start + size, len(part)))

    async def read_encoded(self, path: str, references: ChunkTable, deliver: Deliver) -> None:
        """Call `deliver` with the verified bytes of chunks of an array; raise `Corrupt`."""
        from tstore.core.data.encoded_chunks import read_encoded

        work = read_encoded(self.log.storage, path, references.rows, deliver)
        await guard_expiry(self.log, self.version, work)

    def pack_path(self, pack: str) -> str | None:
        """Return the path of a pack's file, or None if the store is not in a local folder."""
        storage = self.log.storage
        return storage.path(pack) if isinstance(storage, LocalStorage) else None

    async def write_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, values: npt.NDArray[Any]
    ) -> None:
        """Raise `Misuse`: a snapshot never changes."""
        raise Misuse(f"{path}: a snapshot can't be written; open a transaction: store.transaction()")

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Raise `Misuse`: a snapshot never changes."""
        raise Misuse(f"{path}: a snapshot can't be resized; open a transaction: store.transaction()")

    async def append_array(
        self, path: str, meta: ArrayMeta, axis: int, values: npt.NDArray[Any]
    ) -> tuple[ArrayMeta, Appended]:
        """Raise `Misuse`: a snapshot never changes."""
        raise Misuse(f"{path}: a snapshot can't be appended to; open a transaction: store.transaction()")

    def __repr__(self) -> str:
        return f"<tstore.Snapshot {self.location}>"


class SnapshotCall(Call[Snapshot]):
    """A snapshot to await, or to get an array from in a chained call: `await store.snapshot().array("w")`."""

    def array(self, path: str) -> ArrayCall:
        """Return the array at a path, as `Snapshot.array` does."""

        async def array() -> Array:
            return await (await self).array(path)

        return ArrayCall(array())

    def __getitem__(self, path: str) -> ArrayCall:
        """Return the array at a path, as `array` does."""
        return self.array(path)

    __iter__ = None


async def head_snapshot(log: LogReader) -> Snapshot:
    """Return the snapshot of the head, with the tags as of the newest version."""
    tree = await newest_tree(log)
    return Snapshot(log, dataclasses.replace(tree, version=tree.head, copies=0) if tree.copies else tree)


async def snapshot_of(log: LogReader, version: int, newest: int) -> Snapshot:
    """Return the snapshot of a version; raise `SnapshotExpired` if a gc up to version `newest` removed it."""
    await check_alive(log, version, newest)
    return Snapshot(log, await guard_expiry(log, version, log.tree(version)))


def without_nodes(snapshot: Snapshot, paths: Collection[str]) -> Snapshot:
    """Return the snapshot as if the nodes at these paths, and all below, had been deleted."""
    nodes = snapshot.tree.nodes.without(paths)
    return Snapshot(snapshot.log, dataclasses.replace(snapshot.tree, nodes=nodes))


def array_node(tree: Tree, path: str, location: str) -> Node:
    """Return the array at a path of a tree; raise `NotFound`, which names up to five near it, if there is none."""
    node = tree.nodes.get(path)
    if node is not None and node.is_array:
        return node
    hints = {path: "it is a group, with the arrays", path.rpartition("/")[0]: "similar paths:", "": "it has"}
    for top, hint in hints.items():
        if known := sorted(p for p in tree.nodes.at_or_below(top) if tree.nodes[p].is_array):
            first = max(0, min(bisect.bisect(known, path) - 2, len(known) - 5))
            raise NotFound(f"{location} has no array {path!r}; {hint} {', '.join(known[first : first + 5])}")
    raise NotFound(f"{location} has no array {path!r}, nor any other")

"""A transaction: changes staged over a snapshot, which become one commit or nothing.

1. The first use fixes the base version, which all reads of the transaction see (with its own writes on top).
2. Whole chunks go into packs under `txn/<id>/` as they are written; parts of chunks are kept as patches.
3. Commit applies the patches, makes the packs durable, writes the manifest, and appends the record (`log`).
4. For every newer commit met on the way the write set is validated; one that wrote a chunk of which this
   transaction changed only a part has its version patched again, any other overlap is a `Conflict`.
5. A host of a group delivers its fragment instead of 4, and whoever sees all of them commits (`group`).

The id of a transaction is never used again, so what an aborted one leaves under `txn/<id>/` harms nobody.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tstore.array import Array
from tstore.chunk_reader import ReadJob, read_chunks
from tstore.chunk_writer import PackSet, WriteJob
from tstore.chunks import ChunkRow, ChunkTable, Span
from tstore.codec import ArrayMeta, Codecs, dtype_named
from tstore.errors import AlreadyExists, Conflict, Misuse, NotFound
from tstore.grid import Selection, default_chunks
from tstore.group import Membership, commit_group
from tstore.kv.base import Durability
from tstore.log import Log
from tstore.manifest import INLINE_MANIFEST, Fragment, Manifest, ObjectRef, Record, encode, reference
from tstore.snapshot import array_node, node_rows
from tstore.staging import StagedArray
from tstore.tree import Changes, NodeChange, Tree, checked_path, group_document, is_below

__all__ = ["Transaction"]


class Transaction:
    """Staged changes over a snapshot; `async with` commits on exit and aborts on an exception.

    `version` is the version it became, None before.
    """

    def __init__(
        self,
        log: Log,
        *,
        message: str = "",
        tags: Sequence[str] = (),
        durability: Durability = Durability.FSYNC,
        member: Membership | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._log = log
        self._message = message
        self._tags = tuple(tags)
        self._durability = durability
        self._member = member
        self._facts = dict(facts or {})
        self._replaces = False
        self._structure = b""
        self._base: Tree | None = None
        self._arrays: dict[str, StagedArray] = {}
        self._groups: dict[str, bytes] = {}
        self._deleted: list[str] = []
        self._state: Literal["open", "committing", "committed", "aborted"] = "open"
        self._manifests_written = 0
        self.id = secrets.token_hex(12) if member is None else member.transaction
        self.version: int | None = None
        host = "" if member is None else f"{member.host:05d}-"
        self._suffix = f"{host}{secrets.token_hex(4)}"
        self._packs = PackSet(log.backend, f"txn/{self.id}", durability)

    async def __aenter__(self) -> Transaction:
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state != "open":
            return
        if kind is None:
            await self.commit()
        else:
            await self.abort()

    async def create_array(
        self,
        path: str,
        shape: Sequence[int],
        dtype: Any,
        chunks: Sequence[int] | None = None,
        codecs: Codecs = None,
        fill_value: Any = 0,
        attributes: Mapping[str, Any] | None = None,
        dimension_names: Sequence[str | None] | None = None,
        *,
        sparse: bool = False,
    ) -> Array:
        """A new array of this transaction; nothing is written yet.

        `chunks` is the shape of one chunk, by default about 8 MiB. `codecs` is None (stored as it is), the
        name of an eXmY format ("e4m3"), or a Zarr v3 codec list. Reading a chunk that was never written is
        an error, unless the array is `sparse`: then it has the fill value.
        Raises `AlreadyExists` where the path is taken, `InvalidArgument` where the arguments do not fit.
        """
        base = await self._begin()
        path = checked_path(path)
        self._check_free(base, path)
        shape = tuple(shape)
        if chunks is None:
            chunks = default_chunks(shape, dtype_named(dtype).itemsize)
        return await self.put_array(
            path,
            ArrayMeta.of(shape, dtype, chunks, codecs, fill_value, attributes, dimension_names, sparse=sparse),
        )

    async def put_array(self, path: str, meta: ArrayMeta) -> Array:
        """A new array with this metadata; the path must be free."""
        await self._begin()
        self._arrays[path] = StagedArray(path, meta, fresh=True)
        return Array(self, path, meta)

    async def create_group(self, path: str, attributes: Mapping[str, Any] | None = None) -> None:
        """Stages a group with attributes; groups without need not be created. The root's path is ""."""
        base = await self._begin()
        path = checked_path(path) if path.strip("/") else ""
        if path in self._arrays or (path in base.nodes and base.nodes[path].is_array):
            raise AlreadyExists(f"{self._where()}: an array stands at {path!r}, so no group can")
        self._groups[path] = group_document(attributes or {})

    async def array(self, path: str) -> Array:
        """The array at a path, as this transaction sees it, for reading and writing; `NotFound`."""
        base = await self._begin()
        path = checked_path(path)
        staged = self._arrays.get(path)
        if staged is not None:
            return Array(self, path, staged.meta)
        self._check_visible(path)
        return Array(self, path, array_node(base, path, self._where()).meta)

    async def paths(self) -> list[str]:
        """The paths of all arrays as this transaction sees them, sorted."""
        base = await self._begin()
        old = () if self._replaces else (p for p, n in base.nodes.items() if n.is_array)
        return sorted({p for p in old if not self._is_deleted(p)} | self._arrays.keys())

    async def delete(self, path: str) -> None:
        """Stages the removal of an array, or of a group with all below it; `NotFound` where nothing is."""
        base = await self._begin()
        path = checked_path(path)
        gone = [p for p in (*self._arrays, *self._groups) if is_below(p, path)]
        stored = [p for p in base.nodes if is_below(p, path) and not self._is_deleted(p)]
        if not gone and not stored:
            raise NotFound(f"{self._where()} has nothing at {path!r} to delete")
        for p in gone:
            self._arrays.pop(p, None)
            self._groups.pop(p, None)
        if stored:
            self._deleted.append(path)

    async def replace_all(self, structure: bytes) -> None:
        """Makes this commit the whole tree: nothing that was there before stays.

        `structure` is what all hosts of a group must agree on beside their arrays.
        """
        await self._begin()
        self._replaces, self._structure = True, structure

    async def write_arrays(self, jobs: Iterable[WriteJob]) -> None:
        """Creates arrays from whole-chunk jobs, all in one call; the arrays must be new."""
        base = await self._begin()
        listed = list(jobs)
        for job in listed:
            if job.path in self._arrays:
                raise AlreadyExists(f"{self._where()}: {job.path!r} is written twice in one transaction")
            if not self._replaces:
                self._check_free(base, job.path)
        await self._packs.write(listed)
        for job in listed:
            staged = self._arrays[job.path] = StagedArray(job.path, job.meta, fresh=True)
            staged.rows = {row.number: row for row in job.rows}

    async def keep_array(self, path: str, meta: ArrayMeta, rows: Mapping[int, ChunkRow]) -> None:
        """Stages an array whose chunks are those of another version; no data is written."""
        await self._begin()
        staged = self._arrays[path] = StagedArray(path, meta, fresh=True)
        staged.kept = {number: rows[number] for number in rows}

    async def read_array(self, path: str, meta: ArrayMeta, selection: Selection, out: npt.NDArray[Any]) -> None:
        """Fills `out` with what this transaction sees: its own writes over its base."""
        base = await self._begin()
        staged = self._arrays.get(path)
        rows = self._base_rows(base, path) if staged is None or not staged.fresh else {}
        if staged is not None:
            if staged.patches:
                await staged.apply_patches(self._log.backend, self._packs, rows)
            rows = {**rows, **staged.written()}
        await read_chunks(self._log.backend, [ReadJob(path, meta, rows, selection, out)])

    async def write_array(
        self, path: str, meta: ArrayMeta, selection: Selection, values: npt.NDArray[Any]
    ) -> None:
        """Stages values of a region; whole chunks are written at once, parts of chunks at the commit."""
        await self._begin()
        staged = self._arrays.get(path)
        if staged is None:
            self._check_visible(path)
            staged = self._arrays[path] = StagedArray(path, meta, fresh=False)
        await staged.write(self._packs, selection, values)

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Stages another shape and returns the metadata with it."""
        base = await self._begin()
        staged = self._arrays.get(path) or StagedArray(path, meta, fresh=False)
        staged.reshape(tuple(shape), {} if staged.fresh else self._base_rows(base, path))
        self._arrays[path] = staged
        return staged.meta

    async def commit(self, timeout: float | None = None) -> int:
        """The version that the transaction became; on return it is durable, or as durable as was asked.

        `timeout` (seconds; a group's default is 300) bounds the wait for the other hosts of a group.
        Raises `Conflict`, `Inconsistent` (hosts disagree), `DeadlineExceeded` (names the absent hosts),
        `CommitOutcomeUnknown`, `StorageFull`. After an error nothing of it is visible, unless the error says
        that the outcome is unknown.
        """
        base = await self._begin()
        self._state = "committing"
        try:
            await self._apply_patches(base)
            await self._packs.settle()
            # the outcome of a create is always learned: a cancelled caller waits for it
            self.version = await _shielded(self._append(base.version, timeout))
        except BaseException:
            if self._state == "committing":
                self._state = "aborted"
            raise
        self._state = "committed"
        return self.version

    async def abort(self) -> None:
        """Drops all that was staged; nothing of it will ever be visible."""
        if self._state == "open":
            self._state = "aborted"
            await self._packs.discard()

    async def _append(self, base: int, timeout: float | None) -> int:
        manifest = await self._manifest()
        if self._member is not None:
            fragment = Fragment(
                self.id,
                self._member.host,
                self._member.hosts,
                base,
                self._message,
                self._tags,
                self._replaces,
                tuple(self._deleted),
                manifest,
                self._packs.bytes_written,
                self._structure,
                self._facts,
            )
            return await commit_group(self._log, self._member, fragment, self._durability, timeout)
        self._record = self._record_of(base, manifest)
        return await self._log.append(self._record, self._validate, self._durability)

    def _record_of(self, base: int, manifest: ObjectRef | Manifest) -> Record:
        return Record(
            transaction=self.id,
            base=base,
            time=time.time(),
            message=self._message,
            tags=self._tags,
            replaces=self._replaces,
            deleted=tuple(self._deleted),
            manifests=(manifest,),
            bytes_added=self._packs.bytes_written,
            facts=self._facts,
        )

    async def _validate(self, version: int, other: Record) -> Record:
        mine, theirs = self._changes(), Changes.of(other, await self._log.manifests(other))
        overlap = mine.overlap(theirs)
        redo: dict[str, list[int]] = {}
        fatal = list(overlap.fatal)
        for path, numbers in overlap.chunks.items():
            staged = self._arrays[path]
            for number in numbers.tolist():
                if number in staged.rows or number not in staged.patches:
                    at = tuple(int(i) for i in np.unravel_index(number, staged.meta.counts))
                    fatal.append(f"{path}, chunk {at}")
                else:
                    redo.setdefault(path, []).append(number)
        if fatal:
            raise Conflict(
                f"{self._where()}: version {version}, committed since this transaction's base, changed the same "
                "as it; nothing was committed. Read again and repeat the transaction",
                fatal,
            )
        tree = await self._log.tree(version)
        for path, again in redo.items():
            rows = node_rows(tree.nodes[path])
            await self._arrays[path].apply_patches(self._log.backend, self._packs, rows, again)
        if redo:
            await self._packs.settle()
            self._record = self._record_of(version, await self._manifest())
        return self._record

    async def _manifest(self) -> ObjectRef | Manifest:
        """The manifest of all that is staged: itself if it is small, else where it was written."""
        packs: dict[str | bytes, int] = {}
        raw: list[tuple[int, int, int, int, bytes]] = []
        nodes: list[tuple[str, bytes, bool, int, int]] = []
        for path, document in self._groups.items():
            nodes.append((path, document, True, len(raw), len(raw)))
        for path, staged in self._arrays.items():
            start = len(raw)
            for number, pack, offset, length, checks in staged.written().values():
                raw.append((number, packs.setdefault(pack, len(packs)), offset, length, checks))
            nodes.append((path, staged.meta.document, staged.fresh, start, len(raw)))
        table = ChunkTable.from_rows(tuple(packs), raw)
        manifest = Manifest.of([(p, d, f, (Span(table, a, b),)) for p, d, f, a, b in nodes])
        data = encode(manifest)
        if len(data) <= INLINE_MANIFEST:
            return manifest
        self._manifests_written += 1
        key = f"txn/{self.id}/manifest-{self._suffix}-{self._manifests_written}"
        await self._log.backend.create(key, data, self._durability)
        return reference(key, data)

    def _changes(self) -> Changes:
        nodes = {p: NodeChange(True, np.empty(0, np.uint64)) for p in self._groups}
        for path, staged in self._arrays.items():
            nodes[path] = NodeChange(staged.fresh, np.array(list(staged.written()), np.uint64))
        return Changes(nodes, tuple(self._deleted), self._replaces, self._tags)

    async def _apply_patches(self, base: Tree) -> None:
        for path, staged in self._arrays.items():
            if staged.patches:
                rows = {} if staged.fresh else self._base_rows(base, path)
                await staged.apply_patches(self._log.backend, self._packs, rows)

    async def _begin(self) -> Tree:
        if self._state != "open":
            raise Misuse(f"this transaction on {self._log.backend.url} is {self._state}; open a new one")
        if self._base is None:
            self._base = await self._log.tree(await self._log.newest())
        return self._base

    def _base_rows(self, base: Tree, path: str) -> Mapping[int, ChunkRow]:
        node = base.nodes.get(path)
        return {} if node is None or self._is_deleted(path) else node_rows(node)

    def _is_deleted(self, path: str) -> bool:
        return any(is_below(path, top) for top in self._deleted)

    def _check_visible(self, path: str) -> None:
        if self._is_deleted(path):
            raise NotFound(f"{self._where()}: {path!r} was deleted in this transaction")

    def _check_free(self, base: Tree, path: str) -> None:
        stored = [] if self._replaces else [p for p in base.nodes if not self._is_deleted(p)]
        for other in (*stored, *self._arrays):
            array = other in self._arrays or base.nodes[other].is_array
            if other and (other == path or (array and is_below(path, other)) or is_below(other, path)):
                raise AlreadyExists(
                    f"{self._where()}: {other!r} stands in the way of an array at {path!r}; delete it first, "
                    "or choose another path"
                )

    def _where(self) -> str:
        return f"{self._log.backend.url} at version {self._base.version if self._base else '?'}"


async def _shielded(work: Any) -> int:
    task: asyncio.Task[int] = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise

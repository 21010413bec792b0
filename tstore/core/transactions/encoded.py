"""A transaction in the form of a Zarr store: groups, arrays, and chunks as encoded bytes.

New metadata for an array keeps its chunks, at their places in the grid, if the chunk shape, dtype and codecs stay
the same. Changed metadata conflicts with concurrent commits as a resize does. Writing chunks conflicts only with
commits that write the same chunks.

zarr-python removes a chunk instead of writing fill values to all of it. So removing a chunk, whether it exists or
not, stages the fill value, and conflicts as a write does. All removed chunks refer to one stored chunk of fill
values, and the transaction reports them as absent. In a sparse array with new metadata the chunk is simply
dropped, since the metadata conflicts with every write to the array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.data.encoded_chunks import read_part
from tstore.core.data.writer import WriteJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import chunk_coordinates
from tstore.core.format.checksums import block_checks
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.tables import Table, last_number
from tstore.core.format.tree.changes import same_json
from tstore.core.format.tree.node import Node, check_in_grid, resized
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE
from tstore.core.runtime.pool import run
from tstore.core.transactions.staged_tree import StagedTree
from tstore.core.transactions.staging import Staging
from tstore.errors import AlreadyExists, Misuse, UnsupportedFormat

__all__ = ["EncodedStaging", "Extent"]

Extent = Callable[[int], tuple[int, int]]
"""A function from the encoded length of a chunk to the start and end of the bytes to read."""


class EncodedStaging:
    """The groups, arrays and encoded chunks of a transaction, on top of its `Staging`."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging

    @property
    def location(self) -> str:
        """The URL of the store and the id of the transaction, for messages."""
        return f"{self.staging.log.storage.url}, transaction {self.staging.transaction}"

    async def unplaced(self) -> dict[str, bytes]:
        """Return the objects outside the tree, as bytes by key; the caller may change the dict."""
        async with self.staging.operation() as staged:
            return staged.unplaced

    async def node(self, path: str) -> Node | None:
        """Return the group or array at a path, None if there is none."""
        async with self.staging.operation() as staged:
            await self.staging.read_nodes(staged, [path])
            return staged.node(path)

    async def first_array(self, paths: Sequence[str]) -> Node | None:
        """Return the array at the first of these paths that has one, or None."""
        async with self.staging.operation() as staged:
            await self.staging.read_nodes(staged, paths)
            return staged.first_array(paths)

    async def has_nodes(self, path: str) -> bool:
        """Return whether there is a group or an array at or below a path."""
        async with self.staging.operation() as staged:
            await self._read_below(staged, path)
            return staged.has_nodes(path)

    async def nodes_starting(self, prefix: str) -> list[Node]:
        """Return the groups and arrays whose paths begin with a prefix, sorted by path."""
        async with self.staging.operation() as staged:
            await self.staging.read_nodes(staged, staged.base.nodes.around_start(prefix) if prefix else None)
            return staged.nodes_starting(prefix)

    async def _read_below(self, staged: StagedTree, path: str) -> None:
        await (self.staging.read_around(staged, [path]) if path else self.staging.read_nodes(staged))

    async def numbers(self, path: str) -> npt.NDArray[np.int64]:
        """Return the numbers of the chunks of an array that exist, ascending."""
        async with self.staging.operation() as staged:
            return await self._numbers(staged, path)

    async def _numbers(self, staged: StagedTree, path: str) -> npt.NDArray[np.int64]:
        node = await self._chunks(staged, path)
        staged.note_chunk_names(path)
        fill = staged.fill_chunks.get(_fill_key(node.document))
        if fill is None:
            return await run(node.numbers) if node.reads_segments else node.numbers()

        def kept() -> tuple[list[int], list[int]]:
            shown, filled = list[int](), list[int]()
            for row in node.chunks_in_grid.rows:
                (filled if _same_place(row, fill) else shown).append(row.number)
            return shown, filled

        shown, filled = await run(kept) if node.reads_segments else kept()
        staged.note_chunks(path, filled)  # the base may have fill values in them, which others may change
        return np.array(shown, np.int64)

    async def _chunks(self, staged: StagedTree, path: str) -> Node:
        """Return an array with its chunks, to which all patches are applied."""
        await self.staging.read_nodes(staged, [path])
        array = staged.arrays.get(path)
        if array is not None and array.patches:
            await self.staging.apply_patches(staged, array)
        return staged.chunks(path)

    async def length(self, path: str, number: int) -> int | None:
        """Return the encoded length of a chunk, None if there is none."""
        async with self.staging.operation() as staged:
            row = await self._row(staged, path, number)
            return None if row is None else row.length

    async def _row(self, staged: StagedTree, path: str, number: int) -> ChunkRow | None:
        node = await self._chunks(staged, path)
        staged.note_chunks(path, [number])
        row = await run(node.row, number) if node.reads_segments else node.row(number)
        fill = staged.fill_chunks.get(_fill_key(node.document)) if row is not None and staged.fill_chunks else None
        return None if row is None or (fill is not None and _same_place(row, fill)) else row

    async def encoded(self, path: str, number: int, extent: Extent) -> npt.NDArray[np.uint8] | None:
        """Return a part of the encoded bytes of a chunk, None if there is none; raise `Corrupt`."""
        async with self.staging.operation() as staged:
            row = await self._row(staged, path, number)
            if row is None:
                return None
            return await self.staging.await_read(
                staged, run(read_part, self.staging.log.storage, path, row, *extent(row.length))
            )

    async def write(self, chunks: Sequence[bytes]) -> tuple[str, int]:
        """Write encoded chunks back to back; return their pack and the offset of the first.

        The caller stages the references with `Staging.adopt_array`.
        """
        async with self.staging.operation():
            return await self._write(chunks)

    async def _write(self, chunks: Sequence[bytes]) -> tuple[str, int]:
        async with self.staging.heartbeat():
            return await self.staging.packs.write_bytes(chunks)

    async def set_chunk(self, path: str, number: int, data: bytes) -> None:
        """Stage a chunk, given its encoded bytes.

        Raise `Misuse` if the array was changed meanwhile, or if no chunk of it has this length.
        """
        async with self.staging.operation() as staged:
            await self.staging.read_nodes(staged, [path])
            meta = staged.meta(path)
            expected = meta.chain.fixed_length
            if expected is not None and len(data) != expected:
                raise Misuse(
                    f"{path}, chunk {chunk_coordinates(number, meta.counts)}: expected {expected} encoded bytes, "
                    f"not {len(data)}; if the array was deleted and created again, open it again"
                )
            pack, offset = await self._write([data])
            checks = (
                await run(block_checks, memoryview(data)) if len(data) > _SHORT else block_checks(memoryview(data))
            )
            await self._stage(staged, path, meta, [ChunkRow(number, pack, offset, len(data), checks)])

    async def _stage(self, staged: StagedTree, path: str, meta: ArrayMeta, rows: Sequence[ChunkRow]) -> None:
        """Stage chunks that were written for this metadata; raise `Misuse` if the array was changed meanwhile."""
        current = staged.meta(path)
        if not _same_chunks(meta, current) or meta.counts != current.counts:
            raise Misuse(f"{path} was resized while a chunk was written; await one before starting the other")
        array = staged.array_to_change(path, current)
        if array.extension is not None:
            await array.resize(current.shape, staged.base_chunks(path))  # an ordinary change from now on
        staged.array_to_change(path, staged.meta(path)).add_rows(rows)

    async def set_array(self, path: str, fields: Mapping[str, Any]) -> None:
        """Stage the metadata of a new or existing array.

        An existing array keeps its chunks if the chunk shape, dtype and codecs stay the same. A new array is
        sparse, as in Zarr. Raise `AlreadyExists` for chunks that the new metadata
        can't decode, and what `ArrayMeta.parse` raises.
        """
        async with self.staging.operation() as staged:
            await self.staging.read_around(staged, [path])
            node = staged.node(path)
            was_dense = node is not None and node.is_array and not node.meta.sparse
            meta = ArrayMeta.parse(_document(fields, sparse=not was_dense))
            if node is not None and node.is_array and _same_chunks(node.meta, meta):
                if _same_document(node.document, meta.document):
                    staged.restate(path)
                else:
                    await self._restate(staged, path, lambda node: (meta, _in_grid(node, meta)))
                return
            await self._check_without_chunks(staged, node, "its metadata of another dtype, chunk shape or codecs")
            if node is not None and not staged.nodes_starting(f"{path}/"):
                staged.remove(path)
            staged.create_array(path, ArrayMeta.parse(_document(fields, sparse=True)))

    async def set_group(self, path: str, attributes: Mapping[str, Any]) -> None:
        """Stage a group; tstore's own attributes of the root stay.

        Raise `AlreadyExists` if there is an array with chunks.
        """
        async with self.staging.operation() as staged:
            await self.staging.read_around(staged, [path])
            node = staged.node(path)
            await self._check_without_chunks(staged, node, "the metadata of a group")
            if node is not None and node.is_array:
                staged.remove(path)
            reserved = None if path or node is None else node.attributes.get(RESERVED_ATTRIBUTE)
            staged.create_group(path, attributes, reserved)

    async def _check_without_chunks(self, staged: StagedTree, node: Node | None, new: str) -> None:
        """Raise `AlreadyExists` for an array with chunks; zarr-python deletes one before it replaces it."""
        if node is not None and node.is_array and len(await self._numbers(staged, node.path)):
            raise AlreadyExists(
                f"{node.path} is an array with chunks, which {new} would lose; delete the array first, as zarr "
                'does with overwrite=True or mode="w"'
            )

    async def remove(self, path: str) -> None:
        """Stage the removal of everything at and below a path, "" for all.

        The parent group stays, as in Zarr's own stores, even if it was only implied by the paths below it.
        """
        parent = path.rpartition("/")[0]
        async with self.staging.operation() as staged:
            await self._read_below(staged, path)
            if not parent or not staged.has_nodes(path):
                staged.remove(path)
                return
            await self.staging.read_around(staged, [parent])
            staged.remove(path)
            if not staged.has_nodes(parent):
                staged.create_group(parent, {})

    async def remove_chunks(self, path: str, numbers: Collection[int]) -> None:
        """Stage the fill value in place of chunks, some of which may not exist."""
        removed = np.fromiter(numbers, np.uint64, len(numbers))

        def kept(node: Node) -> _Restated:
            if not len(node.select(removed)):
                return None
            return node.meta, (node.chunks.take(np.flatnonzero(~np.isin(node.chunks.number, removed))),)

        async with self.staging.operation() as staged:
            await self.staging.read_nodes(staged, [path])
            array, meta = staged.arrays.get(path), staged.meta(path)
            if array is not None and array.replaces_node and meta.sparse and array.extension is None:
                await self._restate(staged, path, kept)
                return
            fill = await self._fill_chunk(staged, path, meta)
            rows = [msgspec.structs.replace(fill, number=number) for number in removed.tolist()]
            await self._stage(staged, path, meta, rows)

    async def _fill_chunk(self, staged: StagedTree, path: str, meta: ArrayMeta) -> ChunkRow:
        """Return a chunk of fill values, which is written only once."""
        key = _fill_key(meta.document)
        if key not in staged.fill_chunks:
            values = np.full(meta.chunks, meta.fill_value, meta.dtype)
            job = WriteJob(path, meta.with_shape(meta.chunks), [((0,) * len(meta.chunks), values)])
            async with self.staging.heartbeat():
                await self.staging.packs.write([job])
            staged.fill_chunks.setdefault(key, job.rows[0])
        return staged.fill_chunks[key]

    async def _restate(self, staged: StagedTree, path: str, change: Callable[[Node], _Restated]) -> None:
        """Replace the metadata and chunks of an array by what `change` returns, unless that is None.

        `change` runs in a thread if it reads segments, and again if another operation changes the array meanwhile.
        """
        while True:
            node = await self._chunks(staged, path)
            array = staged.array_to_change(path, staged.meta(path))
            tables = array.whole_chunks.tables
            restated = await run(change, node) if node.reads_segments else change(node)
            is_current = staged.arrays.get(path) is array and array.whole_chunks.tables is tables
            if is_current and not array.has_unapplied:
                if restated is not None:
                    staged.keep_array(path, *restated)
                return


_Restated = tuple[ArrayMeta, tuple[Table, ...]] | None
_SHORT = 64 << 10  # bytes that are hashed in less time than the hop to a thread takes


def _in_grid(node: Node, meta: ArrayMeta) -> tuple[Table, ...]:
    """Return the chunks of an array under new metadata; chunks outside the new grid are dropped."""
    if not _same_chunks(node.meta, meta):
        raise Misuse(
            f"{node.path} was deleted and created again while its metadata was set; await one before starting the "
            "other"
        )
    check_in_grid(node.path, node.meta, last_number(node.tables))
    return resized(node.tables, node.meta, meta)


def _same_document(mine: bytes, other: bytes) -> bool:
    """Return whether two `zarr.json` documents of arrays mean the same, however zarr-python spells them."""
    if mine == other:
        return True
    fields = [msgspec.json.decode(document) for document in (mine, other)]
    one, another = (msgspec.json.encode({**f, "storage_transformers": []}) for f in fields)
    return same_json(one, another)


def _fill_key(document: bytes) -> bytes:
    """Return the fields of a `zarr.json` that determine the encoded bytes of a chunk of fill values."""
    fields = msgspec.json.decode(document)
    return msgspec.json.encode([fields[name] for name in ("data_type", "chunk_grid", "codecs", "fill_value")])


def _same_place(mine: ChunkRow, other: ChunkRow) -> bool:
    return mine.pack == other.pack and mine.offset == other.offset


def _same_chunks(mine: ArrayMeta, other: ArrayMeta) -> bool:
    """Return whether an encoded chunk decodes to the same values under both."""
    return (mine.chunks, mine.dtype, mine.chain.documents) == (other.chunks, other.dtype, other.chain.documents)


def _document(fields: Mapping[str, Any], *, sparse: bool) -> bytes:
    """Return a `zarr.json` with tstore's own entry, which says whether the array is sparse."""
    own = {"tstore": {"must_understand": False, "sparse": True}} if sparse else {}
    kept = {key: value for key, value in fields.items() if key != "tstore"}
    try:
        return msgspec.json.encode(kept | own)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedFormat(f"the metadata can't be stored as JSON: {error}") from error

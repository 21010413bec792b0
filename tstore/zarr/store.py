"""`ZarrStore`: a snapshot or a transaction as a store of zarr-python.

1. The metadata of a group or array is a node of the tree, and a chunk's bytes are those that Zarr's codecs wrote.
   So what zarr writes, tstore reads, and the reverse.
2. Any other key can be set too, in memory. A commit refuses it, so such keys must be deleted before.
3. A group that exists only as part of paths has metadata here, without attributes.
4. Arrays of a dtype that zarr-python lacks, such as bfloat16, are read by their keys, but not listed, since zarr
   would list none of the others. A warning names them.
5. zarr's blocking functions run on a separate event loop. A snapshot can be read on any loop. Calls on the
   loop on which the `ZarrStore` of a transaction was made run there, all others on that of `tstore.sync`, blocking
   ones (`get_sync`) too: a transaction is used by one of them at a time, since a blocking call on the first loop
   keeps that from running.
"""

from __future__ import annotations

import asyncio
import builtins
import inspect
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from tstore.core.format.arguments import quote
from tstore.core.format.arrays.array_metadata import ChunkNames
from tstore.core.format.tree.node import Node
from tstore.core.pickling import raises_when_used
from tstore.core.runtime.event_loops import BACKGROUND
from tstore.core.runtime.pool import run, wait_all
from tstore.core.snapshot import Snapshot
from tstore.core.transactions.encoded import EncodedStaging, Extent
from tstore.core.transactions.transaction import Transaction
from tstore.errors import InvalidArgument, Misuse
from tstore.zarr.hierarchy import Hierarchy, SnapshotHierarchy, listed_nodes
from tstore.zarr.keys import (
    ChunkKeys,
    enclosing_folders,
    group_document,
    metadata_key,
    metadata_path,
    parsed_metadata,
    served_document,
)

__all__ = ["ZarrStore"]

T = TypeVar("T")


class ZarrStore(Store):
    """A snapshot, or a transaction whose commit stores all that zarr wrote; async or of `tstore.sync`.

    Raise `Misuse` if a snapshot should be written. A missing chunk of an array that is not sparse is `NotFound`
    in a snapshot, and has the fill value in a transaction. A pickle of the store of a snapshot opens the same
    version; that of a transaction raises `Misuse` when it is used in another process.
    """

    def __init__(self, source: Any, *, read_only: bool | None = None) -> None:
        source = inspect.unwrap(source)  # a blocking object becomes the async one
        if not isinstance(source, Snapshot | Transaction):
            raise InvalidArgument(
                f"a ZarrStore is made of a snapshot or a transaction, not of {quote(source)}; pass "
                "store.snapshot() or store.transaction()"
            )
        if isinstance(source, Snapshot) and read_only is False:
            raise Misuse(f"{source.location} can't be written; pass a transaction: store.transaction()")
        super().__init__(read_only=isinstance(source, Snapshot) if read_only is None else read_only)
        self._source = source
        self._loop = _running_loop()
        self._unlisted: set[str] = set()  # arrays for which a warning was given
        self._staged = None if isinstance(source, Snapshot) else EncodedStaging(source.staging)
        self._hierarchy: Hierarchy = SnapshotHierarchy(source) if isinstance(source, Snapshot) else self._staging

    @property
    def _staging(self) -> EncodedStaging:
        assert self._staged is not None  # a snapshot's store is read-only, which writes check first
        return self._staged

    def with_read_only(self, read_only: bool = False) -> ZarrStore:
        """Return another store of the same snapshot or transaction; raise `Misuse` to write to a snapshot."""
        return ZarrStore(self._source, read_only=read_only)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrStore) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[str, bool]:
        return self._hierarchy.location, self.read_only

    def __repr__(self) -> str:
        return f"<tstore.zarr.ZarrStore {self}{', read-only' if self.read_only and self._staged else ''}>"

    def __str__(self) -> str:
        return self._hierarchy.location

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._source, Snapshot):
            return _of_snapshot, (self._source,)
        _live[self._source.id] = self._source
        return _of_transaction, (self._source.id, self.read_only)

    @property
    def supports_writes(self) -> bool:
        """Whether keys can be set: not in a snapshot."""
        return self._staged is not None

    @property
    def supports_deletes(self) -> bool:
        """Whether keys can be deleted: not in a snapshot."""
        return self._staged is not None

    @property
    def supports_listing(self) -> bool:
        """True."""
        return True

    @property
    def supports_consolidated_metadata(self) -> bool:
        """False: the metadata of all nodes is in one place, so consolidating it would save no requests."""
        return False

    # ---- reading

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the bytes of a key, or a part of them, None if there is no such key; raise `Corrupt`."""
        await self._ensure_open()
        return await self._here(self._get(key, prototype, byte_range))

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """See `get`; blocks the calling thread."""
        return BACKGROUND.run(self.get(key, prototype or default_buffer_prototype(), byte_range))

    async def _get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Buffer | None:
        data = (await self._hierarchy.unplaced()).get(key)
        if data is None and (path := metadata_path(key)) is not None:
            data = await self._document(path)
        if data is not None:
            start, stop = _extent(byte_range)(len(data))
            return prototype.buffer.from_bytes(data[start:stop])
        located = await self._chunk(key)
        if located is None:
            return None
        node, number = located
        values = await self._hierarchy.encoded(node.path, number, _extent(byte_range))
        return None if values is None else prototype.buffer.from_array_like(values)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> builtins.list[Buffer | None]:
        """Return parts of the bytes of keys, in their order, None for each that does not exist."""
        return builtins.list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Return whether there is a key; reads no chunk."""
        await self._ensure_open()
        return await self._here(self._exists(key))

    async def _exists(self, key: str) -> bool:
        if key in await self._hierarchy.unplaced():
            return True
        if (path := metadata_path(key)) is not None:
            return await self._document(path) is not None
        return await self._length(key) is not None

    async def getsize(self, key: str) -> int:
        """Return the number of bytes of a key; reads no chunk. Raise `FileNotFoundError`."""
        length = await self._here(self._length(key))
        return await super().getsize(key) if length is None else length

    async def _length(self, key: str) -> int | None:
        """Return the encoded length of a chunk, None if the key is not that of one."""
        located = await self._chunk(key)
        if located is None:
            return None
        return await self._hierarchy.length(located[0].path, located[1])

    async def _document(self, path: str) -> bytes | None:
        """Return the metadata of the node at a path; a group without its own node has no attributes."""
        node = await self._hierarchy.node(path)
        if node is not None:
            return served_document(node)
        if await self._hierarchy.has_nodes(path):
            return group_document({})
        return None

    async def _chunk(self, key: str) -> tuple[Node, int] | None:
        """Return the array and the number of the chunk that a key names, None if it names none."""
        node = await self._hierarchy.first_array(enclosing_folders(key))
        number = None if node is None else ChunkKeys.of_array(node).number(key)
        return None if node is None or number is None else (node, number)

    # ---- listing

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys."""
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that begin with a prefix."""
        await self._ensure_open()
        for key in await self._here(self._keys(prefix)):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of the entries of a folder."""
        await self._ensure_open()
        for name in await self._here(self._names(prefix.strip("/"))):
            yield name

    async def _keys(self, prefix: str) -> Sequence[str]:
        """Return the sorted keys that begin with a prefix."""
        folder = prefix.rpartition("/")[0]
        keys = set(await self._hierarchy.unplaced())
        array = await self._hierarchy.first_array(enclosing_folders(prefix))
        nodes, groups = (
            await listed_nodes(self._hierarchy, prefix, self._unlisted) if array is None else ([array], [])
        )
        keys.update(map(metadata_key, groups))
        if array is None and metadata_key(folder).startswith(prefix) and await self._hierarchy.has_nodes(folder):
            keys.add(metadata_key(folder))
        for node in nodes:
            keys.update(metadata_key(path) for path in (*enclosing_folders(node.path), node.path))
            if node.is_array:
                keys.update(await self._chunk_keys(node, folder))
        return sorted(key for key in keys if key.startswith(prefix))

    async def _chunk_keys(self, node: Node, folder: str) -> Sequence[str]:
        """Return the keys of the chunks of an array that are in a folder, which may be below the array's."""
        numbers, keys = await self._hierarchy.numbers(node.path), ChunkKeys.of_array(node)
        inside = folder if folder.startswith(f"{node.path}/") else node.path
        return await run(lambda: [key for _, key in keys.below(numbers, inside)])

    async def _names(self, folder: str) -> Sequence[str]:
        """Return the sorted names of the entries of a folder; chunks of arrays in it are not looked up."""
        within = f"{folder}/" if folder else ""
        if await self._hierarchy.first_array(enclosing_folders(within)) is not None:
            keys = await self._keys(within)
        else:
            nodes, groups = await listed_nodes(self._hierarchy, within, self._unlisted)
            keys = [metadata_key(path) for path in (*(node.path for node in nodes), *groups)]
            keys += await self._hierarchy.unplaced()
            if await self._hierarchy.has_nodes(folder):
                keys.append(metadata_key(folder))
        names = {key.removeprefix(within).partition("/")[0] for key in keys if key.startswith(within)}
        return sorted(names)

    # ---- writing

    async def set(self, key: str, value: Buffer) -> None:
        """Stage metadata, the encoded bytes of a chunk, or other bytes.

        Raise `UnsupportedFormat` for metadata of Zarr v2 and for what tstore does not support of v3, `Corrupt` for
        metadata that is invalid, and `InvalidArgument` for an array at the root or a name that no node can have.
        """
        self._check_writable()
        await self._ensure_open()
        if not isinstance(value, Buffer):
            raise TypeError(f"{key}: value must be a Buffer of zarr, not a {type(value).__name__}")
        await self._here(self._set(key, value.to_bytes()))

    def set_sync(self, key: str, value: Buffer) -> None:
        """See `set`; blocks the calling thread."""
        BACKGROUND.run(self.set(key, value))

    async def _set(self, key: str, data: bytes) -> None:
        unplaced = await self._staging.unplaced()
        if (fields := parsed_metadata(key, data)) is not None:
            await self._set_node(metadata_path(key) or "", fields)
            unplaced.pop(key, None)
            return
        located = await self._chunk(key)
        if located is None:
            unplaced[key] = data
        else:
            unplaced.pop(key, None)
            await self._staging.set_chunk(located[0].path, located[1], data)

    async def _set_node(self, path: str, fields: dict[str, Any]) -> None:
        if path.strip("/") != path:
            raise InvalidArgument(f"{self}: {quote(path)} is not the path of a node, which has no outer slashes")
        if fields["node_type"] == "group":
            await self._staging.set_group(path, fields.get("attributes") or {})
            return
        if not path:
            raise InvalidArgument(
                f"{self}: tstore stores no array at the root; name it: zarr.create_array(store, name='x', …), "
                "zarr.save(store, x=values), or component='x' for to_zarr of Dask"
            )
        ChunkNames.parse(fields.get("chunk_key_encoding"))  # only checked: it affects exports alone
        await self._staging.set_array(path, fields)
        unplaced = await self._staging.unplaced()
        for key in [key for key in unplaced if key.startswith(f"{path}/")]:
            if (located := await self._chunk(key)) is not None:
                await self._staging.set_chunk(path, located[1], unplaced.pop(key))

    async def delete(self, key: str) -> None:
        """Stage the removal of a key, if it exists; that of the metadata of an array removes its chunks too.

        Raise `InvalidArgument` for the metadata of a group that has members.
        """
        self._check_writable()
        await self._ensure_open()
        await self._here(self._delete(key))

    def delete_sync(self, key: str) -> None:
        """See `delete`; blocks the calling thread."""
        BACKGROUND.run(self.delete(key))

    async def _delete(self, key: str) -> None:
        unplaced = await self._staging.unplaced()
        if unplaced.pop(key, None) is not None:
            return
        if (path := metadata_path(key)) is None:
            if (located := await self._chunk(key)) is not None:
                await self._staging.remove_chunks(located[0].path, [located[1]])
            return
        below = await self._staging.nodes_starting(f"{path}/" if path else "")
        if any(node.path != path for node in below):
            raise InvalidArgument(
                f"{self}: the group {path!r} has members, so its metadata can't be deleted alone; delete the group"
            )
        await self._staging.remove(path)

    async def delete_dir(self, prefix: str) -> None:
        """Stage the removal of all keys in a folder."""
        self._check_writable()
        await self._ensure_open()
        await self._here(self._delete_dir(prefix.strip("/")))

    async def _delete_dir(self, folder: str) -> None:
        within = f"{folder}/" if folder else ""
        unplaced = await self._staging.unplaced()
        for key in [key for key in unplaced if key.startswith(within)]:
            del unplaced[key]
        array = await self._staging.first_array(enclosing_folders(folder))
        if array is None:
            await self._staging.remove(folder)
            return
        numbers, keys = await self._staging.numbers(array.path), ChunkKeys.of_array(array)
        within_folder = await run(lambda: [number for number, _ in keys.below(numbers, folder)])
        await self._staging.remove_chunks(array.path, within_folder)

    async def _here(self, work: Coroutine[Any, Any, T]) -> T:
        """Run an operation on the event loop that may use the transaction."""
        if self._staged is None or (self._loop is not None and self._loop is asyncio.get_running_loop()):
            return await work
        call = BACKGROUND.start(work)
        return (await wait_all([call.future], call.cancel))[0]


_live: WeakValueDictionary[str, Transaction] = WeakValueDictionary()
"""Transactions whose stores were pickled, by id."""


@raises_when_used(ZarrStore)
def _of_snapshot(snapshot: Snapshot) -> ZarrStore:
    return ZarrStore(snapshot)


@raises_when_used(ZarrStore)
def _of_transaction(transaction: str, read_only: bool) -> ZarrStore:
    if transaction not in _live:
        raise Misuse(
            "the ZarrStore of a transaction can only be used in the process that began it; begin a transaction in "
            "the other process, of the same name for one commit of all processes"
        )
    return ZarrStore(_live[transaction], read_only=read_only)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _extent(byte_range: ByteRequest | None) -> Extent:
    """Return the start and end of the bytes of a request."""
    match byte_range:
        case None:
            return lambda length: (0, length)
        case RangeByteRequest(start, end):
            return lambda length: (min(start, length), max(min(start, length), min(end, length)))
        case OffsetByteRequest(offset):
            return lambda length: (min(offset, length), length)
        case SuffixByteRequest(suffix):
            return lambda length: (max(0, length - suffix), length)
    raise TypeError(
        f"Unexpected byte_range, got {byte_range!r}; expected a byte request of zarr"
    )  # as zarr words it

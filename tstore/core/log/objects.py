"""The metadata objects of a store: fetched, decoded and checked, with errors that name the object."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import TypeVar

from tstore.core.format.bounds import MANIFEST_BYTES, ROOT_BYTES
from tstore.core.format.layout import commit_key, root_key
from tstore.core.format.objects.encoding import decode, decode_record
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.pages import manifests_in
from tstore.core.format.objects.records import Fragment, Record, Root
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.roots import (
    ROOT_TRAILER,
    decode_root,
    decode_root_at_end,
    frame_length,
    is_in_pages,
)
from tstore.core.format.tree.nodes import Nodes
from tstore.core.log.commits import CommitObjects
from tstore.core.log.pages import PageReader, SegmentReader, read_range
from tstore.core.runtime.concurrency import compute
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.storage.cache import forget, without_cache
from tstore.core.storage.objects import SHORT_OBJECT
from tstore.errors import Corrupt, NotFound, UnsupportedFormat

__all__ = ["LostRoot", "MetadataObjects"]

T = TypeVar("T", Record, Manifest, Fragment)
V = TypeVar("V")

_SHORT_ROOT = 512 << 10  # bytes of a root that is read whole
_QUICK = 512 << 10  # bytes of a manifest that is decoded in the event loop
_ROOT_END = 64 << 10  # bytes at the end of a longer root, read first


class LostRoot(Corrupt):
    """Raised if a root with the only copy of a lost record's changes, or a root that it refers to, is lost."""

    key: str
    """The version of the former root."""

    @classmethod
    def from_version(cls, url: str, version: int) -> LostRoot:
        """Return the error for the root of a version."""
        error = cls(
            f"{url}: {root_key(version)}, or a root to which it refers, is missing or damaged, and only these "
            "have the changes of a lost record; restore it from a copy of the store"
        )
        error.key = root_key(version)
        return error


class MetadataObjects:
    """The metadata objects of one store.

    `parse` decodes a record. The default does not check the record's inline manifests: `manifests` does.
    """

    def __init__(self, storage: Storage, parse: Callable[[bytes], Record] = decode_record) -> None:
        self.storage = storage
        self.commits = CommitObjects(storage)
        self._parse = parse
        self.segments = SegmentReader(storage)
        self.pages = PageReader(storage, self.segments)
        self._long_reads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]
        self._long_reads = weakref.WeakKeyDictionary()

    def anew(self) -> MetadataObjects:
        """Return the objects of the same store, without anything cached."""
        return MetadataObjects(self.storage, self._parse)

    @property
    def advice(self) -> str:
        """The advice for a damaged or missing record."""
        return self.commits.advice

    async def load(self, version: int, process: Callable[[bytes], V], cached: Callable[[], V | None]) -> V:
        """Return the result of `process` for the bytes of the record of a version.

        `cached` returns that result if another task has loaded the record meanwhile, else None.
        """
        try:
            data = await self.commits.get(version, SHORT_OBJECT)
        except Corrupt:  # longer than `SHORT_OBJECT`, or damaged; if damaged, the next `get` raises it again
            return await self.load_long(version, process, cached)
        return process(data)

    async def load_long(self, version: int, process: Callable[[bytes], V], cached: Callable[[], V | None]) -> V:
        """Load a record longer than `SHORT_OBJECT`; one at a time, to bound the memory."""
        async with self._long_reads.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            value = cached()
            return process(await self.commits.get(version)) if value is None else value

    async def read(self, key: str, kind: type[T]) -> T:
        """Return the object at a key; raise `NotFound`, `Corrupt` or `UnsupportedFormat`."""
        return self.decode(key, await self.storage.get(key), kind)

    async def root(self, version: int) -> Root:
        """Return the root of a version; of a long root, only the end is read, which refers to the pages before it.

        Raise `NotFound`, `Corrupt` or `UnsupportedFormat`.
        """
        key = root_key(version)
        try:
            data = self._present(key, await self.storage.get(key, _SHORT_ROOT))
        except Corrupt:  # longer than `_SHORT_ROOT`, or damaged
            data = b""
        try:
            if data:
                return self._attached(decode_root(data))
            size, end = await run(self._root_end, key, await self.storage.size(key))
            return self._attached(await compute(_root_at_end, end, size))
        except (Corrupt, UnsupportedFormat) as error:
            raise self.with_key(key, error) from error

    async def whole_root(self, version: int) -> Root:
        """Return the root of a version as `root` does, but read and check the pages too."""
        key = root_key(version)
        data = self._present(key, await self.storage.get(key))
        try:
            return self._attached(await compute(decode_root, data))
        except (Corrupt, UnsupportedFormat) as error:
            raise self.with_key(key, error) from error

    def _present(self, key: str, data: bytes) -> bytes:
        """Return the bytes of a root; raise `NotFound` for an empty object, with which repairs replace roots."""
        if not data:
            raise NotFound(f"{self.storage.url}: {key} is missing")
        return data

    def _attached(self, root: Root) -> Root:
        if isinstance(root.manifest, Manifest):
            root.manifest.attach(self.segments)
        return root

    def _root_end(self, key: str, size: int | None) -> tuple[int, bytes]:
        """Return the size of the object of a root, and its end with the whole frame; blocking."""
        if size is None:
            raise NotFound(f"{self.storage.url}: {key} is missing")
        if size > ROOT_BYTES:
            raise Corrupt(f"a root has {size:,} bytes, more than the {ROOT_BYTES:,} that it may have")

        def end(length: int) -> bytes:
            start = max(0, size - length)
            return read_range(without_cache(self.storage), key, start, size - start, lambda data: data)

        tail = end(_ROOT_END)
        if (length := frame_length(tail) + ROOT_TRAILER) > len(tail):
            if not is_in_pages(read_range(without_cache(self.storage), key, 0, ROOT_TRAILER, lambda data: data)):
                length = size
            if length > size:
                raise Corrupt(f"a root of {size} bytes does not end in a frame")
            tail = end(length)
        return size, tail

    async def manifests(self, version: int, record: Record) -> list[Manifest]:
        """Return the manifests of a version's record; raise `Corrupt`, or `NotFound` if one is missing."""
        inline = self.inline_manifests(version, record)
        if inline is not None:
            return inline
        self._check_length(version, record)
        pages = await asyncio.gather(*[self.manifest(m) for m in record.manifests])
        return [manifest for listed in pages for manifest in listed]

    def paged_nodes(self, version: int, record: Record) -> Nodes | None:
        """Return the nodes of a record that has one manifest, in pages; otherwise None."""
        reference = record.paged_manifest
        if reference is None:
            return None
        self._check_length(version, record)
        return Nodes.from_pages(reference, self.pages)

    def _check_length(self, version: int, record: Record) -> None:
        total = sum(m.length for m in record.manifests if isinstance(m, ObjectRef))
        if total > MANIFEST_BYTES:
            raise Corrupt(
                f"{self.storage.url}: {commit_key(version)} refers to manifests of {total:,} bytes, more than the "
                f"{MANIFEST_BYTES:,} that a commit may have; {self.advice}"
            )

    def inline_manifests(self, version: int, record: Record) -> list[Manifest] | None:
        """Return the manifests if all of them are inside the record, otherwise None."""
        inline = [m for m in record.manifests if isinstance(m, Manifest)]
        try:
            for manifest in inline:
                _ = manifest.attach(self.segments).table  # raises `Corrupt` for invalid values
        except Corrupt as error:
            raise Corrupt(f"{self.storage.url}: {commit_key(version)}: {error}; {self.advice}") from error
        return inline if len(inline) == len(record.manifests) else None

    async def manifest(self, reference: ObjectRef | Manifest) -> list[Manifest]:
        """Return an inline manifest, or the one that a reference names; a long one in pages.

        Raise `NotFound` if the manifest is missing, or `Corrupt` if it is not the one that was committed.
        """
        if isinstance(reference, Manifest):
            reference.validate()
            return [reference.attach(self.segments)]
        try:
            data = await self.storage.get(reference.key, reference.length)
        except NotFound as error:
            message = f"{self.storage.url}: {reference.key} is missing; restore it from a copy of the store"
            raise NotFound(message) from error
        if not reference.matches(data) and await run(forget, self.storage, reference.key):
            data = await self.storage.get(reference.key, reference.length)  # the cached copy was wrong
        pages = manifests_in(reference, data)
        try:
            decoded = await compute(list, pages) if len(data) > _QUICK else list(pages)
            return [manifest.attach(self.segments) for manifest in decoded]
        except (Corrupt, UnsupportedFormat) as error:
            raise type(error)(f"{self.storage.url}: {error}") from error

    def decode(self, key: str, data: bytes, kind: type[T]) -> T:
        """Decode an object; raise `Corrupt` or `UnsupportedFormat`, naming the key."""
        try:
            return decode(data, kind)
        except (Corrupt, UnsupportedFormat) as error:
            raise self.with_key(key, error) from error

    def decode_record(self, version: int, data: bytes) -> Record:
        """Decode the record of a version; raise `Corrupt` or `UnsupportedFormat`."""
        try:
            record = self._parse(data)
            record.check_number(version)
        except (Corrupt, UnsupportedFormat) as error:
            raise self.with_key(commit_key(version), error) from error
        return record

    def with_key(self, key: str, error: Corrupt | UnsupportedFormat) -> Corrupt | UnsupportedFormat:
        """Return an error of decoding an object with the key, and the advice for a record."""
        advice = f"; {self.advice}" if key.startswith("commits/") and isinstance(error, Corrupt) else ""
        return type(error)(f"{self.storage.url}: {key}: {error}{advice}")


def _root_at_end(end: bytes, size: int) -> Root:
    """Return the root in an object of this size that ends in these bytes."""
    return decode_root_at_end(end, size) if len(end) < size or is_in_pages(end) else decode_root(end)

"""Metadata objects as they are read: decoded, checked, and named in errors."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import TypeVar

from tstore.errors import Corrupt, UnsupportedFormat
from tstore.format.bounds import MANIFEST_BYTES
from tstore.format.encoding import decode, decode_record
from tstore.format.layout import commit_key
from tstore.format.records import Fragment, Record, Root
from tstore.format.references import Manifest, ObjectRef
from tstore.runtime.pool import run
from tstore.storage.base import SHORT, Backend
from tstore.storage.cache.store import forget

__all__ = ["Objects"]

T = TypeVar("T", Record, Manifest, Fragment, Root)
V = TypeVar("V")


class Objects:
    """The metadata objects of one store."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]
        self._turns = weakref.WeakKeyDictionary()  # to read a long object

    async def taken(self, key: str, take: Callable[[bytes], V], known: Callable[[], V | None] = lambda: None) -> V:
        """What is made of the bytes of an object; where these are many, of no other at the same time.

        `known` tells what another task has made of them meanwhile.
        """
        try:
            data = await self.backend.get(key, SHORT)
        except Corrupt:  # it is longer, or `get` says the same again
            return await self.taken_alone(key, take, known)
        return take(data)

    async def taken_alone(self, key: str, take: Callable[[bytes], V], known: Callable[[], V | None]) -> V:
        """The same of an object of many bytes, in its turn."""
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            made = known()
            return take(await self.backend.get(key)) if made is None else made

    async def manifests(self, version: int, record: Record) -> list[Manifest]:
        """The manifests of the record of a version, read where they do not travel in it; `Corrupt`."""
        inside = [m for m in record.manifests if isinstance(m, Manifest)]
        try:
            for manifest in inside:
                manifest.validate()
        except Corrupt as error:
            raise Corrupt(f"{self.backend.url}: {commit_key(version)}: {error}") from error
        if len(inside) == len(record.manifests):
            return inside
        total = sum(m.length for m in record.manifests if isinstance(m, ObjectRef))
        if total > MANIFEST_BYTES:
            raise Corrupt(
                f"{self.backend.url}: the commit of {record.transaction} refers to manifests of {total} bytes, "
                f"more than the {MANIFEST_BYTES} that one has; restore its record from a copy of the store"
            )
        return list(await asyncio.gather(*[self.manifest(m) for m in record.manifests]))

    async def manifest(self, where: ObjectRef | Manifest) -> Manifest:
        """The manifest itself, or the one at that place, checked against its reference; `Corrupt`."""
        if isinstance(where, Manifest):
            where.validate()
            return where
        data = await self.backend.get(where.key, where.length)
        if not where.is_to(data) and await run(forget, self.backend, where.key):
            data = await self.backend.get(where.key, where.length)
        if not where.is_to(data):
            raise Corrupt(
                f"{self.backend.url}: {where.key} is not the object that was committed: expected "
                f"{where.length} bytes, found {len(data)}, or another checksum; restore it from a copy"
            )
        return self.decoded(where.key, data, Manifest)

    async def read(self, key: str, kind: type[T]) -> T:
        """The object at a key; errors name it."""
        return self.decoded(key, await self.backend.get(key), kind)

    def decoded_record(self, key: str, data: bytes) -> Record:
        """The record in the bytes at a key; what its manifests say is checked once they are asked for."""
        try:
            return decode_record(data)
        except (Corrupt, UnsupportedFormat) as error:
            raise type(error)(f"{self.backend.url}: {key}: {error}") from error

    def decoded(self, key: str, data: bytes, kind: type[T]) -> T:
        """The object in the bytes at a key; `Corrupt` and `UnsupportedFormat` name it."""
        try:
            return decode(data, kind)
        except (Corrupt, UnsupportedFormat) as error:
            mend = f"; {self.advice}" if kind is Record and isinstance(error, Corrupt) else ""
            raise type(error)(f"{self.backend.url}: {key}: {error}{mend}") from error

    @property
    def advice(self) -> str:
        """What to do about a damaged or missing record."""
        return f"restore it from a copy of the store, or see tstore repair {self.backend.url}"

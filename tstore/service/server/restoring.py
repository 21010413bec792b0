"""Validate the replacement of a damaged pack or manifest by the bytes that committed versions need.

A copy from an intact store replaces damaged objects. The new bytes are admitted if they have every checksum that
the records of living versions, and the manifests of these, give for the object. So a replacement changes nothing
that was committed. All records and manifests of living versions are read, at most once per version of the log.
"""

from __future__ import annotations

import asyncio
import logging

from tstore.core.copying.inventory import Inventory, PackCheck, living_as_of, take_inventory
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.log.reader import LogReader
from tstore.core.storage.base import Storage
from tstore.errors import Corrupt, NotFound, UnsupportedFormat
from tstore.service.server.responses import Refused

__all__ = ["PackRestoration", "Restoring"]

_log = logging.getLogger("tstore.server")


class PackRestoration:
    """The check of the bytes that are to replace a pack, while they are received."""

    def __init__(self, key: str, check: PackCheck, end: int) -> None:
        self._key = key
        self._check = check
        self._end = end

    def update(self, parts: list[bytes]) -> None:
        """Add the next bytes; raise `Refused` if a block in them does not match its checksum. Blocking."""
        for part in parts:
            if (offset := self._check.update(memoryview(part))) is not None:
                raise self._refusal(f"the bytes at {offset} do not have the checksum in the manifest")

    def finish(self) -> None:
        """Raise `Refused` if the pack has ended before the last block."""
        if self._check.position < self._end:
            raise self._refusal(f"it has {self._check.position} bytes, but a chunk in it ends at {self._end}")

    def _refusal(self, reason: str) -> Refused:
        return Refused(422, f"{self._key} was not replaced: {reason}")


class Restoring:
    """The objects that the living versions of the store behind one server need."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = asyncio.Lock()
        self._inventory: Inventory | None = None

    async def pack(self, key: str) -> PackRestoration:
        """Return the check of the new bytes of a pack; raise `Refused` if no living version needs the pack."""
        if (blocks := (await self._newest(key)).packs.get(key)) is None:
            raise _not_needed(key)
        return PackRestoration(key, blocks.new_check(), blocks.end)

    async def check_manifest(self, key: str, data: bytes) -> None:
        """Raise `Refused` unless these are the bytes of a manifest that a living version needs."""
        reader = LogReader.strict(self._storage)
        newest = await reader.newest()
        living = await living_as_of(reader, newest)
        async for version, record in reader.each_record(range(newest, 0, -1)):
            references = [ref for ref in record.manifests if isinstance(ref, ObjectRef) and ref.key == key]
            if references and (version in living or key in living.shared):
                if not references[0].matches(data):
                    raise Refused(422, f"{key} was not replaced: the record gives another length or checksum")
                return
        raise _not_needed(key)

    async def _newest(self, key: str) -> Inventory:
        """Return the inventory of the newest version."""
        async with self._lock:
            reader = LogReader.strict(self._storage)
            version = await reader.newest()
            if self._inventory is None or self._inventory.base != version:
                try:
                    living = await living_as_of(reader, version)
                    self._inventory = await take_inventory(reader, version, living)
                except (Corrupt, NotFound, UnsupportedFormat) as error:
                    _log.warning("%s can't be replaced: %s", key, error)
                    raise Refused(
                        422, f"{key} was not replaced: not all versions can be read; `tstore verify` names them"
                    ) from error
            return self._inventory


def _not_needed(key: str) -> Refused:
    return Refused(403, f"{key} was not replaced: no living version needs it")

"""Writes and deletions of objects, as clients request them.

1. A pack is streamed to a temporary file, and appears under its key only when it is complete. Any other object is
   received whole, and validated before it is stored.
2. A body that is truncated, stalls, is too long or has another checksum is discarded.
3. A record is accepted only as the next version, so that no request can leave a gap in the log, and only if it
   follows from the log. A root or an archive is accepted only if it equals the one that follows from the log
   (`admission`). With the scope ADMIN, as in a copy, a root may also have the changes of a lost record.
4. Before a server answers that an object already exists, or sends a record, it makes the object durable, unless it
   is known to be: a client whose first request got no response reads it back, and believes that it is its own.
   The server that received that request may have been killed, or may be waiting for the disk.
5. A pack or a manifest is replaced only with the scope ADMIN, and only by bytes that have every checksum which
   living versions give for it (`restoring`). So a copy can repair it without deleting it first.
6. A record is deleted only if its archive exists. Roots, and data and metadata of a transaction, are deleted only
   if a garbage collection condemned them and no version needs them. Heartbeats, and objects outside a store's
   layout, can be deleted at any time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Hashable

from aiohttp import web

from tstore.core.format.bounds import max_object_size
from tstore.core.format.checksums import BlockHash
from tstore.core.format.layout import version_of
from tstore.core.format.objects.encoding import Archive
from tstore.core.format.objects.records import Record, Root
from tstore.core.log.marker import Marker
from tstore.core.log.roots import has_lost_changes
from tstore.core.runtime.pool import run
from tstore.core.storage.objects import Durability, PutMode
from tstore.errors import AlreadyExists, Corrupt, UnsupportedFormat
from tstore.service.server.access import Scope, Sender
from tstore.service.server.admission import Admission
from tstore.service.server.bodies import check_declared_length, receive
from tstore.service.server.kinds import Kind, parse_metadata
from tstore.service.server.quotas import BODY_MEMORY, LONGEST_IN_MEMORY, PIECE, Limits, Shares, Turns
from tstore.service.server.responses import Refused
from tstore.service.server.restoring import Restoring
from tstore.service.server.served import ServedStorage, Spool
from tstore.service.server.transfers import Transfers

__all__ = ["Writes"]

_SHORT = 16 << 10  # bytes; shorter bodies are parsed faster than a thread wakes
_OTHER_CONDITIONS = "If-Match", "If-Unmodified-Since"


class Writes:
    """Stores and deletes the objects of one server."""

    def __init__(self, served: ServedStorage, limits: Limits, transfers: Transfers) -> None:
        self._served = served
        self._limits = limits
        self._transfers = transfers
        self._storage = served.storage
        self._turns = Turns(limits.wait)
        self._admission = Admission(served.storage, limits.wait, self._turns)
        self._restoring = Restoring(served.storage)
        self._memory = Shares(BODY_MEMORY, limits.wait, waiting_for="memory")
        self._durable_version = 0  # all records up to it are durable

    async def put(self, request: web.BaseRequest, key: str, kind: Kind, sender: Sender) -> PutMode:
        """Store the body of a request; return the mode, create or replace."""
        mode = _mode(request, kind, sender)
        if "Content-Encoding" in request.headers or "Content-Range" in request.headers:
            raise Refused(415, "Content-Encoding and Content-Range are not supported; send the whole object")
        # `admit` checks that the next record is absent, and so saves a request
        is_next = kind is Kind.RECORD and version_of(key) - 1 == self._admission.version > 0
        if mode is PutMode.CREATE and not is_next and await self._storage.head(key) is not None:
            await self._flush(key)
            raise Refused(412, f"{key} already exists; it was not changed")
        try:
            if kind is Kind.PACK or (kind.streamed and mode is PutMode.CREATE):
                await self._put_pack(request, key, sender.client, mode)
            else:
                await self._put_whole(request, key, kind, mode, sender)
        except AlreadyExists:
            await self._flush(key)
            raise
        return mode

    async def make_durable(self, key: str) -> None:
        """Make a record that exists durable, unless it is known to be."""
        if (version := version_of(key)) > self._durable_version:
            await self._flush(key)
            self._durable_version = max(self._durable_version, version)

    async def delete(self, key: str, kind: Kind) -> None:
        """Delete an object; raise `Refused` if that is not permitted."""
        if kind in (Kind.MARKER, Kind.ARCHIVE, Kind.HINT):
            raise Refused(403, f"{key} can't be deleted: markers, archives and hints never are")
        if kind is Kind.RECORD:
            if not await self._admission.is_archived(version_of(key)):
                raise Refused(403, f"{key} can't be deleted: this record is in no archive")
            await self._storage.delete(key)
            return
        if kind is not Kind.FOLDER and await self._storage.head(key) is None:
            return
        if kind in (Kind.HEARTBEAT, Kind.TIERS, Kind.OTHER):
            await self._storage.delete(key)
            if kind is Kind.HEARTBEAT:
                await self._served.remove_empty_folder(key.rpartition("/")[0])
            return
        try:
            deletable = await self._admission.may_delete(key)
        except (Corrupt, UnsupportedFormat) as error:
            raise Refused(422, f"{key} was not deleted: {error}") from error
        if not deletable:
            raise Refused(403, f"{key} was not deleted: no garbage collection condemned it, or a version needs it")
        if kind is not Kind.FOLDER:
            await self._storage.delete(key)
        if kind is not Kind.ROOT:
            _, transaction, *_ = key.split("/")
            await self._served.remove_empty_folder(f"txn/{transaction}")

    async def _flush(self, key: str) -> None:
        await self._storage.flush(key.rpartition("/")[0], Durability.FSYNC)

    async def _put_pack(self, request: web.BaseRequest, key: str, client: Hashable, mode: PutMode) -> None:
        max_size = self._limits.pack_bytes
        check_declared_length(request, max_size)
        restoration = await self._restoring.pack(key) if mode is PutMode.REPLACE else None
        async with self._served.incoming(key, client, mode) as incoming:

            async def write(parts: list[bytes]) -> None:
                if restoration is not None:
                    await run(restoration.update, parts)
                await incoming.write(parts)

            blocks = await self._receive(request, client, max_size, write)
            if restoration is not None:
                restoration.finish()
        self._admission.received.add(key, blocks)

    async def _put_whole(
        self, request: web.BaseRequest, key: str, kind: Kind, mode: PutMode, sender: Sender
    ) -> None:
        max_size = min(LONGEST_IN_MEMORY, max_object_size(key) or LONGEST_IN_MEMORY)
        check_declared_length(request, max_size)
        with contextlib.closing(Spool()) as spool:
            await self._receive(request, sender.client, max_size, spool.write)
            # Short bodies need no claim, because the number of concurrent requests is limited. Only a record stays
            # in memory after it was parsed, and takes up to 16 times its bytes.
            expansion, max_unclaimed = (16, _SHORT) if kind is Kind.RECORD else (3, PIECE)
            claimed = expansion * spool.size if spool.size > max_unclaimed else 0
            async with self._memory.claim(sender.client, claimed):
                try:
                    await self._store(key, kind, await spool.read(), mode, sender)
                except (Corrupt, UnsupportedFormat) as error:
                    raise Refused(422, f"{key} was not stored: {error}") from error

    async def _receive(
        self,
        request: web.BaseRequest,
        client: Hashable,
        max_size: int,
        write: Callable[[list[bytes]], Awaitable[None]],
    ) -> BlockHash:
        """Write the body of a request, verify it against the checksum in its headers, if any; return its hash."""
        blocks, expected = BlockHash(), request.headers.get("X-TStore-XXH3")
        with self._transfers.track(client) as transfer:
            async for parts in receive(request, max_size, transfer):
                for part in parts:
                    blocks.update(part)
                await write(parts)
        if expected is not None and expected.lower() != blocks.hexdigest():
            raise Refused(
                409, "the body does not match the checksum X-TStore-XXH3, so nothing was stored; send it again"
            )
        return blocks

    async def _store(self, key: str, kind: Kind, data: bytes, mode: PutMode, sender: Sender) -> None:
        """Validate and store an object; raise `Corrupt` if its form is invalid or it contradicts the log."""
        if len(data) <= _SHORT:
            parsed = parse_metadata(key, kind, data)
        else:
            parsed = await self._turns.run(sender.client, parse_metadata, key, kind, data)
        if isinstance(parsed, Marker):
            await self._admission.check_marker(parsed)
        if isinstance(parsed, Root):
            try:
                await self._admission.check_root(parsed.version, parsed, data)
            except Corrupt:
                if sender.scope < Scope.ADMIN or not await has_lost_changes(self._storage, parsed):
                    raise
        if isinstance(parsed, Archive):
            await self._admission.check_archive(parsed, data, sender)
        if kind is Kind.MANIFEST and mode is PutMode.REPLACE:
            await self._restoring.check_manifest(key, data)
        if not isinstance(parsed, Record):
            await self._storage.put(key, [data], mode)
            return
        admitted = await self._admission.admit(version_of(key), parsed, data, sender)
        await self._admission.commits.create(version_of(key), data, Durability.FSYNC)
        self._durable_version = max(self._durable_version, version_of(key))
        self._admission.advance(admitted, data)


def _mode(request: web.BaseRequest, kind: Kind, sender: Sender) -> PutMode:
    none_match = request.headers.getall("If-None-Match", [])
    if none_match not in ([], ["*"]) or any(name in request.headers for name in _OTHER_CONDITIONS):
        raise Refused(400, "the only condition that PUT supports is If-None-Match: *")
    if none_match:
        return PutMode.CREATE
    if not kind.replaceable and not (kind.restorable and sender.scope is Scope.ADMIN):
        raise Refused(428, "this object can't be replaced; create it with If-None-Match: *")
    return PutMode.REPLACE

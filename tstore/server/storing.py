"""What a server takes, and what it removes.

1. A pack goes piece by piece to where it is kept until whole; the rest is short, is held, and is checked first.
2. A body that ends early, stalls, is too long or has another checksum leaves nothing.
3. A record is taken only behind the one before it, so no request can tear a hole into the log, and only where it
   follows from that (`admission`). So is a root.
4. Nothing is removed that no gc's commit condemned or that a version is made of, the heartbeats of hosts apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import xxhash
from aiohttp import web

from tstore.errors import Corrupt, UnsupportedFormat
from tstore.format.bounds import longest
from tstore.format.records import Record, Root
from tstore.runtime.pool import run
from tstore.server.access import Scope
from tstore.server.admission import Admission, Sender
from tstore.server.bodies import declared_length, received
from tstore.server.limits import HELD, LONGEST_HELD, PIECE, Limits
from tstore.server.metadata import parsed
from tstore.server.names import Kind, number_of
from tstore.server.responses import Refused
from tstore.server.served import Served
from tstore.server.shares import Shares
from tstore.server.spool import Spool
from tstore.server.transfers import Transfers, client_of
from tstore.storage.objects import PutMode

__all__ = ["Storing"]

_SHORT = 16 << 10  # bytes that are parsed sooner than a thread is woken
_OTHER_CONDITIONS = "If-Match", "If-Unmodified-Since"


class Storing:
    """Stores and removes the objects of one server."""

    def __init__(self, served: Served, limits: Limits, transfers: Transfers) -> None:
        self._served = served
        self._limits = limits
        self._transfers = transfers
        self._storage = served.storage
        self._admission = Admission(served.storage, limits.wait)
        self._memory = Shares(HELD, limits.wait, "memory")

    async def put(self, request: web.BaseRequest, key: str, kind: Kind, scope: Scope) -> PutMode:
        """Stores the body of a request, as it asks: created, or put in place of what was there.

        `scope` is that of who asks.
        """
        mode = _mode(request, kind)
        if "Content-Encoding" in request.headers or "Content-Range" in request.headers:
            raise Refused(415, "an object is sent as it is and whole")
        if mode is PutMode.CREATE and await self._storage.head(key) is not None:
            raise Refused(412, f"{key} exists already; it was left as it is")
        if kind.streamed and mode is PutMode.CREATE:
            await self._stream(request, key)
        else:
            await self._hold(request, key, kind, mode, scope)
        return mode

    async def remove(self, key: str, kind: Kind) -> None:
        """Removes an object that may go."""
        if kind in (Kind.MARKER, Kind.RECORD, Kind.HINT):
            raise Refused(403, f"{key} is never removed")
        if kind is not Kind.FOLDER and await self._storage.head(key) is None:
            return
        if kind in (Kind.HEARTBEAT, Kind.OTHER):
            await self._storage.delete(key)
            return
        try:
            may_go = await self._admission.may_go(key)
        except (Corrupt, UnsupportedFormat) as error:
            raise Refused(422, f"{key} is not removed: {error}") from error
        if not may_go:
            raise Refused(403, f"no gc condemned {key}, or a version is made of it, so it is not removed")
        if kind is not Kind.FOLDER:
            await self._storage.delete(key)
        if kind is not Kind.ROOT:
            await self._served.clean_folder("/".join(key.split("/")[:2]))

    async def _stream(self, request: web.BaseRequest, key: str) -> None:
        most = self._limits.object_bytes
        declared_length(request, most)
        async with self._served.incoming(key, client_of(request)) as incoming:
            await self._receive(request, most, incoming.write)

    async def _hold(self, request: web.BaseRequest, key: str, kind: Kind, mode: PutMode, scope: Scope) -> None:
        most = min(LONGEST_HELD, longest(key) or LONGEST_HELD)
        declared_length(request, most)
        client = client_of(request)
        with contextlib.closing(Spool()) as spool:
            await self._receive(request, most, spool.write)
            # as it came, and parsed; what is short waits for nobody, and requests are bounded
            claimed = 3 * spool.size if spool.size > PIECE else 0
            async with self._memory.claim(client, claimed):
                try:
                    await self._keep(key, kind, await spool.read(), mode, Sender(client, scope))
                except (Corrupt, UnsupportedFormat) as error:
                    raise Refused(422, f"{key} is not stored: {error}") from error

    async def _receive(
        self, request: web.BaseRequest, most: int, write: Callable[[list[bytes]], Awaitable[None]]
    ) -> None:
        """Writes the body of a request, and checks it, once whole, against the checksum that was sent with it."""
        digest = _Digest(request)
        with self._transfers.begun(client_of(request)) as transfer:
            async for data in received(request, most, transfer):
                digest.update(data)
                await write([data])
        digest.check()

    async def _keep(self, key: str, kind: Kind, data: bytes, mode: PutMode, sender: Sender) -> None:
        """Stores an object whole, where its form and the log allow it; `Corrupt` says why not."""
        body = parsed(key, kind, data) if len(data) <= _SHORT else await run(parsed, key, kind, data)
        if isinstance(body, Root):
            await self._admission.check_root(body.version, body, data)
        if not isinstance(body, Record):
            await self._storage.put(key, [data], mode)
            return
        made = await self._admission.admitted(number_of(key), body, len(data), sender)
        await self._storage.put(key, [data], mode)
        self._admission.took(made, data)


class _Digest:
    """The checksum of a body, where the client sent one."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._wanted = request.headers.get("X-TStore-XXH3")
        self._made = xxhash.xxh3_128()

    def update(self, data: bytes) -> None:
        if self._wanted is not None:
            self._made.update(data)

    def check(self) -> None:
        if self._wanted is not None and self._wanted.lower() != self._made.hexdigest():
            raise Refused(
                409, "the body has another checksum than X-TStore-XXH3; nothing was stored, send it again"
            )


def _mode(request: web.BaseRequest, kind: Kind) -> PutMode:
    wanted = request.headers.getall("If-None-Match", [])
    if wanted not in ([], ["*"]) or any(name in request.headers for name in _OTHER_CONDITIONS):
        raise Refused(400, "the only condition of a PUT is If-None-Match: *")
    if wanted:
        return PutMode.CREATE
    if not kind.replaceable:
        raise Refused(428, "this name can't be replaced; create it with If-None-Match: *")
    return PutMode.REPLACE

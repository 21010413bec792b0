"""What a server takes, and what it removes.

1. A pack goes piece by piece to where it is kept until whole; the rest is short, is held, and is checked first.
2. A body that ends early, stalls, is too long or has another checksum leaves nothing.
3. A record is taken only behind the one before it, so no request can tear a hole into the log.
4. Nothing is removed that no gc's commit condemned, the heartbeats of hosts apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import xxhash
from aiohttp import web

from tstore.commits.log import Log
from tstore.commits.manifest import Root, check_of, decode
from tstore.commits.records import commit_key
from tstore.errors import Corrupt, NotFound, TimelineChanged, UnsupportedFormat
from tstore.kv.objects import PutMode
from tstore.pool import run
from tstore.server.answers import Refused
from tstore.server.bodies import declared_length, received
from tstore.server.limits import HELD, LONGEST_HELD, LONGEST_SMALL, PIECE, Budget, Limits
from tstore.server.metadata import check
from tstore.server.names import Kind, number_of
from tstore.server.served import LengthNeeded, Served

__all__ = ["Storing"]

_SMALL = (Kind.MARKER, Kind.HINT, Kind.HEARTBEAT, Kind.MERGER)
_GCS = 8


class Storing:
    """Stores and removes the objects of one server."""

    def __init__(self, served: Served, limits: Limits) -> None:
        self._served = served
        self._limits = limits
        self._log = Log(served.backend)
        self._budget = Budget(HELD)

    async def put(self, request: web.BaseRequest, key: str, kind: Kind) -> PutMode:
        """Stores the body of a request, as it asks: created, or put in place of what was there."""
        mode = _mode(request, kind)
        if "Content-Encoding" in request.headers or "Content-Range" in request.headers:
            raise Refused(415, "an object is sent as it is and whole")
        if mode is PutMode.CREATE and await self._served.exists(key):
            raise Refused(412, f"{key} exists already; it was left as it is")
        if kind.streamed and mode is PutMode.CREATE:
            await self._stream(request, key)
        else:
            await self._hold(request, key, kind, mode)
        return mode

    async def remove(self, key: str, kind: Kind) -> None:
        """Removes an object that may go."""
        if kind in (Kind.MARKER, Kind.RECORD, Kind.HINT):
            raise Refused(403, f"{key} is never removed")
        if kind is not Kind.FOLDER and not await self._served.exists(key):
            return
        if kind in (Kind.HEARTBEAT, Kind.OTHER):
            await self._served.delete(key)
            return
        if not await self._condemned(key):
            raise Refused(403, f"no gc condemned {key}, so it is not removed")
        if kind is not Kind.FOLDER:
            await self._served.delete(key)
        if kind is not Kind.ROOT:
            await self._served.tidy("/".join(key.split("/")[:2]))

    async def _stream(self, request: web.BaseRequest, key: str) -> None:
        most = self._limits.object_bytes
        length = declared_length(request, most)
        async with self._budget.claim(min(length or most, 2 * PIECE)):
            digest = _Digest(request)
            try:
                async with self._served.incoming(key, length) as incoming:
                    async for pieces in received(request, most, self._limits):
                        digest.update(pieces)
                        await incoming.write(pieces)
                    digest.check()
            except LengthNeeded:
                raise Refused(411, f"{key} needs a Content-Length") from None

    async def _hold(self, request: web.BaseRequest, key: str, kind: Kind, mode: PutMode) -> None:
        most = LONGEST_SMALL if kind in _SMALL else LONGEST_HELD
        length = declared_length(request, most)
        if length is None:
            raise Refused(411, f"{key} needs a Content-Length")
        # as it comes, joined, and parsed; what is short waits for nobody, and requests are bounded
        async with self._budget.claim(0 if length <= PIECE else min(HELD, 3 * length)):
            digest = _Digest(request)
            data = bytearray()
            async for pieces in received(request, most, self._limits):
                digest.update(pieces)
                data += b"".join(pieces)
            digest.check()
            try:
                await run(check, key, kind, bytes(data))
            except (Corrupt, UnsupportedFormat) as error:
                raise Refused(422, f"{key} is not stored: {error}") from error
            if kind is Kind.ROOT:
                await self._check_root(key, bytes(data))
            before = number_of(key) - 1 if kind is Kind.RECORD else 0
            if before and not await self._served.exists(commit_key(before)):
                said = f"there is no version {before}, and no number is left out"
                raise Refused(422, f"{key} is not stored: {said}")
            await self._served.put(key, bytes(data), mode)

    async def _check_root(self, key: str, data: bytes) -> None:
        """Refuses a root of another record than stands there; where none does yet, readers compare."""
        with contextlib.suppress(NotFound):
            record = await self._served.backend.get(commit_key(number_of(key)))
            if decode(data, Root).record != check_of(record):
                raise Refused(422, f"{key} is not stored: it is the root of another record than the one here")

    async def _condemned(self, key: str) -> bool:
        """Whether one of the last gcs condemned an object."""
        try:
            return await self._condemned_by(self._log, key)
        except TimelineChanged:  # a backup was restored below the server, which goes on with that
            self._log = Log(self._served.backend)
            return await self._condemned_by(self._log, key)

    async def _condemned_by(self, log: Log, key: str) -> bool:
        last = await log.collected(await log.newest())
        for _ in range(_GCS):
            collection = (await log.record(last)).collection if last else None
            if collection is None:
                return False
            if key in collection.objects or key.split("/")[1] in collection.transactions:
                return True
            last = (await log.record(last)).collected
        return False


class _Digest:
    """The checksum of a body, where the client sent one."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._wanted = request.headers.get("X-TStore-XXH3")
        self._made = xxhash.xxh3_128()

    def update(self, pieces: Sequence[bytes]) -> None:
        if self._wanted is not None:
            for piece in pieces:
                self._made.update(piece)

    def check(self) -> None:
        if self._wanted is not None and self._wanted.lower() != self._made.hexdigest():
            raise Refused(
                409, "the body has another checksum than X-TStore-XXH3; nothing was stored, send it again"
            )


def _mode(request: web.BaseRequest, kind: Kind) -> PutMode:
    wanted = request.headers.getall("If-None-Match", [])
    if wanted == ["*"]:
        return PutMode.CREATE
    if wanted or "If-Match" in request.headers:
        raise Refused(400, "the only condition of a PUT is If-None-Match: *")
    if not kind.replaceable:
        raise Refused(428, "this name can't be replaced; create it with If-None-Match: *")
    return PutMode.REPLACE

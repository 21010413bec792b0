"""An answer whose body is still to be read: bounded in bytes, and in time by the pace of its request."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncGenerator

import aiohttp
from multidict import CIMultiDictProxy
from yarl import URL

from tstore.format.bounds import HEAD
from tstore.storage.base import bound, overlong
from tstore.storage.http.body import fill
from tstore.storage.http.responses import Sink
from tstore.storage.pace import Pace
from tstore.storage.room import Room

__all__ = ["Reply"]

_LONGEST_REASON = 8 << 10


class Reply:
    """What a server answered; valid as long as its session's `answer` block lasts."""

    def __init__(self, response: aiohttp.ClientResponse, pace: Pace) -> None:
        self._response = response
        self._pace = pace

    @property
    def method(self) -> str:
        """The method of the request."""
        return self._response.method

    @property
    def url(self) -> URL:
        """Where the answer comes from, after all redirects."""
        return self._response.url

    @property
    def status(self) -> int:
        """The status code."""
        return self._response.status

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The header fields."""
        return self._response.headers

    @property
    def content_length(self) -> int | None:
        """The body's length, where the server told it."""
        return self._response.content_length

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes."""
        async for block in self._response.content.iter_any():
            self._pace.moved(len(block))
            yield block

    async def whole(self, where: str, most: int, key: str = "") -> bytes:
        """The body; `Corrupt` where it is longer than `most` bytes, or than an object of that name ever is."""
        told, limit = self.content_length or 0, bound(key, most)
        if told > limit:
            raise overlong(where, limit)
        # a BytesIO gives its bytes away without another copy; closed, it leaves none in the traceback of an error
        with io.BytesIO() as found:
            async with Room() as room, contextlib.aclosing(self.blocks()) as blocks:
                async for block in blocks:
                    size = found.tell() + len(block)
                    if found.tell() < HEAD <= size:
                        limit = bound(key, most, found.getvalue() + block[:HEAD])
                    if max(told, size) > limit:
                        raise overlong(where, limit)
                    if size == len(block) == told:
                        return block
                    if not room.has(len(block)):
                        await self._pace.pause(room.wait())
                    found.write(block)
            return found.getvalue()

    async def part(self, where: str, start: int, stop: int | None, most: int) -> bytes:
        """The bytes of the body from `start` to `stop`; what is before is not kept, the rest not awaited."""
        found: list[bytes] = []
        at = 0
        async with contextlib.aclosing(self.blocks()) as blocks:
            async for block in blocks:
                low = max(0, start - at)
                high = len(block) if stop is None else min(len(block), stop - at)
                if low < high:
                    found.append(block[low:high])
                at += len(block)
                if (at if stop is None else min(at, stop)) - start > most:
                    raise overlong(where, most)
                if stop is not None and at >= stop:
                    break
        return b"".join(found)

    async def fill(self, sink: Sink) -> bool:
        """Put the body into the sink; False where it has more bytes than there is room for."""
        return await fill(sink, self._response, self._pace)

    async def reason(self) -> bytes:
        """The beginning of a body that tells why a request was refused; empty where it breaks off."""
        found = bytearray()
        with contextlib.suppress(aiohttp.ClientError, OSError):  # the status says enough
            async with contextlib.aclosing(self.blocks()) as blocks:
                async for block in blocks:
                    found += block
                    if len(found) >= _LONGEST_REASON:
                        break
        return bytes(found[:_LONGEST_REASON])

"""Sessions of botocore that share what they load, over an HTTP session with bounded responses.

Objects are streamed, and their readers bound them. botocore reads any other response whole: a list, or a refusal.
If reading or parsing a response fails, botocore leaves its connection open; `closing_responses` closes it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Self

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from aiohttp.connector import Connection
from botocore.loaders import create_loader

from tstore.errors import Corrupt

__all__ = ["BoundedSession", "closing_responses", "new_session"]

_LONGEST = 4 << 20  # bytes of a list: a thousand names of 1024 bytes each, all of them escaped
_LONGEST_REFUSAL = 64 << 10

_received: ContextVar[list[aiohttp.ClientResponse] | None] = ContextVar("tstore_kv_s3_received", default=None)


def new_session(profile: str | None) -> Any:
    """Return a session that shares the service descriptions with all others; parsing them takes 0.1 s."""
    session = AioSession(profile=profile)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


_loader = functools.cache(create_loader)


@contextlib.contextmanager
def closing_responses() -> Iterator[None]:
    """Close the connections of responses received in the block that were not read to their end."""
    received: list[aiohttp.ClientResponse] = []
    before = _received.set(received)
    try:
        yield
    finally:
        _received.reset(before)
        for response in received:
            if not response.closed:
                response.close()


class BoundedSession(AIOHTTPSession):  # type: ignore[misc]
    """The session, with responses that are bounded in memory."""

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._response_class = _Bounded  # which a session accepts only when it is made
        return session


class _Bounded(aiohttp.ClientResponse):
    async def start(self, connection: Connection) -> Self:
        """Wait for the head of the response."""
        await super().start(connection)
        if (received := _received.get()) is not None:
            received.append(self)
        return self

    async def read(self) -> bytes:
        """Return the whole body, or the beginning of one that explains a refusal."""
        if self._body is None:
            body = bytearray()
            async for block in self.content.iter_any():
                body += block
                if self.status >= 300 and len(body) > _LONGEST_REFUSAL:
                    self.close()
                    break
                if len(body) > _LONGEST:
                    self.close()
                    raise Corrupt(f"the server sent more than {_LONGEST} bytes; check endpoint_url")
            self._body = bytes(body)
        return self._body

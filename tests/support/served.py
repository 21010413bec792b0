"""A client of a server: requests by aiohttp, and bytes on a raw socket."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp

from tstore.server import Access, Server

MARKER = b'{"format": 1, "uuid": "00000000-0000-4000-8000-000000000000"}'
PACK = "/txn/abc/pack-0-0"
READ, WRITE, ADMIN = "reader-0123456789", "writer-0123456789", "admin-0123456789"


def everybody() -> Access:
    """One token of each scope."""
    return Access({READ: "read", WRITE: "write", ADMIN: "admin"})


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: Any


class Client:
    """Requests with a token, or without."""

    def __init__(self, session: aiohttp.ClientSession, token: str | None = None) -> None:
        self.session = session
        self.token = token

    def with_token(self, token: str | None) -> Client:
        return Client(self.session, token)

    async def __call__(self, method: str, path: str, data: Any = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token is not None:
            named["Authorization"] = f"Bearer {self.token}"
        data = io.BytesIO(data) if isinstance(data, bytes) else data
        async with self.session.request(method, path, data=data, headers=named) as response:
            return Answer(response.status, await response.read(), response.headers)

    async def create(self, path: str, data: Any, **headers: str) -> Answer:
        return await self("PUT", path, data, If_None_Match="*", **headers)


@contextlib.asynccontextmanager
async def client_of(server: Server, token: str | None = None, **options: Any) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(server.url, **options) as session:
        yield Client(session, token)


class Wire:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Sends what the server will take."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(1 << 16):
                received += data
        return received

    async def answer(self) -> tuple[int, bytes]:
        """The status and body of the next answer; 0 where the connection was closed instead."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            body = await self.reader.readexactly(int(fields.get(b"content-length", 0)))
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0, b""
        return int(head.split()[1]), body


@contextlib.asynccontextmanager
async def wire(server: Server) -> AsyncIterator[Wire]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

"""An HTTP server that sends the raw bytes a test gives it, valid HTTP or not."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple


class Request(NamedTuple):
    """A request as received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter


RawResponse = bytes | Callable[[Request], "bytes | Awaitable[bytes | None] | None"]


def ok(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    """Return a valid response; `length` replaces the Content-Length."""
    declared = len(body) if length is None else length
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {declared}", *headers, "", ""]).encode() + body


def part(body: bytes, span: str, *headers: str) -> bytes:
    """Return the response to a range request; `span` is like `0-4/10`."""
    return ok(body, f"Content-Range: bytes {span}", *headers, status="206 Partial Content")


class Server:
    """Answer each request with the next response, and repeat the last one; None closes the connection."""

    def __init__(self, responses: Sequence[RawResponse]) -> None:
        self.responses = list(responses)
        self.requests: list[Request] = []
        self.connections = 0
        self.url = ""
        self.left = asyncio.Event()
        """Set once a client has closed a connection."""
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._respond(reader, writer):
                pass
        writer.close()
        self.left.set()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        response = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        body = b"" if callable(response) else await reader.readexactly(int(headers.get("Content-Length", 0)))
        request = Request(method, path, headers, body, writer)
        self.requests.append(request)
        sent = response(request) if callable(response) else response
        data = sent if sent is None or isinstance(sent, bytes) else await sent
        if data is None:
            return False
        writer.write(data)
        await writer.drain()
        return True

    def end(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def serving(*responses: RawResponse, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Run a server that gives these responses on a port of localhost; its connections end with the block."""
    server = Server(responses)
    tasks: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(server.serve(reader, writer))
        tasks.add(task)

    listener = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=tls)
    server.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        server.end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def hang(request: Request) -> None:
    """Send nothing more, and keep the connection open."""
    await asyncio.Event().wait()


def close(request: Request) -> None:
    """Close the connection without a response."""


def reset(request: Request) -> None:
    """Reset the connection."""
    request.writer.transport.abort()


def then(first: bytes, behave: Callable[[Request], Awaitable[None] | None]) -> RawResponse:
    """Return a response that sends some bytes, and then hangs or closes."""

    async def respond(request: Request) -> None:
        request.writer.write(first)
        await request.writer.drain()
        waiting = behave(request)
        if waiting is not None:
            await waiting

    return respond

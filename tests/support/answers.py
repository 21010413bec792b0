"""A server whose answers are bytes that a test writes down, so that it can say anything."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple


class Request(NamedTuple):
    """What a client asked."""

    method: str
    path: str
    fields: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter


Answer = bytes | Callable[[Request], "bytes | Awaitable[bytes | None] | None"]


def ok(body: bytes, *fields: str, status: str = "200 OK", length: int | None = None) -> bytes:
    """An answer as a server would give it; `length` is what it says of the body."""
    told = len(body) if length is None else length
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {told}", *fields, "", ""]).encode() + body


def part(body: bytes, span: str, *fields: str) -> bytes:
    """The answer to a request for a part: `span` as `0-4/10`."""
    return ok(body, f"Content-Range: bytes {span}", *fields, status="206 Partial Content")


class Server:
    """It answers each request with the next of the answers, the last one again and again; None closes."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)
        self.asked: list[Request] = []
        self.connections = 0
        self.url = ""
        self.left = asyncio.Event()
        """Set once a client has closed a connection."""
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answer(reader, writer):
                pass
        writer.close()
        self.left.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        fields = dict(line.split(": ", 1) for line in head[1:] if line)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        body = b"" if callable(answer) else await reader.readexactly(int(fields.get("Content-Length", 0)))
        request = Request(method, path, fields, body, writer)
        self.asked.append(request)
        said = answer(request) if callable(answer) else answer
        data = said if said is None or isinstance(said, bytes) else await said
        if data is None:
            return False
        writer.write(data)
        await writer.drain()
        return True

    def end(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def serving(*answers: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """A server that gives these answers, on a port of this machine; its connections end with the block."""
    served = Server(answers)
    tasks: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(served.serve(reader, writer))
        tasks.add(task)

    listening = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=tls)
    served.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        listening.close()
        served.end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def hang(request: Request) -> None:
    """Says nothing more, and keeps the connection."""
    await asyncio.Event().wait()


def close(request: Request) -> None:
    """Closes the connection without a word."""


def reset(request: Request) -> None:
    """Breaks the connection."""
    request.writer.transport.abort()


def then(first: bytes, behave: Callable[[Request], Awaitable[None] | None]) -> Answer:
    """Says this, and then hangs or closes."""

    async def answer(request: Request) -> None:
        request.writer.write(first)
        await request.writer.drain()
        waits = behave(request)
        if waits is not None:
            await waits

    return answer

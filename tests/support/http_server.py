"""Test `tstore serve`: a server process, an HTTP client, and a raw connection."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from tests.support.template import Forked
from tstore.core.format.frame import NO_RECORD, Link, check_of, link_of, linked
from tstore.core.format.layout import commit_key
from tstore.core.log.marker import Marker
from tstore.service.server import Access, Server

MARKER = b'{"format": 1, "uuid": "00000000-0000-4000-8000-000000000000"}'
PACK = "/txn/abc/pack-0-0"
LONGEST = 1800
"""The seconds after which a process of `serving` ends by itself."""

READ, WRITE, ADMIN = "reader-0123456789", "writer-0123456789", "admin-0123456789"


def everybody() -> Access:
    """Return an access table with one token per scope."""
    return Access({READ: "read", WRITE: "write", ADMIN: "admin"})


class Response(NamedTuple):
    status: int
    body: bytes
    headers: Any


class Client:
    """An HTTP client that sends requests with a token, or without one."""

    def __init__(self, session: aiohttp.ClientSession, token: str | None = None) -> None:
        self.session = session
        self.token = token

    def with_token(self, token: str | None) -> Client:
        return Client(self.session, token)

    async def __call__(self, method: str, path: str, data: Any = None, **headers: str) -> Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token is not None:
            sent["Authorization"] = f"Bearer {self.token}"
        data = io.BytesIO(data) if isinstance(data, bytes) else data
        async with self.session.request(method, path, data=data, headers=sent) as response:
            return Response(response.status, await response.read(), response.headers)

    async def create(self, path: str, data: Any, **headers: str) -> Response:
        """Create an object; a record without a link gets the one of its place."""
        if path.startswith("/commits/") and data[6:7] == b"R" and link_of(data) == Link():
            data = await self._placed(int(path[9:]), data)
        return await self("PUT", path, data, If_None_Match="*", **headers)

    async def _placed(self, version: int, data: bytes) -> bytes:
        marker, before = await self("GET", "/tstore.json"), await self("GET", f"/{commit_key(version - 1)}")
        if marker.status != 200:
            return data
        check = check_of(before.body) if before.status == 200 else NO_RECORD
        return linked(data, Link(Marker.decode(marker.body).log_id, version - 1, check))


@contextlib.asynccontextmanager
async def client_of(server: Server, token: str | None = None, **options: Any) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(server.url, **options) as session:
        yield Client(session, token)


class Wire:
    """A raw TCP or TLS connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Send as much as the server accepts."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def rest(self) -> bytes:
        """Return everything received until the server closes the connection."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(1 << 16):
                received += data
        return received

    async def response(self) -> tuple[int, bytes]:
        """Return the status and body of the next response, or status 0 if the server closed the connection."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            body = await self.reader.readexactly(int(headers.get(b"content-length", 0)))
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0, b""
        return int(head.split()[1]), body


@contextlib.asynccontextmanager
async def wire(server: Server | Process) -> AsyncIterator[Wire]:
    """Connect to the server."""
    to = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(to.hostname, to.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class Process(NamedTuple):
    """A process of `tstore serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log: IO[bytes]

    @property
    def address(self) -> tuple[str, int]:
        to = urlsplit(self.url)
        return to.hostname or "", to.port or 0

    def logged(self) -> str:
        """Return the log so far."""
        return os.pread(self.log.fileno(), 1 << 20, 0).decode()

    def end(self) -> list[dict[str, Any]]:
        """Stop the process as a service manager does, and return its log entries."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.communicate(timeout=250)[0] == b""
        assert self.process.returncode == 0
        self.log.seek(0)
        return [json.loads(line) for line in self.log]


@contextlib.contextmanager
def serving(
    store: object, *options: str, tokens: str = f"write {WRITE}", stderr: int | None = None, **limits: int
) -> Iterator[Process]:
    """Run a process that serves a store, under resource limits (NOFILE=64), and logs to a file or `stderr`."""
    # the alarm ends the process if the tests are killed before they can do so
    code = f"import resource, signal, sys\nfrom tstore import cli\nsignal.alarm({LONGEST})\n"
    for name, value in limits.items():
        code += f"resource.setrlimit(resource.RLIMIT_{name}, ({value}, {value}))\n"
    arguments = ["serve", store, "--create", *options, "--port", "0", "--json"]
    environment = {**os.environ, "TSTORE_SERVER_TOKENS": tokens}
    with tempfile.TemporaryFile() as log:  # not a pipe, which nobody would read meanwhile
        with Forked(
            f"{code}sys.exit(cli.main())",
            *arguments,
            stdout=subprocess.PIPE,
            stderr=stderr or log,
            env=environment,
        ) as process:
            assert process.stdout is not None
            try:
                yield Process(process, json.loads(process.stdout.readline())["url"], log)
            finally:
                process.kill()

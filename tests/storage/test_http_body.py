"""Long response bodies are received directly into the caller's buffers, whatever the server does."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import trustme

from tests.support.polling import until
from tests.support.raw_http import RawResponse, Request, Server, close, hang, ok, part, reset, serving, then
from tests.support.thresholds import Thresholds
from tstore.core.storage import limits
from tstore.core.storage.http.body import Sink, fill
from tstore.core.storage.http.passes import Passes, Stream
from tstore.core.storage.http.session import tls_context
from tstore.core.storage.http.store import HttpStorage
from tstore.core.storage.limits import Deadline
from tstore.core.storage.remote import as_remote
from tstore.errors import Corrupt, TStoreError, Unavailable

SIZE = 3 << 20
BODY = (
    np.random.default_rng(0).integers(1, 256, SIZE, np.uint8).tobytes()
)  # no zeros, which fill the buffers at first
SPAN = f"0-{SIZE - 1}/{SIZE}"
WHOLE = part(BODY, SPAN)
HALF = WHOLE[: len(WHOLE) - SIZE // 2]


class Place:
    """A server, a client of it, and the TLS context that trusts it."""

    def __init__(self, server: Server, store: HttpStorage, trusted: ssl.SSLContext | None) -> None:
        self.server = server
        self.store = store
        self._trusted = trusted

    def client(self) -> aiohttp.ClientSession:
        """Return a plain aiohttp client that trusts the server."""
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._trusted or True))

    async def read(self, *sizes: int) -> bytes:
        """Read the whole object into buffers of these sizes, and return the bytes."""
        buffers = [bytearray(size) for size in sizes or (SIZE,)]
        await self.store.read("k", 0, buffers, sum(map(len, buffers)))
        return b"".join(buffers)


class Places:
    """Runs servers, with or without TLS."""

    def __init__(self, folder: Path, secure: bool) -> None:
        self._server: ssl.SSLContext | None = None
        self._options: dict[str, Any] = {}
        self._trusted: ssl.SSLContext | None = None
        if secure:
            authority = trustme.CA()
            self._server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            authority.issue_cert("127.0.0.1").configure_cert(self._server)
            authority.cert_pem.write_to_path(str(folder / "ca.pem"))
            self._options["ca_file"] = folder / "ca.pem"
            self._trusted = tls_context(folder / "ca.pem")

    @contextlib.asynccontextmanager
    async def serving(self, *responses: RawResponse) -> AsyncIterator[Place]:
        async with serving(*responses, tls=self._server) as server:
            store = HttpStorage(server.url, **self._options)
            try:
                yield Place(server, store, self._trusted)
            finally:
                await store.close()


@pytest.fixture(params=["http", "https"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Places:
    return Places(tmp_path, request.param == "https")


# ---- complete bodies


@pytest.mark.parametrize(
    "sizes",
    [
        (SIZE,),
        (1, SIZE - 1),
        (SIZE - 1, 1),
        (1 << 20, 1 << 20, 0, 1 << 20),
        (1 << 20, 5, (1 << 20) - 10, 5, 1 << 20),
        (1024,) * (SIZE >> 10),
    ],
)
async def test_a_body_fills_its_buffers_and_its_connection_is_used_again(
    places: Places, sizes: tuple[int, ...]
) -> None:
    async with places.serving(WHOLE) as place:
        for _ in range(3):
            assert await place.read(*sizes) == BODY
        assert place.server.connections == 1


async def test_concurrent_bodies_fill_their_own_buffers(places: Places) -> None:
    def respond(request: Request) -> bytes:
        number = int(request.path[2:])
        return part(BODY[number:] + BODY[:number], SPAN)

    async with places.serving(respond) as place:
        rooms = [bytearray(SIZE) for _ in range(9)]
        await asyncio.gather(*[place.store.read(f"k{i}", 0, [room], SIZE) for i, room in enumerate(rooms)])
        assert [bytes(room) for room in rooms] == [BODY[i:] + BODY[:i] for i in range(9)]


def in_chunks(body: bytes) -> bytes:
    pieces = [body[i : i + 50_000] for i in range(0, len(body), 50_000)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("response", "kept"),
    [
        (WHOLE, True),
        (b"HTTP/1.1 103 Early Hints\r\nLink: </>; rel=preload\r\n\r\n" + WHOLE, True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, True),
        (part(BODY, SPAN, "Connection: close"), False),
        (WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"), False),
        (
            f"HTTP/1.1 206 OK\r\nContent-Range: bytes {SPAN}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            + in_chunks(BODY),
            True,
        ),
        (then(f"HTTP/1.1 206 OK\r\nContent-Range: bytes {SPAN}\r\n\r\n".encode() + BODY, close), False),
    ],
)
async def test_a_body_may_use_any_http_framing(places: Places, response: RawResponse, kept: bool) -> None:
    async with places.serving(response) as place:
        assert await place.read() == BODY
        assert await place.read() == BODY
        assert place.server.connections == (1 if kept else 2)


async def test_a_slow_server_that_goes_on_is_waited_for(places: Places, thresholds: Thresholds) -> None:
    thresholds(IDLE_SECONDS=0.8)
    size = 1 << 20
    response = part(BODY[:size], f"0-{size - 1}/{size}")

    async def drip(request: Request) -> bytes:
        step = len(response) // 8
        for at in range(0, len(response), step):
            request.writer.write(response[at : at + step])
            await asyncio.sleep(0.12)
        return b""

    async with places.serving(drip, response) as place:
        assert await place.read(size) == BODY[:size]
        assert await place.read(size) == BODY[:size]
        assert place.server.connections == 1


async def test_a_long_body_needs_no_extra_memory(places: Places) -> None:
    async def piecewise(request: Request) -> bytes:
        for at in range(0, len(WHOLE), 1 << 16):
            request.writer.write(WHOLE[at : at + (1 << 16)])
            await request.writer.drain()
        return b""

    async with places.serving(piecewise) as place:
        room = bytearray(SIZE)
        await place.store.read("k", 0, [room], SIZE)
        tracemalloc.start()
        try:
            await place.store.read("k", 0, [room], SIZE)
            assert tracemalloc.get_traced_memory()[1] < SIZE // 2  # including the server's memory
        finally:
            tracemalloc.stop()
    room.append(0)  # resizing fails while a buffer is exported


# ---- incomplete bodies


@pytest.mark.parametrize(("behave", "match"), [(close, "broke"), (hang, r"silent for 0\.2 s"), (reset, "broke")])
@pytest.mark.parametrize("begun", [HALF, WHOLE[:-1]])
async def test_a_truncated_body_is_unavailable(
    places: Places, begun: bytes, behave: Any, match: str, thresholds: Thresholds
) -> None:
    thresholds(IDLE_SECONDS=0.2)
    async with places.serving(then(begun, behave), WHOLE) as place:
        with pytest.raises(Unavailable, match=match) as caught:
            await place.read()
        assert f"{place.server.url}: k" in str(caught.value)
        assert await place.read() == BODY
        assert place.server.connections == 2


async def test_a_truncated_body_is_requested_again(places: Places) -> None:
    async with places.serving(then(HALF, close), WHOLE) as place:
        room = bytearray(SIZE)
        await as_remote(place.store).read("k", 0, [room], SIZE)
        assert room == BODY


@pytest.mark.parametrize("sent", [HALF, WHOLE[:-1], WHOLE])
async def test_nothing_is_written_after_a_read_was_cancelled(places: Places, sent: bytes) -> None:
    go_on = asyncio.Event()

    async def halt(request: Request) -> None:
        await go_on.wait()
        with contextlib.suppress(ConnectionError):
            request.writer.write(WHOLE[len(sent) :])
            await request.writer.drain()

    async with places.serving(then(sent, halt), WHOLE) as place:
        room = bytearray(SIZE)
        reading = asyncio.ensure_future(place.store.read("k", 0, [room], SIZE))
        await until(lambda: asyncio.sleep(0, room[SIZE // 4]), reading)
        if sent != WHOLE or not reading.done():  # all may have arrived
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        room[:] = bytes(SIZE)  # the buffer belongs to the caller again
        go_on.set()
        assert await place.read() == BODY  # by then all late bytes have arrived
        assert not any(room)


async def filled(room: bytearray, response: aiohttp.ClientResponse) -> bool:
    async with Deadline(20) as within:
        return await fill(Sink([room]), response, within)


async def test_cancelling_a_read_closes_its_connection(places: Places) -> None:
    go_on, gone = asyncio.Event(), asyncio.Event()

    async def halt(request: Request) -> None:
        await go_on.wait()
        with contextlib.suppress(ConnectionError):
            request.writer.write(WHOLE[len(HALF) :])
            await request.writer.drain()
        gone.set()

    async with places.serving(then(HALF, halt)) as place, place.client() as client:
        async with client.get(place.server.url) as response:  # keeping a reference closes nothing
            room = bytearray(SIZE)
            reading = asyncio.ensure_future(filled(room, response))
            await until(lambda: asyncio.sleep(0, room[SIZE // 4]), reading)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            room[:] = bytes(SIZE)
            go_on.set()
            await gone.wait()
            for _ in range(100):
                await asyncio.sleep(0)
            assert room.count(0) == SIZE
            assert response.connection is None or not response.connection.transport


async def test_nothing_is_written_after_a_timeout(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()

    async def halt(request: Request) -> None:
        await go_on.wait()
        with contextlib.suppress(ConnectionError):
            request.writer.write(WHOLE[len(HALF) :])
            await request.writer.drain()

    async with places.serving(then(HALF, halt), WHOLE) as place:
        room = bytearray(SIZE)
        with monkeypatch.context() as hasty:
            hasty.setattr(limits, "IDLE_SECONDS", 0.2)
            with pytest.raises(Unavailable, match="silent"):
                await place.store.read("k", 0, [room], SIZE)
        room[:] = bytes(SIZE)
        go_on.set()
        assert await place.read() == BODY
        assert not any(room)


@pytest.mark.parametrize("more", [b"x", b"x" * (1 << 20), WHOLE])
async def test_bytes_after_a_body_are_not_taken_for_the_next_response(places: Places, more: bytes) -> None:
    async with places.serving(WHOLE + more, part(BODY[::-1], SPAN)) as place:
        assert await place.read() == BODY
        try:
            body = await place.read()
        except (Corrupt, Unavailable):
            body = await place.read()
        assert body == BODY[::-1]
        assert place.server.connections == 2


@pytest.mark.parametrize(
    "response",
    [
        part(BODY[:-1], SPAN),  # another length than the range
        part(BODY + b"x", SPAN),
        part(BODY, f"1-{SIZE}/{SIZE + 1}"),
        part(BODY, SPAN, "Content-Encoding: gzip"),
        part(BODY, SPAN, "Content-Type: text/html"),
        part(BODY, SPAN, f"Content-Length: {SIZE - 1}"),  # two Content-Length headers
        part(BODY, SPAN, "Transfer-Encoding: chunked"),
        part(BODY, SPAN, *[f"X-{i}: {'x' * 5000}" for i in range(300)]),
        ok(BODY[:-1]),  # not a range, and too short
    ],
)
@pytest.mark.filterwarnings("ignore:.*ignores Range:RuntimeWarning")
async def test_a_body_other_than_the_range_is_refused(places: Places, response: bytes) -> None:
    async with places.serving(response) as place:
        with pytest.raises(TStoreError) as caught:
            await place.read()
        assert type(caught.value) in (Corrupt, Unavailable)


async def test_a_pass_of_another_event_loop_is_not_joined() -> None:
    """As of the parent of a forked child, where the pass goes on no more."""
    passes, started, ended = Passes(), threading.Event(), threading.Event()

    async def stalled(key: str) -> AsyncGenerator[bytes, None]:
        started.set()
        await asyncio.to_thread(ended.wait, 60)
        yield b"other"

    async def blocks(key: str) -> AsyncGenerator[bytes, None]:
        yield b"01234"

    async def read(stream: Stream) -> bytes:
        data = np.zeros(3, np.uint8)
        await passes.read(stream, "pack", 1, [data.data], 3, "pack")
        return data.tobytes()

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(asyncio.run, read(stalled))
        try:
            assert await asyncio.to_thread(started.wait, 60)
            async with asyncio.timeout(50):
                assert await read(blocks) == b"123"
        finally:
            ended.set()
        assert other.result(60) == b"the"

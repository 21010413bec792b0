"""Floods of slow, silent, numerous or aborted requests, beside which honest clients must make progress.

A flood is a coroutine function that runs until it is cancelled. Floods use another local address and another token
than honest clients, so that a server can tell them apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from urllib.parse import urlsplit

from tests.attacks.case import Case, check
from tests.attacks.harness import Harness
from tests.attacks.honest import read_on, save_once
from tests.attacks.scopes import request
from tests.attacks.target import HOSTILE
from tests.support.http_server import Wire

__all__ = ["PLAIN", "TLS", "Flood", "beside", "connected", "crowd"]

SOURCE = "127.0.0.2"
LONG = "txn/long/pack-0"
"""An object longer than the socket buffers of a client that does not read."""

LONG_SIZE = 32 << 20
SECONDS = 4.0
"""The minimum duration of a flood; longer if the machine is too slow for a save and some reads."""

SAVE = 20.0
"""The seconds that a save may take beside a flood; a read may take half of them. More on a slow machine."""

SLOWER = 8.0
"""The allowed slowdown of a save relative to one without a flood, if that is more."""

SAVED = 1_000_000
"""The number of values of a save: 4 MB."""

SETTLED = 1.0
"""The seconds for a flood to reach its full strength before the save begins."""

KEPT = 0.9
LEAST = 3
"""The minimum number of successful reads."""

Flood = Callable[[Harness], Awaitable[None]]


async def beside(harness: Harness, flood: Flood, seconds: float = SECONDS, saved: int = SAVED) -> None:
    """Run a flood, and check that 9 of 10 requests of honest clients succeed and that a save completes.

    A request is a whole restore by tstore's client with its retries (see `read_on`).
    """
    assert harness.sample is not None
    _lay_long_object(harness)
    _allow_files()
    if not harness.usual:
        quiet = await harness.children.run(save_once, harness.site, harness.next_step(), saved, seconds=100)
        check(not quiet.error, f"a save without any flood did not complete: {quiet.error}")
        harness.usual = quiet.seconds
    allowed = max(SAVE, SLOWER * harness.usual)
    reads: asyncio.Queue[tuple[bool, str]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    reading = asyncio.ensure_future(
        harness.children.run(
            read_on,
            harness.site,
            harness.sample.values,
            allowed / 2,
            seconds=3 * allowed + seconds,
            progress=reads.put_nowait,
        )
    )
    flooding: asyncio.Future[None] = loop.create_future()
    outcomes: list[tuple[bool, str]] = []
    try:
        first = await asyncio.wait_for(reads.get(), allowed)
        check(first[0], f"an honest read before the flood fails: {first[1]}")
        began = loop.time()
        flooding = asyncio.ensure_future(flood(harness))
        await asyncio.sleep(SETTLED)
        while not reads.empty():
            reads.get_nowait()
        saving = await harness.children.run(save_once, harness.site, harness.next_step(), saved, seconds=allowed)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(began + allowed + SETTLED):
                while loop.time() < began + seconds or len(outcomes) < LEAST:
                    outcomes.append(await reads.get())
        check(not flooding.done(), f"the flood has ended: {flooding}")
    finally:
        flooding.cancel()
        reading.cancel()
        await asyncio.wait([flooding, reading])
    right = sum(good for good, _ in outcomes)
    harness.requests += max(len(outcomes), 1)
    harness.kept += right
    why = next((message for good, message in outcomes if not good), "none got a response in time")
    check(
        not saving.error, f"a save beside it did not complete: {saving.error}; reads: {right} of {len(outcomes)}"
    )
    check(
        right >= LEAST and right >= KEPT * len(outcomes),
        f"{right} of {len(outcomes)} honest reads succeeded: {why}",
    )


def _lay_long_object(harness: Harness) -> None:
    path = harness.target.place / LONG
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(LONG_SIZE)


def _allow_files() -> None:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# ---- building blocks


async def crowd(count: int, one: Callable[[int], Awaitable[None]]) -> None:
    """Repeat an action in this many tasks, ignoring connection errors."""

    async def again(number: int) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await one(number)
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(again(number))


async def at_rate(rate: float, one: Callable[[], None]) -> None:
    """Repeat an action this many times per second."""
    loop = asyncio.get_running_loop()
    began, done = loop.time(), 0
    while True:
        due = int((loop.time() - began) * rate) - done
        for _ in range(min(due, 100)):
            one()
        done += due  # missed calls are not made up for
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def callers(harness: Harness, kept: int, sent: bytes) -> Iterator[Callable[[], None]]:
    """Yield a function that connects, sends some bytes, and waits; it keeps the newest `kept` connections."""
    to = urlsplit(harness.process.url)
    opened: deque[socket.socket] = deque()

    def call() -> None:
        raw = socket.socket()
        raw.setblocking(False)
        raw.bind((SOURCE, 0))
        raw.connect_ex((to.hostname, to.port))
        opened.append(raw)
        if sent and len(opened) > 20:
            with contextlib.suppress(OSError):
                opened[-20].send(sent)  # connected by now
        if len(opened) > kept:
            opened.popleft().close()

    try:
        yield call
    finally:
        for raw in opened:
            raw.close()


@contextlib.asynccontextmanager
async def connected(harness: Harness) -> AsyncIterator[Wire]:
    """Connect from the address of floods, and abort the connection at the end."""
    async with harness.target.wire(SOURCE) as raw:
        try:
            yield raw
        finally:
            raw.writer.transport.abort()


# ---- slow requests


def _upload(key: str, length: int) -> bytes:
    head = request("PUT", key, b"", HOSTILE, "If-None-Match: *")
    return head.replace(b"Content-Length: 0", b"Content-Length: %d" % length).replace(
        b"Connection: close\r\n", b""
    )


def slow_uploads(count: int, name: str, length: int, piece: int, pause: float) -> Flood:
    """Declare `length` bytes for each of `count` objects, and send a piece after each pause."""

    async def flood(harness: Harness) -> None:
        numbers = itertools.count()

        async def one(_: int) -> None:
            async with connected(harness) as raw:
                await raw.send(_upload(f"txn/slow{next(numbers)}/{name}", length))
                while not raw.reader.at_eof():
                    raw.writer.write(bytes(piece))
                    await raw.writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause):
                            if not await raw.reader.read(1 << 16):
                                return

        await crowd(count, one)

    return flood


async def slow_heads(harness: Harness) -> None:
    """Begin 1,200 requests, and send each one byte by byte."""

    async def one(number: int) -> None:
        await asyncio.sleep(number * 0.002)
        async with connected(harness) as raw:
            await raw.send(b"GET /tstore.json HTTP/1.1\r\nX: ")
            while not raw.reader.at_eof():
                raw.writer.write(b"y")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2):
                        if not await raw.reader.read(1 << 16):
                            return

    await crowd(1200, one)


async def stalled_downloads(harness: Harness) -> None:
    """Request a long object over 300 connections, and read nothing."""

    async def one(_: int) -> None:
        raw = socket.socket()
        try:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            raw.bind((SOURCE, 0))
            to = urlsplit(harness.process.url)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(raw, (to.hostname, to.port))
            await loop.sock_sendall(raw, request("GET", LONG, b"", HOSTILE))
            await asyncio.sleep(60)
        finally:
            raw.close()

    await crowd(300, one)


# ---- silent connections


def silent(rate: float, sent: bytes = b"") -> Flood:
    """Connect `rate` times per second, send little or nothing, and wait."""

    async def flood(harness: Harness) -> None:
        with callers(harness, 3000, sent) as call:
            await at_rate(rate, call)

    return flood


# ---- many requests


def asking(count: int, *requests: bytes) -> Flood:
    """Send requests in turn over `count` kept connections, as fast as the responses come."""

    async def flood(harness: Harness) -> None:
        async def one(_: int) -> None:
            async with connected(harness) as raw:
                for asked in itertools.cycle(requests):
                    raw.writer.write(asked.replace(b"Connection: close\r\n", b""))
                    if asked.startswith(b"HEAD"):
                        await raw.reader.readuntil(b"\r\n\r\n")
                    elif (await raw.response())[0] == 0:
                        return

        await crowd(count, one)

    return flood


async def aborted_downloads(harness: Harness) -> None:
    """Request a long object, read the first bytes, and reset the connection."""

    async def one(_: int) -> None:
        async with connected(harness) as raw:
            await raw.send(request("GET", LONG, b"", HOSTILE))
            await raw.reader.read(1000)

    await crowd(32, one)


async def aborted_uploads(harness: Harness) -> None:
    """Send a part of a pack, and reset the connection."""
    numbers = itertools.count()

    async def one(_: int) -> None:
        async with connected(harness) as raw:
            await raw.send(_upload(f"txn/gone{next(numbers)}/pack-0", 8 << 20) + bytes(300_000))
            await asyncio.sleep(0.05)

    await crowd(16, one)


async def tiny_chunks(harness: Harness) -> None:
    """Send packs in chunks of one byte."""
    numbers = itertools.count()
    chunks = b"1\r\nx\r\n" * 2000

    async def one(_: int) -> None:
        async with connected(harness) as raw:
            head = _upload(f"txn/tiny{next(numbers)}/pack-0", 0)
            await raw.send(head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
            while not raw.reader.at_eof():
                raw.writer.write(chunks)
                await raw.writer.drain()
                await asyncio.sleep(0)

    await crowd(8, one)


async def empty_requests(harness: Harness) -> None:
    """Open 300 connections a second, each for one request."""

    async def one(_: int) -> None:
        async with connected(harness) as raw:
            await raw.send(request("GET", "tstore.json", b"", HOSTILE))
            await raw.rest()

    await crowd(24, one)


# ---- the cases


_HELD = "9 of 10 honest restores succeed, a save of 4 MB completes and is restored, memory and files are bounded"
_GET = request("GET", "tstore.json", b"", HOSTILE)
_HEAD = request("HEAD", "tstore.json", b"", HOSTILE)
_LIST = request("GET", "?list", b"", HOSTILE)
_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32)


def _case(name: str, does: str, flood: Flood) -> Case:
    return Case(name, does, _HELD, lambda harness: beside(harness, flood))


PLAIN = [
    _case(
        "slow packs", "sends 128 packs of 64 MiB at 20 B/s each", slow_uploads(128, "pack-0", 64 << 20, 10, 0.5)
    ),
    _case(
        "slow manifests",
        "declares 100 MiB for each of 4, at 21 kB/s",
        slow_uploads(4, "manifest", 100 << 20, 10500, 0.5),
    ),
    _case("slow small ones", "sends 300 heartbeats slowly", slow_uploads(300, "alive-0", 1000, 1, 1.0)),
    _case("slow heads", "begins 1,200 requests a byte at a time", slow_heads),
    _case("stalled downloads", "requests 300 long objects and reads nothing", stalled_downloads),
    _case("silent connections", "connects 300 times a second and sends nothing", silent(300)),
    _case("new connections", "makes a request on each of many connections", empty_requests),
    _case("GET and HEAD", "sends requests over 64 connections as fast as it can", asking(64, _GET, _HEAD)),
    _case("lists", "lists everything over 16 connections", asking(16, _LIST)),
    _case("requests beyond the limit", "asks over 400 connections", asking(400, _GET)),
    _case("aborted downloads", "breaks off long downloads", aborted_downloads),
    _case("aborted uploads", "breaks off uploads", aborted_uploads),
    _case("tiny chunks", "sends packs in chunks of a byte", tiny_chunks),
]

TLS = [
    _case("silent handshakes", "connects 300 times a second and sends nothing", silent(300)),
    _case("half handshakes", "connects 300 times a second and sends half a hello", silent(300, _HELLO)),
    _case("no handshakes", "connects 300 times a second and sends HTTP", silent(300, _GET)),
    _case(
        "slow packs", "sends 128 packs of 64 MiB at 20 B/s each", slow_uploads(128, "pack-0", 64 << 20, 10, 0.5)
    ),
    _case("GET over TLS", "sends requests over 32 connections as fast as it can", asking(32, _GET)),
]

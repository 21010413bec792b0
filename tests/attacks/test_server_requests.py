"""Hostile requests to a server: it stays up, serves nothing outside its store, and serves the next request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tstore
from tests.attacks import paths, requests
from tests.attacks.requests import HEAD, put
from tests.attacks.target import Target, files, lay_out
from tests.support.http_server import (
    ADMIN,
    MARKER,
    PACK,
    READ,
    WRITE,
    Client,
    Process,
    client_of,
    everybody,
    serving,
    wire,
)
from tests.support.thresholds import Thresholds
from tstore.errors import Denied
from tstore.service.server import Access, Limits, Server
from tstore.service.server.folder import ConfinedStorage


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a store and a secret file beside it."""
    return lay_out(tmp_path)


@pytest.fixture
async def server(place: Path) -> AsyncIterator[Server]:
    limits = Limits(pack_bytes=4 << 20, stall=20, idle=20)
    async with Server(place, access=everybody(), limits=limits) as server:
        yield server


@pytest.fixture
async def target(server: Server, place: Path) -> Target:
    return Target(server, place)


async def still_well(server: Server) -> None:
    async with client_of(server, READ) as client:
        assert (await client("GET", "/txn/old/pack-0")).body == b"committed"


@pytest.mark.parametrize(("run", "argument"), requests.CASES)
async def test_hostile_requests_are_refused(
    target: Target, run: Callable[[Target, Any], Awaitable[None]], argument: Any
) -> None:
    await run(target, argument)


async def test_no_path_leads_out_of_a_server_of_any_name(place: Path) -> None:
    async with Server(place, access=Access({ADMIN: "admin"}), names="any") as server:
        for path in paths.TRAVERSAL:
            await paths.no_path_leads_out(Target(server, place), path, strict=False)


async def test_no_link_leads_out_of_the_store(place: Path, server: Server) -> None:
    (place / "txn" / "linked").symlink_to(place.parent / "outside")
    (place / "txn" / "old" / "pack-1").symlink_to(place.parent / "secret")
    (place / "latest").symlink_to(place.parent / "secret")
    os.mkfifo(place / "txn" / "old" / "pack-2")
    (place / "commits").symlink_to(place.parent / "outside")
    before = files(place.parent)
    async with client_of(server, ADMIN) as client:
        for path in ("/txn/linked/pack-0", "/txn/old/pack-1", "/latest", "/txn/old/pack-2"):
            for method in ("GET", "HEAD", "DELETE"):
                assert (await client(method, path)).status in (204, 403, 404)
        assert (await client.create("/txn/linked/pack-9", b"x")).status == 403
        assert (await client.create(f"/commits/{1:020d}", b"x")).status == 403
        assert (await client.create("/txn/old/pack-1", b"x")).status == 403
        listed = json.loads((await client("GET", "/?list")).body)
        assert [e["key"] for e in listed["entries"]] == ["tstore.json", "txn/old/pack-0"]
        assert (await client("GET", "/?list&prefix=txn/linked/")).status == 403
        assert (await client("PUT", "/latest", b"1")).status == 403
    assert files(place.parent) == before


async def test_the_server_itself_follows_no_link(tmp_path: Path) -> None:
    """Neither to objects that clients ask for nor to those that it reads to check a commit."""
    async with await tstore.open(tmp_path / "store") as store:
        await tstore.save(store, {"w": np.arange(5000.0)}, 1)
    [pack] = (tmp_path / "store").glob("txn/*/pack-*")
    record = tmp_path / "store" / f"commits/{1:020d}"
    storage = ConfinedStorage(tmp_path / "store")
    for path in (pack, record):
        outside = path.rename(tmp_path / "outside")
        path.symlink_to(outside)
        key = str(path.relative_to(tmp_path / "store"))
        for call in (storage.get, storage.head, storage.size, storage.delete):
            with pytest.raises(Denied, match="is a link"):
                await call(key)
        with pytest.raises(Denied, match="is a link"):
            storage.reader(key)
        async with Server(tmp_path / "store", access=everybody()) as server:
            async with client_of(server, WRITE) as client:
                assert (await client("GET", f"/{key}")).status == 403
                again = await client.create(f"/commits/{2:020d}", outside.read_bytes())
            assert again.status in (403, 422)
        path.unlink()
        outside.rename(path)


async def test_a_body_too_long_is_refused_before_it_is_sent(target: Target) -> None:
    await requests.too_long(target, (4 << 20) + 1)


async def test_an_endless_pack_is_cut_off(target: Target) -> None:
    await requests.endless(target, PACK)


async def test_endless_heads_are_bounded(place: Path) -> None:
    """Slowloris: connections that wait forever neither block others nor stay open."""
    limits = Limits(connections=20, idle=0.5)
    async with Server(place, access=everybody(), limits=limits) as server, contextlib.AsyncExitStack() as held:
        slow = [await held.enter_async_context(wire(server)) for _ in range(60)]
        for raw in slow:
            await raw.send(b"GET /tstore.json HTTP/1.1\r\nX: ")
        await still_well(server)
        for raw in slow:
            assert await raw.rest() == b""  # closed by the server


async def test_a_stalled_body_is_given_up(place: Path) -> None:
    before = files(place)
    async with Server(place, access=everybody(), limits=Limits(stall=0.1)) as server, wire(server) as raw:
        await raw.send(put(1000) + b"x" * 999)
        assert (await raw.response())[0] == 408
        assert await raw.rest() == b""
        assert files(place) == before


class Answered(logging.Handler):
    """Sets an event when the server has finished a request."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


async def test_a_stalled_reader_is_disconnected(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tstore.server")
    (place / PACK[1:]).parent.mkdir()
    with open(place / PACK[1:], "wb") as file:
        file.truncate(64 << 20)
    logging.getLogger("tstore.server.access").addHandler(answered := Answered())
    async with Server(place, access=everybody(), limits=Limits(stall=0.1)) as server, wire(server) as raw:
        await raw.send(f"GET {PACK} HTTP/1.1\r\n".encode() + HEAD + b"\r\n")
        await answered.event.wait()
        assert len(await raw.rest()) < 64 << 20
    logging.getLogger("tstore.server.access").removeHandler(answered)


async def test_requests_beyond_the_limit_get_503(place: Path, thresholds: Thresholds) -> None:
    thresholds(_HEAD_START=1 << 40)  # no transfer is ended
    limits = Limits(requests=2, stall=20)
    async with Server(place, access=everybody(), limits=limits) as server, contextlib.AsyncExitStack() as held:
        for i in range(2):
            raw = await held.enter_async_context(wire(server))
            await raw.send(put(10, f"/txn/new/pack-{i}", "Expect: 100-continue"))
            await raw.reader.readuntil(b"\r\n\r\n")
        async with client_of(server, READ) as client:
            busy = await client("GET", "/tstore.json")
            assert (busy.status, busy.headers["Retry-After"]) == (503, "1")
            assert (await client("GET", "/-/health")).status == 200
        await raw.send(b"x" * 10)
        assert (await raw.response())[0] == 201
        await still_well(server)


async def test_racing_creates_of_two_servers_have_one_winner(place: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients: list[Client] = []
        for _ in range(2):
            server = await stack.enter_async_context(Server(place, access=everybody()))
            clients.append(await stack.enter_async_context(client_of(server, WRITE)))
        for i in range(20):
            path = f"/txn/race/pack-{i}"
            bodies = [b"%d" % n * 100 for n in range(8)]
            responses = await asyncio.gather(*[clients[n % 2].create(path, body) for n, body in enumerate(bodies)])
            [winner] = [n for n, response in enumerate(responses) if response.status == 201]
            assert (place / path[1:]).read_bytes() == bodies[winner]


# ---- processes


def test_a_killed_server_has_stored_the_whole_object_or_nothing(place: Path) -> None:
    with serving(place) as served, socket.create_connection(served.address) as raw:
        raw.sendall(put(1000) + b"x" * 100)
        raw.sendall(b"y" * 100)
        exchange(served, put(3, "/txn/new/pack-1") + b"abc", b"HTTP/1.1 201")
        served.process.kill()
        served.process.wait()
    with serving(place) as served:
        exchange(served, f"GET {PACK} HTTP/1.1\r\n".encode() + HEAD + b"\r\n", b"HTTP/1.1 404")
        exchange(served, put(3) + b"abc", b"HTTP/1.1 201")
    assert (place / PACK[1:]).read_bytes() == (place / "txn/new/pack-1").read_bytes() == b"abc"


def test_a_full_disk_and_a_long_pack(place: Path) -> None:
    """If the server can't create files above 40 MiB, the client gets an error and nothing stays."""
    with serving(place, FSIZE=40 << 20) as served:
        exchange(served, put(3, "/txn/new/pack-0") + b"abc", b"HTTP/1.1 201")
        before = high_water(served.process.pid)
        exchange(served, put(39 << 20, "/txn/new/pack-1") + bytes(39 << 20), b"HTTP/1.1 201")
        exchange(served, put(60 << 20, "/txn/new/pack-2") + bytes(60 << 20), b"HTTP/1.1 507")
        assert high_water(served.process.pid) - before < 24 << 20
        exchange(served, put(3, "/txn/new/pack-2") + b"abc", b"HTTP/1.1 201")
    assert sorted(p.name for p in (place / "txn" / "new").iterdir()) == ["pack-0", "pack-1", "pack-2"]


def test_more_connections_than_descriptors_are_survived(place: Path) -> None:
    with serving(place, NOFILE=96) as served, contextlib.ExitStack() as held:
        for _ in range(150):
            held.enter_context(socket.create_connection(served.address, timeout=60))
        for _ in range(3):
            exchange(served, b"GET /tstore.json HTTP/1.1\r\n" + HEAD + b"\r\n", b"HTTP/1.1 200")
        assert [line["status"] for line in served.end()] == [200] * 3


def high_water(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def exchange(served: Process, request: bytes, expected: bytes) -> None:
    with socket.create_connection(served.address, timeout=60) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(request)
        assert raw.recv(1 << 16).startswith(expected)


class Fuzzed(NamedTuple):
    served: Process
    place: Path


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    """A server process, which must be as healthy at the end as at the beginning."""
    place = tmp_path_factory.mktemp("fuzzed")
    (place / "tstore.json").write_bytes(MARKER)
    with serving(place) as served:
        yield Fuzzed(served, place)
        logged = served.end()
    assert [e for e in logged if e["level"] not in ("info", "warning") or e.get("status", 0) >= 500] == []
    assert WRITE not in str(logged)
    assert [k for k in files(place) if not k.startswith(("txn/", "commits/", "latest", "tstore.json"))] == []


ANY = st.binary(max_size=40)
VISIBLE = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20).map(str.encode)
METHODS = st.sampled_from([b"GET", b"HEAD", b"PUT", b"PUT", b"DELETE", b"POST", b"OPTIONS", b"CONNECT", b"TRACE"])
KEYS = st.sampled_from(
    [
        b"/tstore.json", b"/latest", b"/?list", b"/?list&prefix=", b"/?list&limit=", b"/?list&after=", b"/",
        b"/commits/00000000000000000001", b"/roots/00000000000000000064", PACK.encode(), b"/txn/abc/manifest-0",
        b"/txn/abc/part-00000-of-00001", b"/txn/abc/alive-00000-of-00001", b"/-/health",
    ]
)  # fmt: skip
PATHS = KEYS | st.tuples(KEYS, VISIBLE).map(b"".join)
NUMBERS = st.integers(-9, 1 << 70).map(lambda n: str(n).encode())
RANGES = st.builds(lambda a, b: b"Range: bytes=" + a + b"-" + b, NUMBERS | st.just(b""), NUMBERS | st.just(b""))
NAMES = st.sampled_from(
    [
        b"Range", b"If-Range", b"If-Match", b"If-None-Match", b"If-Modified-Since", b"Content-Length", b"Host",
        b"Transfer-Encoding", b"Connection", b"Upgrade", b"Expect", b"Content-Encoding", b"Authorization",
        b"X-TStore-XXH3", b"Content-Type", b"Content-Range", b"Cookie",
    ]
)  # fmt: skip
VALUES = VISIBLE | NUMBERS | st.sampled_from([b"*", b"chunked", b"close", b"upgrade", b"100-continue", b"gzip"])
FIELDS = st.tuples(NAMES, VALUES).map(lambda f: f[0] + b": " + f[1]) | RANGES | st.just(b"If-None-Match: *")


@st.composite
def requested(draw: st.DrawFn) -> bytes:
    """Return a request that is more or less well-formed."""
    body = draw(st.sampled_from([b"", MARKER, b"1", b"5\r\nabcde\r\n0\r\n\r\n"]) | ANY)
    head = [draw(METHODS) + b" " + draw(PATHS) + b" HTTP/1.1", HEAD[:-2], *draw(st.lists(FIELDS, max_size=3))]
    if draw(st.integers(0, 3)):
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*head, b"", body])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(requested() | requested() | ANY, min_size=1, max_size=3).map(b"".join))
def test_fuzzed_requests(fuzzed: Fuzzed, sent: bytes) -> None:
    with socket.create_connection(fuzzed.served.address, timeout=60) as raw:
        raw.settimeout(0.02)  # the server may wait for the rest of an incomplete request
        with contextlib.suppress(ConnectionError, TimeoutError):
            raw.sendall(sent)
            while raw.recv(1 << 16):
                pass
    with socket.create_connection(fuzzed.served.address, timeout=60) as raw:
        raw.sendall(b"GET /tstore.json HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n")
        response = b""
        while data := raw.recv(1 << 16):
            response += data
        assert response.endswith(MARKER)

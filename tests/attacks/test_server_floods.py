"""Slow, silent and senseless clients: honest ones beside them are served, and their cost is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import trustme

import tstore
from tests.support.forging import forged
from tests.support.http_server import MARKER, PACK, READ, WRITE, Client, Wire, client_of, everybody, serving, wire
from tests.support.thresholds import Thresholds
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.checksums import block_checks
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.tree import Tree
from tstore.core.format.tree.validation import Steps, check_chunks, next_tree
from tstore.service.server import Access, Certificate, Limits, Server
from tstore.service.server.quotas import Shares, Turns
from tstore.service.server.responses import Refused
from tstore.service.server.transfers import Transfer, Transfers

HEAD = b"Host: 127.0.0.1\r\nAuthorization: Bearer " + WRITE.encode() + b"\r\n"
TREE = {"w": np.arange(300_000, dtype=np.float32)}


def put(path: str, length: int) -> bytes:
    return f"PUT {path} HTTP/1.1\r\n".encode() + HEAD + b"If-None-Match: *\r\nContent-Length: %d\r\n\r\n" % length


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "folder" else f"memory://floods-{tmp_path}"


@pytest.fixture
def impatient(thresholds: Thresholds) -> None:
    """Let servers end slow transfers soon after they began, instead of after two seconds."""
    thresholds(_HEAD_START=16 << 10, _MIN_PACE=64 << 20)


@contextlib.asynccontextmanager
async def slow_uploads(server: Server, count: int, length: int, kind: str = "pack") -> AsyncIterator[list[Wire]]:
    """Begin uploads that each send a little twenty times a second."""
    async with contextlib.AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(wire(server)) for _ in range(count)]
        for i, raw in enumerate(slow):
            await raw.send(put(f"/txn/slow/{kind}-{i}", length) + b"x" * 100)

        async def trickle() -> None:
            while True:
                for raw in slow:
                    await raw.send(b"x" * 50)
                await asyncio.sleep(0.05)

        trickling = asyncio.ensure_future(trickle())
        try:
            yield slow
        finally:
            trickling.cancel()
            await asyncio.wait([trickling])


async def save(server: Server, step: int = 1) -> None:
    async with await tstore.open(server.url, storage_options={"token": WRITE}) as store:
        await tstore.save(store, TREE, step)
        assert (np.asarray((await tstore.restore(store, step))["w"]) == TREE["w"]).all()


# ---- slow bodies


@pytest.mark.parametrize("count", [8, 128])
async def test_slow_packs_block_nobody(place: str, count: int) -> None:
    async with Server(place, access=everybody()) as server, slow_uploads(server, count, 16 << 20):
        async with asyncio.timeout(60):
            await save(server)


@pytest.mark.usefixtures("impatient")
async def test_slow_packs_that_take_every_slot_are_aborted(place: str) -> None:
    """With more of them than concurrent requests, the slowest are aborted with 503 and may retry."""
    async with Server(place, access=everybody(), limits=Limits(requests=12)) as server:
        async with slow_uploads(server, 30, 16 << 20) as slow, asyncio.timeout(60):
            await save(server)
            for response in asyncio.as_completed([raw.response() for raw in slow[:12]]):
                if (status := (await response)[0]) == 503:
                    break
                # this client went on sending, which can reset the connection before it has read the response
                assert status == 0


@pytest.mark.usefixtures("impatient")
async def test_requests_without_permission_abort_no_upload(place: str) -> None:
    async with Server(place, access=everybody(), limits=Limits(requests=2)) as server:
        async with slow_uploads(server, 2, 16 << 20) as slow, client_of(server) as stranger:
            ended = [asyncio.ensure_future(raw.response()) for raw in slow]
            await asyncio.wait(ended, timeout=0.5)  # by then one would have been aborted
            for _ in range(5):
                assert (await stranger("GET", "/latest")).status == 401
            assert not (await asyncio.wait(ended, timeout=0.2))[0]
            assert (await stranger.with_token(READ)("GET", "/latest")).status == 404
            assert len((await asyncio.wait(ended, return_when="FIRST_COMPLETED"))[0]) == 1
            [last] = [answering for answering in ended if not answering.done()]
            last.cancel()


async def test_a_slow_long_manifest_blocks_nobody(place: str) -> None:
    async with Server(place, access=everybody()) as server:
        async with slow_uploads(server, 8, 100 << 20, "manifest"), client_of(server, WRITE) as client:
            async with asyncio.timeout(60):
                response = await client.create("/txn/abc/manifest-0", b"x" * (3 << 20))
                assert response.status == 422
                await save(server)


async def test_a_body_needs_a_minimum_average_rate(place: str) -> None:
    """Each piece comes in time, but the whole would take forever."""
    limits = Limits(stall=0.5, rate=1 << 20)
    async with Server(place, access=everybody(), limits=limits) as server, asyncio.timeout(60):
        async with wire(server) as raw:
            await raw.send(put(PACK, 1 << 30) + b"x" * (1 << 20))
            answering = asyncio.ensure_future(raw.response())
            while not answering.done():
                await raw.send(b"x" * (20 << 10))
                await asyncio.sleep(0.05)
            status, body = await answering
            assert status in (0, 408)
            assert status == 0 or "1048576 bytes/s" in json.loads(body)["error"]


@pytest.mark.usefixtures("impatient")
async def test_slow_readers_are_aborted_for_others(place: str) -> None:
    async with Server(place, access=everybody(), limits=Limits(requests=4)) as server:
        await save(server)
        async with client_of(server, WRITE) as client, contextlib.AsyncExitStack() as stack:
            assert (await client.create(PACK, bytes(32 << 20))).status == 201
            for _ in range(4):
                raw = await stack.enter_async_context(wire(server))
                await raw.send(f"GET {PACK} HTTP/1.1\r\n".encode() + HEAD + b"\r\n")
                assert await raw.reader.readexactly(17) == b"HTTP/1.1 200 OK\r\n"
            async with asyncio.timeout(60):
                await save(server, 2)


async def test_a_reader_must_receive_each_mebibyte_in_time(tmp_path: Path) -> None:
    """Each MiB of progress counts, however much one system call sends."""
    size = 30 << 20
    async with Server(tmp_path, access=everybody(), limits=Limits(stall=2, rate=1 << 10)) as server:
        async with client_of(server, WRITE) as client:
            assert (await client.create(PACK, bytes(size))).status == 201
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            raw.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(raw, ("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            await loop.sock_sendall(raw, f"GET {PACK} HTTP/1.1\r\n".encode() + HEAD + b"\r\n")
            received = told = 0
            while received < size and (data := await loop.sock_recv(raw, 64 << 10)):
                received += len(data)
                if received - told > 1 << 20:
                    told = received
                    await asyncio.sleep(0.08)
            assert received >= size


async def test_a_request_that_waits_for_memory_gets_503(tmp_path: Path) -> None:
    """A complete body waits for memory only for a limited time."""
    limits = Limits(wait=0.1)
    async with Server(tmp_path, access=everybody(), limits=limits) as server, client_of(server, WRITE) as client:
        responses = await asyncio.gather(
            *[client.create(f"/txn/abc/manifest-{i}", b"x" * (60 << 20)) for i in range(5)]
        )
        assert {a.status for a in responses} <= {422, 413, 503}
        assert all("Retry-After" in a.headers for a in responses if a.status == 503)


async def test_a_token_is_one_client_however_it_is_spelled(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one token would be many clients, each with a share of its own."""
    clients: list[object] = []
    track = Transfers.track

    def noted(transfers: Transfers, client: Hashable) -> contextlib.AbstractContextManager[Transfer]:
        clients.append(client)
        return track(transfers, client)

    monkeypatch.setattr(Transfers, "track", noted)
    access = Access({READ: "read", WRITE: "write"}, anonymous="read")

    async def clients_of(*spellings: str) -> set[object]:
        clients.clear()
        for spelling in spellings:
            async with wire(server) as raw:
                await raw.send(f"GET /tstore.json HTTP/1.1\r\nHost: localhost\r\n{spelling}\r\n".encode())
                assert (await raw.response())[0] == 200
        assert len(clients) == len(spellings)
        return set(clients)

    async with Server(place, access=access) as server:
        await save(server)
        spaces = [f"Authorization: Bearer{n * ' '}{WRITE}\r\n" for n in (1, 2, 99)]
        cases = [f"Authorization: {kind} {WRITE}\r\n" for kind in ("bearer", "BEARER", "Bearer \t")]
        writer = await clients_of(*spaces, *cases, f"Authorization: Bearer {WRITE}  \r\n")
        reader = await clients_of(f"Authorization: Bearer {READ}\r\n")
        nobody = await clients_of("", "Cookie: 1\r\n")
    assert [len(each) for each in (writer, reader, nobody)] == [1, 1, 1]
    assert len(writer | reader | nobody) == 3


async def test_shares_go_to_the_client_with_the_least() -> None:
    shares, served = Shares(10, 0.2, "a turn"), list[str]()

    async def claim(client: str, size: int) -> None:
        async with shares.claim(client, size):
            served.append(client)

    async with asyncio.timeout(20):
        async with shares.claim("greedy", 7):
            waiting = [asyncio.ensure_future(claim("greedy", 5)) for _ in range(3)]
            waiting.append(asyncio.ensure_future(claim("modest", 2)))
            waiting.append(asyncio.ensure_future(claim("modest", 99)))
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.wait(waiting[:1])
        await asyncio.gather(*waiting[1:])
        assert served[0] == "modest"
        assert sorted(served) == ["greedy", "greedy", "modest", "modest"]
        async with shares.claim("anybody", 10):  # no share was lost
            with pytest.raises(Refused, match="a turn") as refused:
                await claim("other", 1)
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "5")
        await claim("other", 10)


async def test_equal_clients_are_served_in_turn_however_many_requests_each_has() -> None:
    shares, served = Shares(1, 20, "a turn"), list[str]()

    async def claim(client: str, times: int) -> None:
        for _ in range(times):
            async with shares.claim(client, 1):
                served.append(client)
                await asyncio.sleep(0)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(claim("many", 1))
        group.create_task(claim("few", 5))
        group.create_task(claim("other", 5))
    last = [index for index, client in enumerate(served) if client != "many"][-1]
    assert last <= 16, served


async def test_work_in_steps_ends_when_its_request_is_cancelled() -> None:
    turns, made = Turns(20), list[int]()

    def steps() -> Steps[str]:
        for step in itertools.count():
            made.append(step)
            yield
        return "never"

    async with asyncio.timeout(20):
        endless = asyncio.ensure_future(turns.complete("many", steps()))
        assert await turns.run("few", len, "abc") == 3
        endless.cancel()
        await asyncio.wait([endless])
    assert endless.cancelled()
    assert made == list(range(len(made)))


def test_large_metadata_is_checked_in_steps() -> None:
    documents = [ArrayMeta.new((length,), "f4", (1,)).document for length in range(1, 4000)]
    manifest = Manifest.from_nodes([(f"n{i}", document, True, ()) for i, document in enumerate(documents)])
    packed = ChunkTable.from_rows([ChunkRow(i, b"x", 0, 1, block_checks(b"x")) for i in range(40_000)])
    inline = Manifest.from_nodes([("w", ArrayMeta.new((40_000,), "u1", (1,)).document, True, [packed])])
    record = Record("t", 0, 1.0, manifests=(manifest,))
    assert len(list(next_tree(1, record, [manifest], Tree.empty()))) > 4
    assert len(list(check_chunks([inline]))) == 2


# ---- connections


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificate, ssl.SSLContext]:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    made.private_key_pem.write_to_path(folder / "key.pem")
    for blob in made.cert_chain_pems:
        blob.write_to_path(folder / "cert.pem", append=True)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return Certificate(str(folder / "cert.pem"), str(folder / "key.pem")), trusting


def memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize(
    "first", [b"", b"\x16\x03\x01\x02", b"GET / HTTP/1.1\r\n\r\n"], ids=["silent", "begun", "plain"]
)
async def test_endless_handshakes_are_bounded(
    tmp_path: Path, certificate: tuple[Certificate, ssl.SSLContext], first: bytes
) -> None:
    """They count from when they are accepted; the oldest one is closed for a new one."""
    (cert, key), trusting = certificate
    options = ("--tls-cert", cert, "--tls-key", key, "--connections", "100")
    with serving(tmp_path / "store", *options) as served:
        address = served.url.removeprefix("https://").split(":")
        before, most, size = open_files(served.process.pid), 0, memory(served.process.pid)
        connector = aiohttp.TCPConnector(ssl=trusting)
        async with aiohttp.ClientSession(served.url, connector=connector) as session, asyncio.timeout(120):
            client = Client(session, WRITE)
            silent: list[asyncio.StreamWriter] = []
            for i in range(600):
                _, writer = await asyncio.open_connection(address[0], int(address[1]))
                writer.write(first)
                silent.append(writer)
                if i % 50 == 49:
                    most = max(most, open_files(served.process.pid) - before)
                    assert (await client("GET", "/latest")).status == 404
            async with aiohttp.ClientSession(served.url, connector=aiohttp.TCPConnector(ssl=trusting)) as other:
                assert (await Client(other, WRITE).create(PACK, b"abc")).status == 201
            for writer in silent:
                writer.transport.abort()
        assert most < 130
        assert memory(served.process.pid) - size < 96 << 20
        lines = served.end()
    said = [line for line in lines if line["log"] != "tstore.server.access"]
    assert len(said) < 30, said[:3]
    assert not [line for line in said if line["level"] == "error"], said


Flood = Callable[[Wire, int], Awaitable[Any]]


async def silent(raw: Wire, number: int) -> None:
    await raw.rest()


async def asking(raw: Wire, number: int) -> None:
    while not raw.reader.at_eof():
        await raw.send(b"GET /tstore.json HTTP/1.1\r\n" + HEAD + b"\r\n")
        await raw.response()


async def slow_pack(raw: Wire, number: int) -> None:
    await raw.send(put(f"/txn/slow{number}/pack-0", 64 << 20))
    while not raw.reader.at_eof():
        await raw.send(b"x" * 10)
        await asyncio.sleep(0.5)


async def heavy_manifest(raw: Wire, number: int) -> None:
    """Send a manifest that takes a second to check, and is refused for its last node."""
    body = many_nodes(200_000)
    await raw.send(put(f"/txn/heavy{number}/manifest", len(body)) + body)
    assert (await raw.response())[0] in (0, 422, 503)


@functools.cache
def many_nodes(count: int) -> bytes:
    """Return the frame of a manifest whose last node is listed twice."""
    names = [f"n{i:06}" for i in range(count)]
    return forged(Manifest.from_nodes([(n, b"%d" % i, True, ()) for i, n in enumerate([*names, names[-1]])]))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("flood", "count"), [(silent, 1500), (asking, 400), (slow_pack, 128), (heavy_manifest, 24)]
)
async def test_honest_clients_go_on_beside_a_flood(tmp_path: Path, flood: Flood, count: int) -> None:
    """Of a server process, whose memory and open files are bounded."""
    with serving(tmp_path / "store", tokens=f"write {WRITE}\nwrite honest-0123456789") as served:
        store = await tstore.open(served.url, storage_options={"token": "honest-0123456789"})
        await tstore.save(store, TREE, 0)

        async def again(number: int) -> None:
            while True:
                with contextlib.suppress(ConnectionError):
                    async with wire(served) as raw:
                        await flood(raw, number)
                await asyncio.sleep(0.02)

        flooding = [asyncio.ensure_future(again(number)) for number in range(count)]
        for step in range(1, 4):
            await asyncio.sleep(1)
            async with asyncio.timeout(60):
                await tstore.save(store, TREE, step)
                assert (np.asarray((await tstore.restore(store, step))["w"]) == TREE["w"]).all()
        assert not any(task.done() for task in flooding)
        assert memory(served.process.pid) < 640 << 20
        assert open_files(served.process.pid) < 1536
        for task in flooding:
            task.cancel()
        await asyncio.wait(flooding)
        await store.close()


async def test_the_oldest_handshake_is_closed_for_a_new_connection(
    tmp_path: Path, certificate: tuple[Certificate, ssl.SSLContext]
) -> None:
    """At most half of the connections may be in a handshake."""
    tls, trusting = certificate
    limits = Limits(connections=10)
    async with (
        Server(tmp_path, access=everybody(), certificate=tls, limits=limits) as server,
        contextlib.AsyncExitStack() as stack,
        asyncio.timeout(60),
    ):
        silent = [await stack.enter_async_context(wire(server)) for _ in range(20)]
        connector = aiohttp.TCPConnector(ssl=trusting)
        async with client_of(server, WRITE, connector=connector) as client:
            assert (await client("GET", "/latest")).status == 404
        closed = [raw.reader.at_eof() for raw in silent]
        assert all(closed[:15])
        assert not any(closed[18:])


async def test_active_connections_survive_a_flood_of_silent_ones(tmp_path: Path) -> None:
    limits = Limits(connections=10, idle=60)
    async with Server(tmp_path, access=everybody(), limits=limits) as server, contextlib.AsyncExitStack() as stack:
        honest = await stack.enter_async_context(wire(server))
        stranger = await stack.enter_async_context(wire(server))
        for _ in range(3):
            await honest.send(b"GET /latest HTTP/1.1\r\n" + HEAD + b"\r\n")
            assert (await honest.response())[0] == 404
            await stranger.send(b"GET /latest HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await stranger.response())[0] in (0, 401)
            for _ in range(30):
                await stack.enter_async_context(wire(server))
        for _ in range(10):  # refused clients are closed before served ones
            raw = await stack.enter_async_context(wire(server))
            await raw.send(b"GET /latest HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await raw.response())[0] == 401
        await honest.send(b"GET /latest HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert (await honest.response())[0] == 404


async def test_a_client_that_reads_no_response_is_disconnected(tmp_path: Path) -> None:
    """Many small responses that nobody reads: the queued bytes are bounded, and the connection ends in time."""
    (tmp_path / "tstore.json").write_bytes(MARKER)
    (tmp_path / "txn" / "abc").mkdir(parents=True)
    for i in range(1000):
        (tmp_path / "txn" / "abc" / f"pack-{i}-{'x' * 150}").touch()
    async with Server(tmp_path, access=everybody(), limits=Limits(stall=0.3, idle=0.3)) as server:
        async with wire(server) as raw, asyncio.timeout(60):
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await raw.send((b"GET /?list HTTP/1.1\r\n" + HEAD + b"\r\n") * 100)
            while not raw.writer.transport.is_closing():
                await raw.send(b"GET /?list HTTP/1.1\r\n" + HEAD + b"\r\n")
                await asyncio.sleep(0.05)

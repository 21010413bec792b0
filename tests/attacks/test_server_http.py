"""Odd but complete requests, and the remains of aborted clients and servers: pipelines, tiny chunks, uploads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from tests.support.http_server import (
    ADMIN,
    MARKER,
    PACK,
    READ,
    WRITE,
    Client,
    Wire,
    client_of,
    everybody,
    serving,
    wire,
)
from tests.support.polling import blocking_until
from tests.support.thresholds import Thresholds
from tstore.core.storage.local.store import LocalStorage
from tstore.errors import InvalidArgument, StorageFull
from tstore.service.server import Access, Limits, Server

HEAD = b"Host: 127.0.0.1\r\nAuthorization: Bearer " + WRITE.encode() + b"\r\n"
GET = b"GET /tstore.json HTTP/1.1\r\n" + HEAD + b"\r\n"
CHUNKED = f"PUT {PACK} HTTP/1.1\r\n".encode() + HEAD + b"If-None-Match: *\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "store"
    (place / "txn" / "abc").mkdir(parents=True)
    (place / "tstore.json").write_bytes(MARKER)
    return place


def memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


# ---- requests that a proxy may understand differently


AMBIGUOUS = {
    "two hosts": b"GET /tstore.json HTTP/1.1\r\n" + HEAD + b"Host: evil.example\r\n\r\n",
    "two tokens": b"GET /tstore.json HTTP/1.1\r\n" + HEAD + b"Authorization: Bearer 0123456789abcdef\r\n\r\n",
    "chunks in HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0").replace(
        b"Host", b"Connection: keep-alive\r\nHost"
    )
    + b"1\r\nx\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("request_", AMBIGUOUS.values(), ids=AMBIGUOUS)
async def test_ambiguous_requests_are_refused_and_end_the_connection(place: Path, request_: bytes) -> None:
    async with Server(place, access=everybody()) as server, wire(server) as raw:
        await raw.send(request_ + GET)
        async with asyncio.timeout(60):
            received = await raw.rest()
    assert received.split()[1] == b"400"
    assert received.count(b"\r\nServer: ") == 1
    assert files(place) == ["tstore.json"]


# ---- requests without a token


@pytest.mark.parametrize("access", [Access(anonymous="write"), Access({WRITE: "write"}, anonymous="read")])
async def test_other_host_names_are_refused_without_a_token(place: Path, access: Access) -> None:
    async with Server(place, access=access, hostnames=["Store.example"]) as server, client_of(server) as client:
        for host in ("127.0.0.1", "localhost:1", "[::1]:8080", "store.example:443", "STORE.EXAMPLE"):
            assert (await client("GET", "/tstore.json", Host=host)).status == 200
        for host in ("evil.example", "evil.example:80", "localhost.evil.example", "store.example.evil.example"):
            response = await client("GET", "/tstore.json", Host=host)
            assert (response.status, b"--hostname" in response.body) == (403, True)
            assert (await client("GET", "/?list", Host=host)).status == 403
        named = await client.with_token(WRITE)("GET", "/tstore.json", Host="any.example")
        assert named.status == (200 if access.token_count else 401)


# ---- conditions and entity tags


async def test_unknown_conditions_are_refused(place: Path) -> None:
    async with Server(place, access=everybody()) as server, client_of(server, ADMIN) as client:
        for name in ("If_Match", "If_Unmodified_Since", "if_match"):
            assert (await client("PUT", "/latest", b"1", **{name: "*"})).status == 400
            assert (await client.create(PACK, b"abc", **{name: "*"})).status == 400
            assert (await client("DELETE", PACK, **{name: "*"})).status == 400
        assert (await client("DELETE", PACK, If_None_Match="*")).status == 400
        assert not (place / PACK[1:]).exists()


@pytest.mark.parametrize("kind", ["folder", "memory"])
@pytest.mark.parametrize("size", [10, 3 << 20])
async def test_an_entity_tag_identifies_one_content(tmp_path: Path, kind: str, size: int) -> None:
    place = str(tmp_path / "any") if kind == "folder" else f"memory://tags-{tmp_path}"
    async with Server(place, access=everybody(), names="any") as server, client_of(server, WRITE) as client:
        tags: dict[str, bytes] = {}
        for i in range(30):
            body = b"%02d" % i * (size // 2)
            assert (await client("PUT", "/some/name", body)).status == 204
            response = await client("GET", "/some/name")
            assert response.body == body
            if tag := response.headers.get("ETag"):
                assert tags.setdefault(tag, body) == body
                assert (await client("GET", "/some/name", If_None_Match=tag)).status == 304
            assert (await client("GET", "/some/name", If_Range='"x"', Range="bytes=0-1")).status == 200
            assert (await client("GET", "/some/name", If_Match='"x"')).status == 412
        assert size > 1 << 20 or len(tags) == 30


# ---- remains of clients and servers


async def test_a_client_that_leaves_after_100_continue_is_not_logged_as_a_fault(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"PUT {PACK} HTTP/1.1\r\n".encode() + HEAD + b"If-None-Match: *\r\nContent-Length: 9\r\n"
    async with Server(place, access=everybody()) as server:
        for _ in range(40):
            async with wire(server) as raw:
                await raw.send(head + b"Expect: 100-continue\r\n\r\n")
                raw.writer.transport.abort()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert files(place) == ["tstore.json"]


def test_the_next_server_removes_what_a_killed_one_left(place: Path) -> None:
    other = place / ".0123456789abcdef.0123456789abcdef.tmp"
    other.write_bytes(b"what a save beside the server is writing")
    with serving(place) as served, serving(place) as beside:
        with socket.create_connection(served.address) as raw, socket.create_connection(beside.address) as alive:
            for connection, path in ((raw, PACK), (alive, f"{PACK}1")):
                connection.sendall(
                    f"PUT {path} HTTP/1.1\r\n".encode() + HEAD + b"If-None-Match: *\r\nContent-Length: 2000000\r\n"
                )
                connection.sendall(b"\r\n" + b"x" * 1_400_000)
            blocking_until(lambda: [bool(p.stat().st_size) for p in place.rglob(".upload*.tmp")] == [True] * 2)
            served.process.kill()
            served.process.wait()
            with serving(place):
                assert len(list(place.rglob(".upload*.tmp"))) == 1
                assert other.exists()
                alive.sendall(b"x" * 600_000)
                assert alive.recv(100).startswith(b"HTTP/1.1 201")
    assert files(place) == sorted([other.name, f"{PACK[1:]}1", "tstore.json"])


async def test_a_failed_hint_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageFull):
        await LocalStorage(tmp_path).replace("latest", b"1")
    assert files(tmp_path) == []


# ---- token files


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "long"])
def test_invalid_token_files_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokens"
    if kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(0o700)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"#" * (2 << 20))
        path.chmod(0o600)
    with pytest.raises(InvalidArgument, match="SCOPE TOKEN"):
        Access.read(path)


def test_the_group_may_read_a_token_file_of_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"read {READ}\n")
    path.chmod(0o440)
    if os.stat(path).st_uid:
        pytest.skip("needs a file of root's")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Access.read(path).token_count == 1


async def test_a_fifo_in_place_of_the_token_file_blocks_nothing(place: Path) -> None:
    tokens = place.parent / "tokens"
    tokens.write_text(f"write {WRITE}\n")
    tokens.chmod(0o600)
    with serving(place, "--token-file", str(tokens)) as served:
        async with aiohttp.ClientSession(served.url) as session, asyncio.timeout(30):
            client = Client(session, WRITE)
            tokens.unlink()
            os.mkfifo(tokens, 0o600)
            served.process.send_signal(signal.SIGHUP)
            while "the current tokens are kept" not in served.logged():
                assert (await client("GET", "/tstore.json")).status == 200


# ---- odd requests


async def test_pipelined_requests_are_served_in_turn_and_cost_little(place: Path) -> None:
    count = 1000
    with serving(place) as served:
        before = memory(served.process.pid)
        reader, writer = await asyncio.open_connection(*served.address)
        sending = asyncio.ensure_future(_send(writer, GET * count))
        async with asyncio.timeout(60):
            for _ in range(count):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                assert await reader.readexactly(len(MARKER)) == MARKER
        await sending
        assert memory(served.process.pid) - before < 32 << 20
        writer.close()


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()


@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"2\r\nxy\r\n", b"1;a=b\r\nx\r\n"])
async def test_bodies_of_tiny_chunks_are_refused_early(place: Path, chunk: bytes) -> None:
    """A body of tiny chunks is refused before it costs much, repeatedly, and other clients do not wait."""
    count = 200_000
    with serving(place) as served:
        before = memory(served.process.pid)
        reader, writer = await asyncio.open_connection(*served.address)
        async with aiohttp.ClientSession(served.url) as session, asyncio.timeout(60):
            writer.write(CHUNKED)
            sending = asyncio.ensure_future(_send(writer, chunk * count + b"0\r\nTrailer: x\r\n\r\n"))
            answering = asyncio.ensure_future(Wire(reader, writer).response())
            while not answering.done():
                assert (await Client(session, WRITE)("GET", "/tstore.json")).status == 200
            assert (await answering)[0] in (0, 400)  # 0: the connection ended before the response was read
            await sending
        assert memory(served.process.pid) - before < 48 << 20
        writer.close()
    assert files(place) == ["tstore.json"]


@pytest.mark.parametrize(("path", "status"), [(PACK, 400), ("/odd", 403)])
async def test_tiny_chunks_are_not_read_for_long(
    place: Path, path: str, status: int, thresholds: Thresholds
) -> None:
    """Neither if a body is wanted, nor if the request was refused without it."""
    thresholds(_LINGER=100.0)  # else refused bodies are read on
    async with Server(place, access=everybody()) as server, wire(server) as raw:
        await raw.send(CHUNKED.replace(PACK.encode(), path.encode()))
        if status == 403:
            assert (await raw.response())[0] == 403
        async with asyncio.timeout(30):
            sending = asyncio.ensure_future(raw.send(b"1\r\nx\r\n" * 200_000))
            response = await raw.response()
            await sending
        assert response[0] in (
            0,
            400 if status == 400 else 0,
        )  # 0: the connection ended before the response was read
        assert not response[0] or b"chunks of the body are too small" in response[1]
    assert files(place) == ["tstore.json"]


@pytest.mark.parametrize(("size", "count"), [(1, 4000), (128, 20_000)])
async def test_chunks_of_honest_sizes_are_accepted(place: Path, size: int, count: int) -> None:
    """A short body in any pieces, and a long one in small pieces in packets of any size."""
    chunk = b"%x\r\n%s\r\n" % (size, b"x" * size)
    async with Server(place, access=everybody()) as server, wire(server) as raw:
        body = chunk * count + b"0\r\n\r\n"
        for at in range(0, len(CHUNKED + body), 50_001):
            await raw.send((CHUNKED + body)[at : at + 50_001])
        assert (await raw.response())[0] == 201
    assert (place / PACK[1:]).stat().st_size == size * count


@pytest.mark.parametrize(
    "odd",
    [
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
        b"Connection: upgrade\r\n",
        b"Upgrade: websocket\r\n",
        b"Upgrade: tcp\r\nConnection: upgrade\r\nContent-Length: 5\r\n",
    ],
)
async def test_upgrades_are_refused(place: Path, odd: bytes) -> None:
    with serving(place) as served:
        reader, writer = await asyncio.open_connection(*served.address)
        writer.write(b"GET /tstore.json HTTP/1.1\r\n" + HEAD + odd + b"\r\n")
        async with asyncio.timeout(60):
            assert (await reader.readuntil(b"\r\n\r\n")).split()[1] in (b"200", b"400")
            before = memory(served.process.pid)
            sending = asyncio.ensure_future(_send(writer, b"\x00" * (24 << 20)))
            assert not (await Wire(reader, writer).rest()).count(b" 101 ")
            await asyncio.wait([sending], timeout=10)
            sending.cancel()
            assert memory(served.process.pid) - before < 16 << 20
        writer.close()
        async with aiohttp.ClientSession(served.url) as session:
            assert (await Client(session, WRITE)("GET", "/tstore.json")).status == 200
        assert [line for line in served.end() if line["level"] == "error"] == []


async def test_clients_that_half_close_get_their_response(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Server(place, access=everybody()) as server:
        head = f"PUT {PACK} HTTP/1.1\r\n".encode() + HEAD + b"If-None-Match: *\r\nContent-Length: 3\r\n\r\n"
        for sent in (GET, head, head + b"ab", CHUNKED, CHUNKED + b"3\r\nab", head + b"abc"):
            async with wire(server) as raw, asyncio.timeout(30):
                await raw.send(sent)
                raw.writer.write_eof()
                await raw.rest()
        async with client_of(server, WRITE) as client:
            assert (await client("GET", "/tstore.json")).status == 200
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert files(place) in (["tstore.json"], ["tstore.json", PACK[1:]])


async def test_readers_that_leave_early_are_not_logged_as_faults(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (place / PACK[1:]).write_bytes(bytes(16 << 20))
    async with Server(place, access=everybody(), limits=Limits(requests=4)) as server:
        for i in range(40):
            async with wire(server) as raw:
                await raw.send(f"GET {PACK} HTTP/1.1\r\n".encode() + HEAD + b"\r\n")
                await raw.reader.readexactly(1 + i * 1000)
                raw.writer.transport.abort()
        async with client_of(server, READ) as client:
            assert len((await client("GET", PACK)).body) == 16 << 20
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("method", ["HEAD", "GET", "PUT"])
async def test_a_flood_of_small_requests_starves_nobody(place: Path, method: str) -> None:
    """One client sends endless requests for heads, ranges and small objects; another one is still served."""
    with serving(place) as served:
        before = len(os.listdir(f"/proc/{served.process.pid}/fd"))
        (place / PACK[1:]).write_bytes(bytes(1 << 20))

        async def flood(client: Client, number: int) -> None:
            for i in range(8):
                if method == "PUT":
                    response = await client.create(f"/txn/f{number}/pack-{i}", b"x")
                else:
                    response = await client(method, PACK, Range=f"bytes={i * 100}-{i * 200}")
                assert response.status in (200, 201, 206, 503)

        connector = aiohttp.TCPConnector(limit=60)
        async with aiohttp.ClientSession(served.url, connector=connector) as many, asyncio.timeout(90):
            flooding = asyncio.gather(*[flood(Client(many, WRITE), number) for number in range(60)])
            async with aiohttp.ClientSession(served.url) as session:
                while not flooding.done():
                    assert (await Client(session, WRITE)("GET", "/tstore.json")).body == MARKER
            await flooding
            assert (await Client(many, WRITE)("GET", "/?list&limit=5")).status == 200
        if method == "PUT":
            assert len(list(place.glob("txn/f*/pack-*"))) == 480
        assert json.loads(MARKER)
        assert len(os.listdir(f"/proc/{served.process.pid}/fd")) < before + 130

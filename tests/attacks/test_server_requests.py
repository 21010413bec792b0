"""What hostile clients send to a server: it stays up, stays inside its store, and answers the next request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import ADMIN, MARKER, PACK, READ, WRITE, Client, Process, client_of, everybody, serving, wire

from tstore.server import Access, Limits, Server

SECRET = b"what lies beside the store"
HEAD = b"Host: 127.0.0.1\r\nAuthorization: Bearer " + WRITE.encode() + b"\r\n"
CREATE = HEAD + b"If-None-Match: *\r\n"


def put(length: int, path: str = PACK, *fields: str) -> bytes:
    more = "".join(f"{field}\r\n" for field in (f"Content-Length: {length}", *fields))
    return f"PUT {path} HTTP/1.1\r\n".encode() + CREATE + more.encode() + b"\r\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a store, beside which a secret lies."""
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "pack-0").write_bytes(SECRET)
    place = tmp_path / "store"
    (place / "txn" / "old").mkdir(parents=True)
    (place / "tstore.json").write_bytes(MARKER)
    (place / "txn" / "old" / "pack-0").write_bytes(b"committed")
    (place / "txn" / "old" / ".0123456789abcdef.tmp").write_bytes(SECRET)
    return place


@pytest.fixture
async def server(place: Path) -> AsyncIterator[Server]:
    limits = Limits(object_bytes=4 << 20, stall=20, idle=20)
    async with Server(place, access=everybody(), limits=limits) as server:
        yield server


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


async def still_well(server: Server) -> None:
    async with client_of(server, READ) as client:
        assert (await client("GET", "/txn/old/pack-0")).body == b"committed"


TRAVERSAL = [
    "/../secret",
    "/txn/../../secret",
    "/txn/old/../../../secret",
    "/..%2fsecret",
    "/%2e%2e/secret",
    "/%2e%2e%2fsecret",
    "/%252e%252e/secret",
    "/%252e%252e%252fsecret",
    "/..%5csecret",
    "/..\\secret",
    "/%5c..%5c..%5csecret",
    "/txn/old/..%c0%af..%c0%afsecret",
    "/%c0%ae%c0%ae/secret",
    "/%uff0e%uff0e/secret",
    "//etc/passwd",
    "/%2fetc%2fpasswd",
    "/./secret",
    "/secret%00",
    "/tstore.json%00.txt",
    "/tstore.json%0d%0aSet-Cookie:x",
    "/tstore.json/",
    "/tstore.json/.",
    "/tstore.json;x",
    "/tstore.json?x",
    "/TSTORE.JSON",
    "/commits/../tstore.json",
    "/txn/old/.0123456789abcdef.tmp",
    "/txn/.hidden/pack-0",
    "/txn/old",
    "/txn/old/",
    "/txn//old/pack-0",
    "/txn/old//pack-0",
    "/txn/old/pack-0/x",
    "/proc/self/environ",
    "/dev/zero",
    "/~root/secret",
    "/C:/secret",
    "/file:///etc/passwd",
    "/" + "a/" * 400 + "b",
    "/txn/" + "a" * 5000 + "/pack-0",
    "/%",
    "/%g0",
    "/%ff",
    "*",
    "http://127.0.0.1/tstore.json",
    "tstore.json",
]


@pytest.mark.parametrize("names", ["layout", "any"])
async def test_no_path_leads_out_of_the_store(place: Path, names: Any) -> None:
    before = files(place.parent)
    async with Server(place, access=Access({ADMIN: "admin"}), names=names) as server:
        for path in TRAVERSAL:
            for request in (
                f"GET {path} HTTP/1.1\r\n",
                f"DELETE {path} HTTP/1.1\r\n",
                f"PUT {path} HTTP/1.1\r\nIf-None-Match: *\r\nContent-Length: 1\r\n",
            ):
                token = f"Host: 127.0.0.1\r\nAuthorization: Bearer {ADMIN}\r\nConnection: close\r\n\r\nx"
                async with wire(server) as raw:
                    await raw.send(f"{request}{token}".encode())
                    answer = await raw.rest()
                assert SECRET not in answer
                assert b"root:" not in answer
                if names == "layout":
                    assert answer.split()[1] in (b"400", b"403", b"404"), (request, answer)
        made = {k: v for k, v in files(place.parent).items() if k not in before}
        assert all(name.startswith("store/") and "/." not in name for name in made)
        if names == "layout":
            assert files(place.parent) == before


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
        assert (await client.create("/txn/old/pack-1", b"x")).status == 412
        listed = json.loads((await client("GET", "/?list")).body)
        assert [e["key"] for e in listed["entries"]] == ["tstore.json", "txn/old/pack-0"]
        assert (await client("GET", "/?list&prefix=txn/linked/")).status == 403
        assert (await client("PUT", "/latest", b"1")).status == 204  # which takes the place of the link
    after = files(place.parent)
    assert after.pop("store/latest") == b"1"
    before.pop("store/latest")
    assert after == before


SMUGGLED = b"PUT /txn/new/pack-9 HTTP/1.1\r\n" + CREATE + b"Content-Length: 1\r\n\r\nx"


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n",
        b"Content-Length: 0, 5\r\n\r\n",
        b"Content-Length: +0\r\n\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 0x0\r\n\r\n",
        b"Content-Length : 0\r\n\r\n",
        b"Content-Length: \r\n\r\n",
        b"Content-Length: 99999999999999999999999999\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b" Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"X: y\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        b'Transfer-Encoding: chunked\r\n\r\n1;x="\n\r\nx\r\n0\r\n\r\n',
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n\r\n",
    ],
    ids=lambda fields: fields[:40].decode("latin-1").encode("unicode_escape").decode(),
)
async def test_a_request_hidden_in_another_is_not_done(place: Path, server: Server, fields: bytes) -> None:
    """Where two readers could see the end of a body in two places, there is one answer and the connection ends."""
    async with wire(server) as raw:
        await raw.send(b"PUT /txn/new/pack-0 HTTP/1.1\r\n" + CREATE + fields + SMUGGLED)
        raw.writer.write_eof()
        answers = await raw.rest()
    assert answers.count(b"HTTP/1.1 ") <= 1
    assert not answers.startswith(b"HTTP/1.1 2")
    assert not (place / "txn" / "new").exists() or not any(p.is_file() for p in (place / "txn" / "new").iterdir())
    await still_well(server)


async def test_requests_behind_each_other_are_told_apart(server: Server) -> None:
    async with wire(server) as raw:
        body = b"PUT /txn/new/pack-9 HTTP/1.1\r\n\r\n"
        await raw.send(
            put(len(body)) + body + b"GET /txn/old/pack-0 HTTP/1.1\r\n" + HEAD + b"\r\n" + put(1, PACK) + b"x"
        )
        assert [await raw.answer() for _ in range(2)] == [(201, b""), (200, b"committed")]
        assert (await raw.answer())[0] == 412


@pytest.mark.parametrize(
    "flood",
    [
        b"".join(b"X-%d: y\r\n" % i for i in range(50_000)),
        b"X: " + b"y" * (8 << 20) + b"\r\n",
        b"y" * (8 << 20),
        b"Cookie: " + b"a=b; " * 100_000 + b"\r\n",
    ],
    ids=["many", "long", "no colon", "cookies"],
)
async def test_floods_of_headers(server: Server, flood: bytes) -> None:
    async with wire(server) as raw:
        await raw.send(b"GET /tstore.json HTTP/1.1\r\n" + HEAD + flood + b"\r\n")
        assert (await raw.answer())[0] in (0, 400, 431)  # 0: cut off while it still sent
    async with wire(server) as raw:
        await raw.send(b"GET /" + b"a" * (8 << 20) + b" HTTP/1.1\r\n\r\n")
        assert (await raw.answer())[0] in (0, 400, 414)
    await still_well(server)


@pytest.mark.parametrize("length", [(4 << 20) + 1, 1 << 62])
async def test_a_body_too_long_is_refused_before_it_comes(place: Path, server: Server, length: int) -> None:
    async with wire(server) as raw:
        await raw.send(put(length))
        assert (await raw.answer())[0] == 413
    assert not (place / PACK[1:]).exists()


async def test_an_endless_body_is_cut_off(place: Path, server: Server) -> None:
    for request in (PACK, "/latest", f"/commits/{1:020d}"):
        async with wire(server) as raw:
            await raw.send(f"PUT {request} HTTP/1.1\r\n".encode() + CREATE + b"Transfer-Encoding: chunked\r\n\r\n")
            sending = asyncio.ensure_future(send_for_ever(raw.writer))
            assert (await raw.answer())[0] in (411, 413)
            sending.cancel()
            await asyncio.wait([sending])
    assert files(place / "txn").keys() == {"old/pack-0", "old/.0123456789abcdef.tmp"}
    await still_well(server)


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()


async def test_a_body_without_permission_is_not_taken(place: Path, server: Server) -> None:
    async with wire(server) as raw:
        await raw.send(b"PUT %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (PACK.encode(), 1 << 40))
        assert (await raw.answer())[0] == 401


async def test_a_client_that_goes_away_leaves_nothing(place: Path) -> None:
    before = files(place)
    async with Server(place, access=everybody()) as server:
        for sent in (0, 1, 100_000, 2_999_999):
            async with wire(server) as raw:
                await raw.send(put(3_000_000) + b"x" * sent)
                raw.writer.transport.abort()
        for end in (b"5\r\nab", b"5\r\nabcde\r\nzz\r\n", b"5\r\nabcde"):
            async with wire(server) as raw:
                await raw.send(
                    f"PUT {PACK} HTTP/1.1\r\n".encode() + CREATE + b"Transfer-Encoding: chunked\r\n\r\n" + end
                )
                raw.writer.write_eof()
                assert not (await raw.rest()).startswith(b"HTTP/1.1 2")
        async with client_of(server, WRITE) as client:
            assert (await client.create(PACK, b"whole")).status == 201
    assert files(place) == before | {PACK[1:]: b"whole"}  # once what those left has been given up


async def test_heads_that_never_end(place: Path) -> None:
    """Slowloris: connections that wait for ever neither keep others out nor stay."""
    limits = Limits(connections=20, idle=0.5)
    async with Server(place, access=everybody(), limits=limits) as server, contextlib.AsyncExitStack() as held:
        slow = [await held.enter_async_context(wire(server)) for _ in range(60)]
        for raw in slow:
            await raw.send(b"GET /tstore.json HTTP/1.1\r\nX: ")
        await still_well(server)
        for raw in slow:
            assert await raw.rest() == b""  # closed by the server


async def test_a_body_that_stalls(place: Path) -> None:
    before = files(place)
    async with Server(place, access=everybody(), limits=Limits(stall=0.1)) as server, wire(server) as raw:
        await raw.send(put(1000) + b"x" * 999)
        assert (await raw.answer())[0] == 408
        assert await raw.rest() == b""
        assert files(place) == before


class Answered(logging.Handler):
    """Waits until the server has done with a request."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


async def test_a_reader_that_stalls(place: Path, caplog: pytest.LogCaptureFixture) -> None:
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


async def test_more_requests_than_are_taken(place: Path) -> None:
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
        assert (await raw.answer())[0] == 201
        await still_well(server)


async def test_two_servers_of_one_store_race(place: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients: list[Client] = []
        for _ in range(2):
            server = await stack.enter_async_context(Server(place, access=everybody()))
            clients.append(await stack.enter_async_context(client_of(server, WRITE)))
        for i in range(20):
            path = f"/txn/race/pack-{i}"
            bodies = [b"%d" % n * 100 for n in range(8)]
            answers = await asyncio.gather(*[clients[n % 2].create(path, body) for n, body in enumerate(bodies)])
            [winner] = [n for n, answer in enumerate(answers) if answer.status == 201]
            assert (place / path[1:]).read_bytes() == bodies[winner]


@pytest.mark.parametrize(
    "token",
    [
        "",
        " ",
        "x" * 8000,
        f"{WRITE} {WRITE}",
        f"{WRITE}\t",
        WRITE[:-1],
        WRITE.upper(),
        "é" * 20,
        "\x80" * 20,
        "../" * 9,
    ],
)
async def test_odd_tokens(server: Server, token: str) -> None:
    async with wire(server) as raw:
        line = b"Authorization: Bearer " + token.encode("latin-1") + b"\r\n"
        await raw.send(b"GET /tstore.json HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n")
        status, body = await raw.answer()
        assert status in (400, 401) or (status == 200 and token.strip() == WRITE)
        assert WRITE.encode() not in body


# ---- processes


def test_a_killed_server_has_stored_the_whole_or_nothing(place: Path) -> None:
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
    """Where the server can make no file above 40 MiB the client is told, and nothing of it stays."""
    with serving(place, FSIZE=40 << 20) as served:
        exchange(served, put(3, "/txn/new/pack-0") + b"abc", b"HTTP/1.1 201")
        before = high_water(served.process.pid)
        exchange(served, put(39 << 20, "/txn/new/pack-1") + bytes(39 << 20), b"HTTP/1.1 201")
        exchange(served, put(60 << 20, "/txn/new/pack-2") + bytes(60 << 20), b"HTTP/1.1 507")
        assert high_water(served.process.pid) - before < 24 << 20
        exchange(served, put(3, "/txn/new/pack-2") + b"abc", b"HTTP/1.1 201")
    assert sorted(p.name for p in (place / "txn" / "new").iterdir()) == ["pack-0", "pack-1", "pack-2"]


def test_more_connections_than_files(place: Path) -> None:
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


class Target(NamedTuple):
    served: Process
    place: Path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server in a process of its own, which must be as well in the end as in the beginning."""
    place = tmp_path_factory.mktemp("fuzzed")
    (place / "tstore.json").write_bytes(MARKER)
    with serving(place) as served:
        yield Target(served, place)
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
def requests(draw: st.DrawFn) -> bytes:
    """One that can be made out, more or less."""
    body = draw(st.sampled_from([b"", MARKER, b"1", b"5\r\nabcde\r\n0\r\n\r\n"]) | ANY)
    head = [draw(METHODS) + b" " + draw(PATHS) + b" HTTP/1.1", HEAD[:-2], *draw(st.lists(FIELDS, max_size=3))]
    if draw(st.integers(0, 3)):
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*head, b"", body])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(requests() | requests() | ANY, min_size=1, max_size=3).map(b"".join))
def test_fuzzed_requests(target: Target, sent: bytes) -> None:
    with socket.create_connection(target.served.address, timeout=60) as raw:
        raw.settimeout(0.02)  # it may wait for the rest of what is no whole request
        with contextlib.suppress(ConnectionError, TimeoutError):
            raw.sendall(sent)
            while raw.recv(1 << 16):
                pass
    with socket.create_connection(target.served.address, timeout=60) as raw:
        raw.sendall(b"GET /tstore.json HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n")
        answer = b""
        while data := raw.recv(1 << 16):
            answer += data
        assert answer.endswith(MARKER)

"""A client and a server that closes, hangs, lies, redirects, or serves something else."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

import tstore
from tests.support import ports
from tests.support.http_server import MARKER
from tests.support.raw_http import RawResponse, Request, Server, close, hang, ok, part, serving, then
from tests.support.thresholds import Thresholds
from tstore.core.format.checksums import BLOCK, block_checks
from tstore.core.storage.http.store import HttpStorage
from tstore.core.storage.objects import PutMode
from tstore.errors import (
    AlreadyExists,
    Corrupt,
    Denied,
    InvalidArgument,
    NotFound,
    TemporaryFailure,
    Throttled,
    TStoreError,
    Unavailable,
)

DATA = bytes(range(200))
SECRET = "s3cr3t-t0ken"
OURS = "Server: tstore/9"
PAGE = ok(b"<html>Log in</html>", "Content-Type: text/html; charset=utf-8")


@contextlib.asynccontextmanager
async def objects(server: Server | str, **options: Any) -> AsyncIterator[HttpStorage]:
    storage = HttpStorage(server if isinstance(server, str) else server.url, **options)
    try:
        yield storage
    finally:
        await storage.close()


async def read(store: HttpStorage) -> None:
    await store.read("k", 10, [bytearray(20)], 20)


async def get(store: HttpStorage) -> None:
    await store.get("k")


async def head(store: HttpStorage) -> None:
    await store.head("k")


async def create(store: HttpStorage) -> None:
    await store.put("k", [b"x" * 1000], PutMode.CREATE)


async def pages(store: HttpStorage) -> None:
    async for _ in store.pages("p/"):
        pass


async def delete(store: HttpStorage) -> None:
    await store.delete("k")


Call = Callable[[HttpStorage], Any]
READS = [read, get, head]
WRITES = [create, delete]
ALL = [*READS, *WRITES, pages]


@pytest.fixture
def impatient(thresholds: Thresholds) -> None:
    thresholds(IDLE_SECONDS=0.2, CONNECT_SECONDS=0.2)


async def fails(
    kind: type[TStoreError], call: Call, *responses: RawResponse, match: str | None = None, **options: Any
) -> str:
    """Return the message of the error, which names the URL and has exactly this type."""
    async with serving(*responses) as server, objects(server, **options) as store:
        with pytest.raises(kind, match=match) as caught:
            await call(store)
        text = str(caught.value)
        assert type(caught.value) is kind
        assert server.url in text
        assert SECRET not in text
        return text


# ---- the server closes, hangs, breaks off


@pytest.mark.parametrize("call", ALL)
async def test_a_server_that_closes_at_once_is_unavailable(call: Call) -> None:
    name = ok(b"", OURS)
    await fails(Unavailable, call, *([] if call in READS else [name]), close)


@pytest.mark.parametrize("call", ALL)
async def test_a_server_that_never_responds_is_unavailable(call: Call, impatient: None) -> None:
    name = ok(b"", OURS)
    await fails(Unavailable, call, *([] if call in READS else [name]), hang, match=r"silent for 0\.[23]\d* s")


@pytest.mark.parametrize("behave", [close, hang])
@pytest.mark.parametrize(
    ("call", "begun"),
    [
        (get, ok(DATA[:50], length=200)),
        (read, part(DATA[10:20], "10-29/200").replace(b"Length: 10", b"Length: 20")),
        (get, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc"),
        (get, b"HTTP/1.1 200 OK\r\nContent-Le"),
    ],
)
async def test_half_a_response_is_unavailable(call: Call, begun: bytes, behave: Any, impatient: None) -> None:
    await fails(Unavailable, call, then(begun, behave))


async def test_a_server_that_stops_reading_a_body_is_unavailable(impatient: None) -> None:
    async def big(store: HttpStorage) -> None:
        await store.put("k", [bytes(64 << 20)], PutMode.CREATE)

    await fails(Unavailable, big, ok(b"", OURS), hang, match="silent")


async def test_a_slow_server_that_goes_on_is_waited_for(thresholds: Thresholds) -> None:
    thresholds(IDLE_SECONDS=1.0, BODY_RATE=8)

    async def drip(request: Request) -> bytes:
        request.writer.write(ok(b"", length=20))
        for i in range(20):
            await asyncio.sleep(0.06)
            request.writer.write(DATA[i : i + 1])
        return b""

    async with serving(drip) as server, objects(server) as store:
        assert await store.get("k") == DATA[:20]


async def test_a_server_that_reads_a_body_slowly_is_waited_for(thresholds: Thresholds) -> None:
    thresholds(IDLE_SECONDS=1.0)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            if head.startswith(b"PUT"):
                for _ in range(16):
                    await asyncio.sleep(0.08)
                    await reader.readexactly(2 << 20)
            writer.write(ok(b"", OURS))
            if head.startswith(b"PUT"):
                break
        writer.close()

    listening = await asyncio.start_server(slow, "127.0.0.1", 0)
    async with objects(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}") as store:
        await store.put("k", [bytes(32 << 20)], PutMode.CREATE)
    listening.close()


async def test_a_port_where_nobody_listens_is_unavailable() -> None:
    with ports.refusing() as address:
        async with objects(f"http://{address}") as store:
            with pytest.raises(Unavailable, match=r"no connection.*check the address"):
                await store.get("k")


async def test_an_unknown_host_name_is_unavailable() -> None:
    async with objects("http://no-such-host.invalid") as store:
        with pytest.raises(Unavailable, match="no connection"):
            await store.get("k")


async def test_a_handshake_that_never_ends_is_unavailable(impatient: None) -> None:
    async with serving(hang) as server, objects(server.url.replace("http", "https")) as store:
        with pytest.raises(Unavailable, match=r"no connection within 0\.2 s"):
            await store.get("k")


async def test_a_server_that_speaks_no_tls_is_denied() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(plain, "127.0.0.1", 0)
    async with objects(f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}") as store:
        with pytest.raises(Denied, match="speaks https"):
            await store.get("k")
    listening.close()


# ---- the server lies


@pytest.mark.parametrize(
    ("response", "match"),
    [
        (part(DATA[0:20], "0-19/200"), "bytes 10 to 30 were requested.*0 to 20"),
        (part(DATA[10:29], "10-28/200"), "10 to 29"),
        (part(DATA[10:31], "10-30/200"), "10 to 31"),
        (part(DATA[10:30], "11-30/200"), "11 to 31"),
        (part(DATA[10:29], "10-29/200"), "wrong Content-Range"),
        (part(DATA[10:30], "10-29/25"), "wrong Content-Range"),
        (part(DATA[10:30], "29-10/200"), "wrong Content-Range"),
        (part(DATA[10:30], "ten-29/200"), "wrong Content-Range"),
        (part(DATA[10:30], "10-" + "9" * 5000), "wrong Content-Range"),
        (ok(DATA[10:30], status="206 Partial Content"), "Content-Range"),
        (
            ok(DATA, "Content-Type: multipart/byteranges; boundary=b", status="206 Partial Content"),
            "Content-Range",
        ),
        (ok(DATA, status="207 Multi-Status"), "status 207"),
        (ok(b"", status="204 No Content"), "status 204"),
        (ok(b"", status="304 Not Modified"), "status 304"),
        (PAGE, "web page"),
        (PAGE.replace(b"200 OK", b"206 Partial Content"), "web page"),
        (ok(DATA, "Content-Encoding: gzip"), "Content-Encoding 'gzip'"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "does not speak HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", "does not speak HTTP"),
        (ok(DATA, "X-Flood: " + "x" * 100_000), "does not speak HTTP"),
        (ok(DATA, *(f"X-{i}: y" for i in range(10_000))), "does not speak HTTP"),
    ],
)
@pytest.mark.parametrize("call", [read])
async def test_a_response_other_than_the_range_is_corrupt(call: Call, response: bytes, match: str) -> None:
    await fails(Corrupt, call, response, match=match)


async def test_a_range_without_a_declared_length_is_counted() -> None:
    body = b"HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 10-29/200\r\n\r\n"
    short, long = b"13\r\n" + DATA[10:29] + b"\r\n", b"14\r\n" + DATA[10:30] + b"\r\n1\r\nx\r\n"
    for call in [read]:
        for chunks in (short, long):
            await fails(Corrupt, call, body + chunks + b"0\r\n\r\n")


@pytest.mark.parametrize(
    "response",
    [
        part(DATA[10:25], "10-24/25"),
        ok(b"", "Content-Range: bytes */8", status="416 Range Not Satisfiable"),
        ok(DATA[:25]),
        b"HTTP/1.0 200 OK\r\n\r\n" + DATA[:25],
    ],
)
@pytest.mark.filterwarnings("ignore:.*ignores Range")
async def test_an_object_shorter_than_the_range_is_corrupt(response: bytes) -> None:
    def closing(request: Request) -> None:
        request.writer.write(response)

    await fails(
        Corrupt, read, closing, match="expected bytes 10 to 30, but the object is cut short( after 25 bytes)?;"
    )


@pytest.mark.parametrize("call", [get, head])
async def test_a_web_page_instead_of_an_object_is_corrupt(call: Call) -> None:
    await fails(Corrupt, call, PAGE.split(b"<html>")[0] if call is head else PAGE, match="web page")


async def test_an_endless_response_is_given_up() -> None:
    async def endless(request: Request) -> None:
        request.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not request.writer.is_closing():
            request.writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            await request.writer.drain()

    async def bounded(store: HttpStorage) -> None:
        await store.get("k", max_size=1 << 20)

    await fails(Corrupt, bounded, endless, match="is longer than 1048576 bytes")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (('ETag: "one"',), ('ETag: "two"',)),
        (("Last-Modified: Sat, 21 Nov 2026 08:00:00 GMT",), ("Last-Modified: Sat, 21 Nov 2026 08:00:01 GMT",)),
    ],
)
async def test_an_object_that_changes_is_detected_once(before: tuple[str], after: tuple[str]) -> None:
    old, new = part(DATA[10:30], "10-29/200", *before), part(DATA[10:30], "10-29/200", *after)
    async with serving(old, old, new) as server, objects(server) as store:
        await read(store)
        await read(store)
        with pytest.raises(Corrupt, match="changed since it was read"):
            await read(store)
        await read(store)  # the new object is checked by its checksums


async def test_an_object_whose_length_changes_is_detected() -> None:
    modified = "Last-Modified: Sat, 21 Nov 2026 08:00:00 GMT"
    old, new = (part(DATA[10:30], f"10-29/{n}", modified) for n in (200, 201))
    async with serving(old, new) as server, objects(server) as store:
        await read(store)
        with pytest.raises(Corrupt, match=r"it was 200 bytes.*now it is 201 bytes"):
            await read(store)


async def test_a_weak_etag_is_the_same_object() -> None:
    old, new = (part(DATA[10:30], "10-29/200", f"ETag: {tag}") for tag in ('"one"', 'W/"one"'))
    async with serving(old, new) as server, objects(server) as store:
        await read(store)
        await read(store)


# ---- the server ignores ranges


@contextlib.asynccontextmanager
async def ignoring_ranges(response: RawResponse) -> AsyncIterator[tuple[HttpStorage, Server]]:
    """Yield the storage of a server that is known to ignore ranges, and the server."""
    async with serving(ok(DATA), ok(DATA), response) as server, objects(server) as store:
        with pytest.warns(RuntimeWarning, match="ignores Range"):
            await store.read("other", 5, [buffer := bytearray(4)], 4)
        assert buffer == DATA[5:9]
        server.requests.clear()
        yield store, server


async def test_one_pass_over_an_object_serves_many_reads() -> None:
    buffers = {(i, n): bytearray(n) for i in range(0, 190, 3) for n in (1, 10)}
    async with ignoring_ranges(ok(DATA)) as (store, server):
        await asyncio.gather(*[store.read("k", i, [buffer], n) for (i, n), buffer in buffers.items()])
        assert [(r.method, r.path, r.headers.get("Range")) for r in server.requests] == [("GET", "/k", None)]
    assert all(buffer == DATA[i : i + n] for (i, n), buffer in buffers.items())


async def test_a_read_behind_the_position_of_a_pass_waits_for_the_next_one() -> None:
    half, ahead = asyncio.Event(), asyncio.Event()

    async def halting(request: Request) -> bytes:
        request.writer.write(ok(DATA[:100], length=200))
        half.set()
        await ahead.wait()
        return DATA[100:]

    async with ignoring_ranges(halting) as (store, server):
        first, second, late, joining = (bytearray(20) for _ in range(4))
        reads = [asyncio.ensure_future(store.read("k", at, [b], 20)) for at, b in [(0, first), (150, second)]]
        await half.wait()
        await reads[0]  # so the pass has begun
        reads += [asyncio.ensure_future(store.read("k", at, [b], 20)) for at, b in [(10, late), (180, joining)]]
        await asyncio.sleep(0)
        ahead.set()
        await asyncio.gather(*reads)
        assert len(server.requests) == 2
    assert [first, second, late, joining] == [DATA[0:20], DATA[150:170], DATA[10:30], DATA[180:200]]


async def test_a_cancelled_read_is_not_filled_but_the_others_are() -> None:
    begun, ahead = asyncio.Event(), asyncio.Event()

    async def halting(request: Request) -> bytes:
        begun.set()
        await ahead.wait()
        return ok(DATA)

    async with ignoring_ranges(halting) as (store, _):
        given_up, kept = bytearray(20), bytearray(20)
        reads = [asyncio.ensure_future(store.read("k", 5, [buffer], 20)) for buffer in (given_up, kept)]
        await begun.wait()
        reads[0].cancel()
        await asyncio.wait(reads[:1])
        ahead.set()
        await reads[1]
    assert (given_up, kept) == (bytearray(20), DATA[5:25])


async def test_a_pass_ends_once_nobody_needs_more_of_the_object() -> None:
    left = asyncio.Event()

    async def endless(request: Request) -> None:
        request.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not request.writer.is_closing():
                request.writer.write(b"64\r\n" + DATA[:100] + b"\r\n")
                await request.writer.drain()
                await asyncio.sleep(0)
        left.set()

    async with ignoring_ranges(endless) as (store, _):
        buffer = bytearray(20)
        await store.read("k", 150, [buffer], 20)
        assert buffer == DATA[50:70]
        await asyncio.wait_for(left.wait(), 20)


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (then(ok(DATA[:100], length=200), close), Unavailable),
        (ok(DATA[:100]), Corrupt),
        (ok(b"", status="404 Not Found"), NotFound),
        (ok(b"", status="503 Busy"), TemporaryFailure),
        (PAGE, Corrupt),
    ],
)
async def test_a_pass_that_fails_fails_all_its_reads(response: RawResponse, kind: type[TStoreError]) -> None:
    async with ignoring_ranges(response) as (store, server):
        reads = [store.read("k", at, [bytearray(20)], 20) for at in (0, 95, 150)]
        results = await asyncio.gather(*reads, return_exceptions=True)
        assert results[0] is None or type(results[0]) is kind
        assert [type(error) for error in results[1:]] == [kind] * 2
        assert f"{server.url}: k" in str(results[1])


async def test_closing_ends_a_pass() -> None:
    async with ignoring_ranges(hang) as (store, _):
        read = asyncio.ensure_future(store.read("k", 0, [bytearray(5)], 5))
        await asyncio.sleep(0)
        await store.close()
        with pytest.raises(asyncio.CancelledError):
            await read


# ---- the server refuses


@pytest.mark.parametrize("call", [read, get])
@pytest.mark.parametrize("status", [404, 410])
async def test_missing_objects_are_not_found(call: Call, status: int) -> None:
    await fails(NotFound, call, ok(b"<html>no</html>", "Content-Type: text/html", status=f"{status} Gone"))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        (["Retry-After: 7"], 7.0),
        (["Date: Sat, 21 Nov 2026 08:00:00 GMT", "Retry-After: Sat, 21 Nov 2026 08:00:09 GMT"], 9.0),
        (["Retry-After: soon"], None),
        (["Retry-After: -1"], None),
        (["Retry-After: ²"], None),
        ([], None),
    ],
)
async def test_the_error_of_a_throttling_server_has_its_retry_after(
    headers: list[str], seconds: float | None
) -> None:
    response = ok(b"", *headers, status="429 Too Many Requests")
    async with serving(response) as server, objects(server) as store:
        with pytest.raises(Throttled) as caught:
            await store.get("k")
    assert caught.value.retry_after == seconds


async def test_an_error_quotes_the_server_without_token_and_control_characters() -> None:
    def echo(request: Request) -> bytes:
        text = f"bad\x1b[31m request:\r\n{request.headers['Authorization']} {'y' * 1000}"
        return ok(text.encode(), "Content-Type: text/plain", status="400 Bad")

    text = await fails(InvalidArgument, get, echo, token=SECRET)
    assert "bad [31m request: Bearer … yyy" in text
    assert len(text) < 400


# ---- the server redirects


def to(url: str, status: int = 302) -> bytes:
    return ok(b"", f"Location: {url}", status=f"{status} There")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("call", READS)
async def test_a_read_follows_to_another_origin_without_the_token(call: Call, status: int) -> None:
    body = b"" if call is head else DATA[10:30]
    there = ok(body) if call in (get, head) else part(body, "10-29/200")
    async with serving(there) as other:
        async with serving(to(f"{other.url}/elsewhere?signed=1", status)) as server:
            async with objects(server, token=SECRET) as store:
                await call(store)
                assert not store.capabilities.listing
        assert [r.path for r in other.requests] == ["/elsewhere?signed=1"]
        assert "Authorization" not in other.requests[0].headers
        assert other.requests[0].headers.get("Range") == server.requests[0].headers.get("Range")
        assert server.requests[0].headers["Authorization"] == f"Bearer {SECRET}"


async def test_another_port_is_another_origin_and_a_redirect_back_has_no_token() -> None:
    async with serving(b"") as other, serving(b"", ok(DATA)) as server, objects(server, token=SECRET) as store:
        server.responses[0] = to(f"{other.url}/a")
        other.responses[0] = to(f"{server.url}/b")
        assert await store.get("k") == DATA
        assert ["Authorization" in r.headers for r in server.requests] == [True, False]


async def test_a_redirect_within_the_origin_keeps_the_token() -> None:
    async with serving(to("/other/place"), ok(DATA)) as server, objects(server, token=SECRET) as store:
        assert await store.get("k") == DATA
        assert [r.path for r in server.requests] == ["/k", "/other/place"]
        assert [r.headers["Authorization"] for r in server.requests] == [f"Bearer {SECRET}"] * 2


async def test_a_redirect_target_cannot_declare_the_server_as_ours() -> None:
    async with serving(ok(DATA, OURS)) as other, serving(to(other.url)) as server, objects(server) as store:
        assert await store.get("k") == DATA
        with pytest.raises(Denied, match="is not tstore's"):
            await create(store)
        assert {r.method for r in other.requests} == {"GET"}


@pytest.mark.parametrize("call", WRITES)
async def test_a_write_follows_no_redirect(call: Call) -> None:
    async with serving(ok(b"")) as other:
        text = await fails(Denied, call, ok(b"", OURS), to(f"{other.url}/x?sig={SECRET}", 307), match="a write")
        assert f"{other.url}/x," in text
        assert other.requests == []


@pytest.mark.parametrize(
    ("place", "kind", "match"),
    [
        ("ftp://host/x", Denied, "ftp://host/x"),
        ("file:///etc/passwd", TStoreError, "redirects"),
        ("http://[::1", Corrupt, "invalid URL"),
        ("/k", Corrupt, "more than 5 times"),
        ("", Corrupt, "more than 5 times"),
    ],
)
async def test_a_redirect_to_nowhere_is_refused(place: str, kind: type[TStoreError], match: str) -> None:
    async with serving(to(place)) as server, objects(server) as store:
        with pytest.raises(kind, match=match):
            await store.get("k")
        assert len(server.requests) <= 6


async def test_the_password_of_a_redirect_is_not_sent() -> None:
    async with serving(ok(DATA)) as other:
        place = other.url.replace("http://", f"http://user:{SECRET}@")
        async with serving(to(f"{place}/x")) as server, objects(server) as store:
            assert await store.get("k") == DATA
        assert "Authorization" not in other.requests[0].headers


# ---- writes


async def test_a_create_on_a_closed_kept_connection_has_an_unknown_outcome() -> None:
    async with serving(ok(b"", OURS), ok(b"", OURS, status="201 Created"), close, hang) as server:
        async with objects(server) as store:
            await store.put("one", [b"x"], PutMode.CREATE)
            with pytest.raises(Unavailable):  # the kept connection was closed: the create may have succeeded
                await store.put("k", [b"x" * 100], PutMode.CREATE)
        assert [r.path for r in server.requests].count("/k") == 1


@pytest.mark.parametrize("size", [0, 1000, 3 << 20])
async def test_a_body_is_sent_with_its_checksum(size: int) -> None:
    async with serving(ok(b"", OURS)) as server, objects(server) as store:
        await store.put("k", [bytes(size // 2), bytes(size - size // 2)], PutMode.CREATE)
        sent = server.requests[-1]
        assert len(sent.body) == size
        whole = sent.body if size <= BLOCK else block_checks(memoryview(sent.body))
        assert sent.headers["X-TStore-XXH3"] == xxhash.xxh3_128_hexdigest(whole)


async def test_a_server_once_recognised_as_ours_stays_ours() -> None:
    async with serving(ok(b"", OURS), ok(b"", "Server: some-proxy"), ok(b"", OURS)) as server:
        async with objects(server) as store:
            await store.get("k")
            await store.get("k")
            await create(store)
        assert [r.method for r in server.requests] == ["GET", "GET", "PUT"]


async def test_creating_a_taken_key_is_already_exists() -> None:
    text = await fails(AlreadyExists, create, ok(b"", OURS), ok(b"", OURS, status="412 Precondition Failed"))
    assert text.endswith(": k already exists")


@pytest.mark.parametrize("name", ["Server: nginx/1.22", "Server: apache tstore/1", "X-Other: tstore/1"])
@pytest.mark.parametrize("call", [*WRITES, pages])
async def test_nothing_is_written_to_or_listed_from_another_server(call: Call, name: str) -> None:
    async with serving(ok(b"", name)) as server, objects(server) as store:
        with pytest.raises(Denied, match=re.escape("tstore serve")):
            await call(store)
        assert [r.method for r in server.requests] == ["GET"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"<html>",
        b'{"entries": [{"key": "p/a"}]}',
        b'{"entries": [{"key": "p/a", "size": "1"}]}',
        b'{"entries": [{"key": "other", "size": 1}], "folders": [], "next": null}',
        b'{"entries": [], "folders": ["/etc/"], "next": null}',
        b'{"entries": [{"key": "p/a", "size": 1}], "folders": [], "next": "p/a"}',  # the same page forever
        b"\xff\xfe",
    ],
)
async def test_a_wrong_listing_is_corrupt(body: bytes) -> None:
    await fails(Corrupt, pages, ok(b"", OURS), ok(body, OURS, "Content-Type: application/json"))


# ---- secrets and URLs


async def test_proxies_and_netrc_of_the_environment_are_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login me password {SECRET}")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with serving(ok(b"")) as proxy, serving(ok(DATA)) as server, objects(server) as store:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert await store.get("k") == DATA
        assert proxy.requests == []
        assert "Authorization" not in server.requests[0].headers


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@host/store",
        f"https://{SECRET}@host/store",
        f"http://host/store?token={SECRET}",
        f"http://host/store#{SECRET}",
        "http://host/store?",
        "http://host/store#",
        "http://",
        "http://host:port/x",
        "http://[::1/x",
        "ftp://host/x",
        "http:/host",
        "host/x",
    ],
)
def test_invalid_urls_are_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        HttpStorage(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("token", ["", " ", "a b", "a\r\nX-Evil: 1", "tökén", "\0"])
def test_a_token_invalid_in_a_header_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        HttpStorage("http://host", token=token)
    assert not token.strip() or token not in str(caught.value)


async def test_the_error_of_a_refused_token_does_not_show_it() -> None:
    response = ok(b"", status="401 Unauthorized")
    text = await fails(Denied, get, response, match="refused the token", token=SECRET)
    assert SECRET not in text
    store = HttpStorage("http://host", token=SECRET)
    assert SECRET not in repr(store) + str(vars(store)) + repr(vars(store)["_session"])


# ---- a whole store


async def test_a_server_with_every_object_is_not_an_endless_log() -> None:
    async def everything(request: Request) -> RawResponse:
        return ok(MARKER if request.path.endswith("tstore.json") else b"")

    async with serving(everything) as server, await tstore.open(server.url, "r") as store:
        with pytest.raises(Corrupt, match="for every key"):
            await store.snapshot()

"""Requests that are malformed, smuggle another one, leave the store's folder, or contradict themselves.

Each case takes a `Target` whose folder was made by `lay_out`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from tests.attacks.paths import TRAVERSAL, no_path_leads_out
from tests.attacks.target import SECRET, Target, changes
from tests.support.http_server import MARKER, PACK, WRITE, Wire

HEAD = b"Host: 127.0.0.1\r\nAuthorization: Bearer " + WRITE.encode() + b"\r\n"
CREATE = HEAD + b"If-None-Match: *\r\n"
ASKED = b"GET /txn/old/pack-0 HTTP/1.1\r\n"
CLOSED = 0
"""The status of `Wire.response` if the server closed the connection, as it does while a client still sends."""


def put(length: int, path: str = PACK, *headers: str) -> bytes:
    """Return the head of a request that creates an object."""
    more = "".join(f"{header}\r\n" for header in (f"Content-Length: {length}", *headers))
    return f"PUT {path} HTTP/1.1\r\n".encode() + CREATE + more.encode() + b"\r\n"


async def refused(target: Target, request: bytes, *statuses: int) -> None:
    """Check that a request gets one of these statuses, changes nothing, and does not disturb other clients."""
    before = target.files()
    status, body = await target.ask(request)
    assert status in statuses, f"got {status} {body[:200]!r}, expected one of {statuses}"
    assert SECRET not in body, "the response shows a file outside the store"
    assert not (made := changes(before, target.files())), f"the folder has changed: {made}"
    await target.still_well()


def label(data: bytes) -> str:
    return data[:40].decode("latin-1").encode("unicode_escape").decode()


# ---- request smuggling


SMUGGLED = b"PUT /txn/new/pack-9 HTTP/1.1\r\n" + CREATE + b"Content-Length: 1\r\n\r\nx"
TWO_ENDS = [
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
]


async def two_ends(target: Target, headers: bytes) -> None:
    """If a body has two possible ends, there is one response and the connection is closed."""
    async with target.wire() as raw:
        await raw.send(b"PUT /txn/new/pack-0 HTTP/1.1\r\n" + CREATE + headers + SMUGGLED)
        raw.writer.write_eof()
        responses = await raw.rest()
    assert responses.count(b"HTTP/1.1 ") <= 1, f"two answers: {responses[:200]!r}"
    assert not responses.startswith(b"HTTP/1.1 2"), f"taken: {responses[:80]!r}"
    assert not [n for n in target.files() if n.startswith("txn/new")], "an object was stored"
    await target.still_well()


async def behind_each_other(target: Target, _: None) -> None:
    async with target.wire() as raw:
        body = b"PUT /txn/row/pack-9 HTTP/1.1\r\n\r\n"
        path = f"/txn/row/pack-{random.getrandbits(60)}"
        await raw.send(put(len(body), path) + body + ASKED + HEAD + b"\r\n" + put(1, path) + b"x")
        responses = [await raw.response() for _ in range(3)]
    assert [status for status, _ in responses] == [201, 200, 412]
    assert responses[1][1] == b"committed"
    assert not (target.place / "txn/row/pack-9").exists(), "the body of one request was executed as another"


# ---- heads


HEADS: list[tuple[str, bytes]] = [
    ("50,000 headers", b"".join(b"X-%d: y\r\n" % i for i in range(50_000))),
    ("a header of 8 MiB", b"X: " + b"y" * (8 << 20) + b"\r\n"),
    ("8 MiB without a colon", b"y" * (8 << 20)),
    ("100,000 cookies", b"Cookie: " + b"a=b; " * 100_000 + b"\r\n"),
    ("100,000 ranges", b"Range: bytes=" + b"0-0," * 100_000 + b"1-1\r\n"),
    ("100,000 tags", b"If-None-Match: " + b'"x", ' * 100_000 + b'"y"\r\n'),
]


async def flooded_head(target: Target, flood: bytes) -> None:
    await refused(target, b"GET /tstore.json HTTP/1.1\r\n" + HEAD + flood + b"\r\n", CLOSED, 400, 431)


LINES: list[tuple[str, bytes, tuple[int, ...]]] = [
    ("a path of 8 MiB", b"GET /" + b"a" * (8 << 20) + b" HTTP/1.1\r\n\r\n", (CLOSED, 400, 414)),
    *(
        (label(method)[:12], method + ASKED.removeprefix(b"GET") + HEAD + b"\r\n", (CLOSED, 400, 405))
        for method in (
            b"POST", b"PATCH", b"OPTIONS", b"TRACE", b"CONNECT", b"PROPFIND", b"MKCOL", b"MOVE", b"COPY", b"LOCK",
            b"PURGE", b"put", b"delete", b"G\x00ET", b"GET\xff", b"A" * 10_000,
        )
    ),
    ("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (CLOSED, 400, 404, 405, 505)),
    ("HTTP/0.9", b"GET /txn/old/pack-0\r\n\r\n", (CLOSED, 400, 401)),
    ("HTTP/9.9", b"PUT /txn/new/pack-0 HTTP/9.9\r\n" + CREATE + b"Content-Length: 1\r\n\r\nx", (CLOSED, 400, 505)),
    ("two hosts", ASKED + HEAD + b"Host: evil.example\r\n\r\n", (CLOSED, 400)),
    ("two tokens", ASKED + HEAD + b"Authorization: Bearer 0123456789abcdef\r\n\r\n", (CLOSED, 400)),
    (
        "chunks in HTTP/1.0",
        b"PUT /txn/new/pack-0 HTTP/1.0\r\n" + CREATE + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        (CLOSED, 400),
    ),
    ("a CR in a header", ASKED + HEAD + b"X: a\rb\r\n\r\n", (CLOSED, 400)),
    ("a NUL in a header", ASKED + HEAD + b"X: a\x00b\r\n\r\n", (CLOSED, 400)),
    ("a name with a space", ASKED + HEAD + b"X Y: z\r\n\r\n", (CLOSED, 400)),
    ("an empty name", ASKED + HEAD + b": z\r\n\r\n", (CLOSED, 400)),
    ("TLS to a plain port", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + b"\0" * 500 + b"\r\n\r\n", (CLOSED, 400)),
    ("an object with a query", b"GET /txn/old/pack-0?list HTTP/1.1\r\n" + HEAD + b"\r\n", (400,)),
    *(
        (f"list {query}", b"GET /?list&" + query.encode() + b" HTTP/1.1\r\n" + HEAD + b"\r\n", (400, 403))
        for query in (
            "limit=0", "limit=-1", "limit=1e9", "limit=" + "9" * 200, "delimiter=x", "prefix=../",
            "prefix=%2e%2e/", "prefix=/", "prefix=%00", "list", "prefix=a&prefix=b", "x=y", "after=%ff",
            "prefix=txn/..%2f",
        )
    ),
]  # fmt: skip


async def odd_line(target: Target, case: tuple[bytes, tuple[int, ...]]) -> None:
    request, statuses = case
    await refused(target, request, *statuses)


# ---- conditions


def conditional(*headers: str, path: str = PACK, body: bytes = b"x") -> bytes:
    lines = "".join(f"{field}\r\n" for field in headers)
    length = f"Content-Length: {len(body)}\r\n"
    return f"PUT {path} HTTP/1.1\r\n{length}{lines}".encode() + HEAD + b"\r\n" + body


CONDITIONS: list[tuple[str, bytes, tuple[int, ...]]] = [
    ("none", conditional(), (428,)),
    ("If-Match: *", conditional("If-Match: *"), (400, 412, 428)),
    ("both", conditional("If-None-Match: *", "If-Match: *"), (400,)),
    ("both, a tag", conditional("If-None-Match: *", 'If-Match: "x"'), (400,)),
    ("a tag", conditional('If-None-Match: "x"'), (400, 428)),
    ("* and a tag", conditional("If-None-Match: *", 'If-None-Match: "x"'), (400,)),
    ("twice", conditional("If-None-Match: *", "If-None-Match: *"), (400,)),
    ("an empty one", conditional("If-None-Match:"), (400, 428)),
    ("a date", conditional("If-Unmodified-Since: Sat, 21 Nov 2026 08:00:00 GMT"), (400, 412, 428)),
    ("taken", conditional("If-None-Match: *", path="/txn/old/pack-0"), (412,)),
    ("replacing a pack", conditional(path="/txn/old/pack-0"), (428,)),
    ("replacing the marker", conditional(path="/tstore.json", body=MARKER), (428,)),
    ("replacing a record", conditional(path=f"/commits/{1:020d}"), (428,)),
    ("Content-Range", conditional("If-None-Match: *", "Content-Range: bytes 0-0/2"), (415,)),
    ("Content-Encoding", conditional("If-None-Match: *", "Content-Encoding: gzip"), (415,)),
    ("another checksum", conditional("If-None-Match: *", "X-TStore-XXH3: " + "0" * 32), (409,)),
    ("no checksum", conditional("If-None-Match: *", "X-TStore-XXH3: é"), (400, 409)),
    ("an invalid hint", conditional(path="/latest", body=b"-1"), (422,)),
    ("a range backwards", ASKED + HEAD + b"Range: bytes=5-2\r\n\r\n", (200, 416)),
    ("a range of 9^30", ASKED + HEAD + b"Range: bytes=" + b"9" * 30 + b"-\r\n\r\n", (200, 416)),
    ("If-Match another", ASKED + HEAD + b'If-Match: "x"\r\n\r\n', (412,)),
]


# ---- tokens


ODD_TOKENS = [
    "", " ", "x" * 8000, f"{WRITE} {WRITE}", f"{WRITE}\t", WRITE[:-1], WRITE.upper(), "é" * 20, "\x80" * 20,
    "../" * 9,
]  # fmt: skip


async def odd_token(target: Target, token: str) -> None:
    line = b"Authorization: Bearer " + token.encode("latin-1") + b"\r\n"
    status, body = await target.ask(b"GET /tstore.json HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n")
    right = token.strip() == WRITE
    assert status in (400, 401) or (status == 200 and right), f"answered {status}"
    assert WRITE.encode() not in body, "the response shows the token"


NO_TOKEN = [
    ("none", b""),
    ("Basic", b"Authorization: Basic " + WRITE.encode() + b"\r\n"),
    ("in a cookie", b"Cookie: token=" + WRITE.encode() + b"\r\n"),
    ("two of them", b"Authorization: Bearer x\r\nAuthorization: Bearer " + WRITE.encode() + b"\r\n"),
    ("no kind", b"Authorization: " + WRITE.encode() + b"\r\n"),
]


async def no_token(target: Target, headers: bytes) -> None:
    for method in ("GET", "DELETE", "PUT"):  # HEAD responses have no body to wait for
        request = f"{method} /txn/old/pack-0 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n".encode()
        status, _ = await target.ask(request + headers + b"\r\n")
        assert status in (400, 401), f"{method} got {status}"
    await target.still_well()


# ---- bodies


async def too_long(target: Target, length: int) -> None:
    await refused(target, put(length), 413)


async def endless(target: Target, path: str) -> None:
    before = target.files()
    async with target.wire() as raw:
        await raw.send(f"PUT {path} HTTP/1.1\r\n".encode() + CREATE + b"Transfer-Encoding: chunked\r\n\r\n")
        sending = asyncio.ensure_future(send_for_ever(raw))
        try:
            status, _ = await raw.response()
        finally:
            sending.cancel()
            await asyncio.wait([sending])
    assert status in (CLOSED, 411, 413), f"answered {status}"
    await unchanged_soon(target, before)
    await target.still_well()


async def send_for_ever(raw: Wire) -> None:
    with contextlib.suppress(OSError):
        while True:
            raw.writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await raw.writer.drain()


async def without_permission(target: Target, _: None) -> None:
    request = b"PUT %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (PACK.encode(), 1 << 40)
    await refused(target, request, 401)


async def goes_away(target: Target, sent: bytes) -> None:
    before = target.files()
    async with target.wire() as raw:
        await raw.send(sent)
        raw.writer.transport.abort()
    await unchanged_soon(target, before)
    await target.still_well()


async def unchanged_soon(target: Target, before: dict[str, bytes]) -> None:
    """Check that nothing of an aborted upload stays."""
    for _ in range(200):
        if not (left := changes(before, target.files())):
            return
        await asyncio.sleep(0.05)
    assert not left, f"what it left stays: {left}"


CHUNKED = f"PUT {PACK} HTTP/1.1\r\n".encode() + CREATE + b"Transfer-Encoding: chunked\r\n\r\n"
LEFT = [
    *((f"after {n} bytes", put(3_000_000) + b"x" * n) for n in (0, 1, 100_000, 2_999_999)),
    *(
        (f"chunks that end in {end!r}", CHUNKED + end)
        for end in (b"5\r\nab", b"5\r\nabcde\r\nzz\r\n", b"5\r\nabcde")
    ),
    ("after Expect", put(10, PACK, "Expect: 100-continue")),
]


# ---- the cases


def family(name: str, run: Callable[[Target, Any], Awaitable[None]], members: Iterable[tuple[str, Any]]) -> Any:
    """Yield a case for each member (name, argument) of a family, which all run the same function."""
    return (pytest.param(run, argument, id=f"{name}: {label}") for label, argument in members)


CASES = [
    *family("path", no_path_leads_out, [(path[:40], path) for path in TRAVERSAL]),
    *family("hidden request", two_ends, [(label(headers), headers) for headers in TWO_ENDS]),
    *family("requests in a row", behind_each_other, [("three", None)]),
    *family("head", flooded_head, HEADS),
    *family("line", odd_line, [(name, (request, statuses)) for name, request, statuses in LINES]),
    *family("condition", odd_line, [(name, (request, statuses)) for name, request, statuses in CONDITIONS]),
    *family("token", odd_token, [(repr(token)[:30], token) for token in ODD_TOKENS]),
    *family("no token", no_token, NO_TOKEN),
    *family("too long", too_long, [("2^62 bytes", 1 << 62)]),
    *family("endless body", endless, [(path[:12], path) for path in ("/latest", f"/commits/{1:020d}")]),
    *family("no permission", without_permission, [("1 TiB", None)]),
    *family("goes away", goes_away, LEFT),
]
"""Functions that send a hostile request and check its response and the next ones, and their arguments."""

"""Hostile servers, whose responses are endless, slow, redirected or invalid."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping

from tests.attacks import forgeries
from tests.attacks.forgeries import Known, framed
from tests.attacks.victim import OPENING, READING, WRITING
from tests.support.raw_http import Request, ok, part

__all__ = ["SERVERS", "Reply", "Served", "every_number", "redirect"]

_MEMBER = gzip.compress(bytes(16 << 20), 9)


def marker() -> bytes:
    return json.dumps({"format": 1, "uuid": str(uuid.UUID(int=0, version=4))}).encode()


OURS = ("Server: tstore/9", "X-TStore-Version: 9")
ENDLESS = b"HTTP/1.1 200 OK\r\nServer: tstore/9\r\nX-TStore-Version: 9\r\nTransfer-Encoding: chunked\r\n\r\n"
FIRST = f"/commits/{1:020d}"

Reply = Callable[[Request], "bytes | Awaitable[bytes | None] | None"]


class Served:
    """Serve the objects of a store, except for paths with a hostile reply."""

    def __init__(self, objects: dict[str, bytes], replies: Mapping[str, Reply]) -> None:
        self.objects = objects
        self.replies = replies
        self.shown: list[str] = []
        """The tokens that clients have sent."""

    def __call__(self, request: Request) -> bytes | Awaitable[bytes | None] | None:
        """Return the response to a request."""
        if "Authorization" in request.headers:
            self.shown.append(request.headers["Authorization"])
        path = request.path.partition("?")[0]
        reply = self.replies.get(path) or self.replies.get("*")
        if reply is not None:
            return reply(request)
        data = self.objects.get(path[1:])
        if data is None:
            return ok(b"", *OURS, status="404 Not Found")
        if request.method == "HEAD":
            return ok(b"", *OURS, length=len(data))
        asked = request.headers.get("Range", "")
        if asked.startswith("bytes="):
            first, _, last = asked[6:].partition("-")
            start = int(first) if first else max(0, len(data) - int(last))
            stop = min(len(data), int(last) + 1) if first and last else len(data)
            return part(data[start:stop], f"{start}-{stop - 1}/{len(data)}", *OURS)
        return ok(data, *OURS)


def endless(piece: bytes) -> Reply:
    """Return a reply of endless chunks."""

    async def reply(request: Request) -> None:
        request.writer.write(ENDLESS)
        while not request.writer.is_closing():
            request.writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
            await request.writer.drain()

    return reply


def for_ever(piece: bytes, pause: float, first: bytes = b"") -> Reply:
    """Return an endless reply of pieces with pauses between them."""

    async def reply(request: Request) -> None:
        request.writer.write(first)
        while not request.writer.is_closing():
            request.writer.write(piece)
            await request.writer.drain()
            await asyncio.sleep(pause)

    return reply


def pages(request: Request) -> bytes:
    """Return a page of an endless list."""
    after = request.path.partition("after=")[2].partition("&")[0]
    count = int(after[-12:]) if after[-12:].isdigit() else 0
    entries = [{"key": f"txn/t{count + i:012d}", "size": 1, "age": 1.0} for i in range(1000)]
    listed = {"entries": [], "folders": [f"{e['key']}/" for e in entries], "next": f"txn/t{count + 1000:012d}"}
    return ok(json.dumps(listed).encode(), *OURS)


def same_page(request: Request) -> bytes:
    """Return a page whose next page is itself."""
    return ok(json.dumps({"entries": [], "folders": ["txn/a/"], "next": "txn/a"}).encode(), *OURS)


def every_number(known: Known) -> dict[str, Reply]:
    """Return the replies of a log in which every version exists."""
    body = framed(b"R", forgeries.record(known, base=0, collected=0, transaction="x"))

    def reply(request: Request) -> bytes:
        path = request.path.partition("?")[0]
        if path == "/tstore.json":
            return ok(marker(), *OURS)
        if path.startswith("/commits/"):
            return ok(b"" if request.method == "HEAD" else body, *OURS, length=len(body))
        return ok(b"", *OURS, status="404 Not Found")

    return {"*": reply}


def redirect(where: str, status: str = "302 Found") -> Reply:
    """Return a redirect; `{n}` in the URL becomes a new number each time."""
    numbers = itertools.count()
    return lambda request: ok(b"", f"Location: {where.replace('{n}', str(next(numbers)))}", *OURS, status=status)


def bomb(request: Request) -> bytes:
    """Return a response with a decompression bomb as content encoding."""
    return ok(_MEMBER * 32, "Content-Encoding: gzip", *OURS)


SERVERS: dict[str, tuple[dict[str, Reply], tuple[str, ...]]] = {
    "endless marker": ({"/tstore.json": endless(b" " * 65536)}, OPENING),
    "marker of 1 TiB": ({"/tstore.json": for_ever(b" " * 65536, 0, ok(b"", *OURS, length=1 << 40))}, OPENING),
    "endless hint": ({"/latest": endless(b"1" * 65536)}, OPENING),
    "endless record": ({FIRST: endless(b"\xc0" * 65536)}, OPENING),
    "record of 1 TiB": ({FIRST: for_ever(b"\xc0" * 65536, 0, ok(b"", *OURS, length=1 << 40))}, OPENING),
    "endless root": ({f"/roots/{64:020d}": endless(b"\xc0" * 65536)}, READING),
    **{f"endless list for {verb}": ({"/": pages}, (verb,)) for verb in ("transactions", "verify", "gc")},
    "a list that goes round": ({"/": same_page}, ("transactions", "verify", "gc")),
    "a list of 1 GiB": ({"/": endless(b'{"entries":[' + b'{"key":"txn/a/pack-0","size":1},' * 2000)}, ("gc",)),
    "100 Continue for ever": ({"/tstore.json": for_ever(b"HTTP/1.1 100 Continue\r\n\r\n", 0.001)}, OPENING),
    "103 for ever": ({"/tstore.json": for_ever(b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.001)}, OPENING),
    "a head without end": ({"/tstore.json": for_ever(b"X-A: b\r\n", 0.001, b"HTTP/1.1 200 OK\r\n")}, OPENING),
    "a marker that drips": ({"/tstore.json": for_ever(b"1\r\n \r\n", 1, ENDLESS)}, OPENING),
    "a record that drips": ({FIRST: for_ever(b"1\r\n \r\n", 1, ENDLESS)}, OPENING),
    "redirects round": ({"/tstore.json": redirect("/tstore.json")}, OPENING),
    "redirects without end": ({"*": redirect("/a{n}")}, OPENING),
    "a redirect to a file": ({"/tstore.json": redirect("file:///etc/passwd")}, OPENING),
    "a redirect of a write": ({f"/commits/{62:020d}": redirect("/x", "307 Temporary Redirect")}, WRITING),
    "a bomb as Content-Encoding": ({"/tstore.json": bomb}, OPENING),
    "503 for 10^9 seconds": (
        {"/tstore.json": lambda r: ok(b"", "Retry-After: 1000000000", *OURS, status="503 Busy")},
        OPENING,
    ),
    "503 for ever": ({FIRST: lambda r: ok(b"", "Retry-After: 0", *OURS, status="503 Busy")}, OPENING),
    "a body that ends early": ({FIRST: lambda r: ok(b"tstoreR", *OURS, length=700)}, OPENING),
    "a body that is too long": ({FIRST: lambda r: ok(b"tstoreR" * 100, *OURS, length=7)}, OPENING),
    "a record of another kind": ({FIRST: lambda r: ok(marker(), *OURS)}, READING),
    "an Age of text": ({"/latest": lambda r: ok(b"1", "X-TStore-Age: nan", *OURS)}, READING),
}

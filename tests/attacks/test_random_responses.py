"""A fuzzer of HTTP responses: random status, headers, framing, bodies and timing, for each server protocol.

Whatever a server sends, a call returns the requested data or raises a short error of tstore that shows no token,
in bounded time. `TSTORE_FUZZ_SECONDS=600 pytest -s tests/attacks/test_random_responses.py` runs each for
ten minutes; `TSTORE_FUZZ_SEED=7` repeats one case.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.raw_http import Request, ok, part, serving
from tests.support.thresholds import Thresholds
from tstore.core.runtime.event_loops import on_io
from tstore.core.storage.base import Storage
from tstore.core.storage.gcs.store import GcsStorage
from tstore.core.storage.http.store import HttpStorage
from tstore.core.storage.objects import PutMode
from tstore.core.storage.s3.store import S3Storage
from tstore.errors import TStoreError

CASES = 120
SECRET = "s3cr3t-t0ken-0123456789"
MOST = 4096
SLOWEST_CASE = 60  # seconds on a machine that is busy; nothing here takes one

STATUSES = (
    ["200 OK"] * 8
    + ["206 Partial Content"] * 4
    + [
        "100 Continue",
        "101 Switching Protocols",
        "103 Early Hints",
        "201 Created",
        "204 No Content",
        "207 Multi",
        "301 M",
        "302 F",
        "303 S",
        "304 N",
        "307 T",
        "308 P",
        "400 B",
        "401 U",
        "403 F",
        "404 N",
        "405 M",
        "409 C",
        "410 G",
        "412 P",
        "413 L",
        "416 R",
        "418 T",
        "429 M",
        "500 I",
        "501 N",
        "502 B",
        "503 S",
        "507 F",
        "599 X",
        "999 X",
        "000 X",
        "20 OK",
        "2000 OK",
        "abc",
        "",
        "200",
        "200 \x00",
        "-1 No",
    ]
)
HEADERS = [
    "Server: tstore/1",
    "Server: tstore/" + "x" * 500,
    f"Server: tstore/{SECRET}",
    "X-TStore-Version: 1",
    "Content-Type: text/html",
    "Content-Type: text/plain",
    "Content-Type: application/json",
    "Content-Type: ",
    "Content-Type: application/xml",
    "Content-Type: multipart/byteranges; boundary=b",
    "Content-Encoding: gzip",
    "Content-Encoding: deflate, br",
    "Content-Encoding: identity",
    "Content-Range: bytes 0-9/10",
    "Content-Range: bytes 5-24/200",
    "Content-Range: bytes 5-24/*",
    "Content-Range: bytes */200",
    "Content-Range: bytes 24-5/200",
    "Content-Range: bytes 0-99999999999999999999/5",
    "Content-Range: octets 5-24/200",
    "Content-Range: bytes 5-1000000000000/1000000000001",
    "Accept-Ranges: bytes",
    "Accept-Ranges: none",
    'ETag: "a"',
    'ETag: W/"b"',
    f"ETag: {SECRET}",
    "ETag: ",
    "Last-Modified: Sat, 21 Nov 2026 08:00:00 GMT",
    "Last-Modified: soon",
    "Last-Modified: Sat, 99 Nov 99999 08:00:00 GMT",
    "Date: never",
    "Date: Sat, 21 Nov 2026 08:00:00 GMT",
    "Retry-After: 1",
    "Retry-After: -1",
    "Retry-After: " + "9" * 400,
    "Retry-After: Sat, 21 Nov 9999 08:00:00 GMT",
    "Location: /elsewhere",
    "Location: ",
    "Location: http://[",
    "Location: //",
    f"Location: http://u:{SECRET}@127.0.0.1:1/x",
    "Location: ftp://x/",
    "Location: http://127.0.0.1:1/",
    "Location: \x80",
    "WWW-Authenticate: Bearer",
    "Connection: close",
    "Connection: keep-alive",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Content-Length: 5",
    "Content-Length: -5",
    "Content-Length: 99999999999999999999",
    "Content-Length: 1e3",
    "Content-Length: +5",
    "Content-Length: 5, 5",
    "X-TStore-Age: nan",
    "X-TStore-Age: -1e400",
    "x-amz-meta-tstore-put: x",
    "x-amz-checksum-crc32: AAAA",
    "x-goog-hash: crc32c=AAAA",
    "Set-Cookie: a=b",
    "Trailer: x",
    "Upgrade: h2c",
    " folded: x",
    "no colon",
    ": none",
    "\x00: x",
    "X: " + "y" * 9000,
]


def listing_of(chance: random.Random) -> Any:
    names = [chance.choice(["p/a", "p/b", "x/p/a", "other", "", "p/" + "z" * 2000, "/", "..", "p/\0", 5, None])
             for _ in range(chance.randrange(4))]  # fmt: skip
    size = chance.choice([1, "1", -1, 10**30, None, "x", 1.5, [], True])
    more = chance.choice([None, "", "p/a", "p/zz", 5])
    match chance.randrange(3):
        case 0:
            return {
                "entries": [{"key": n, "size": size, "age": size} for n in names],
                "folders": names,
                "next": more,
            }
        case 1:
            items = [{"name": n, "size": size, "updated": chance.choice(["2026", 5, None, "2026-11-21T08:00:00Z"])}
                     for n in names]  # fmt: skip
            return {"items": items, "prefixes": names, "nextPageToken": more}
        case _:
            return {"error": {"message": chance.choice([SECRET, "x" * 5000, 5]), "errors": [{"reason": names}]},
                    "name": "x/k", "size": size, "crc32c": "x", "metadata": {"tstore-upload": 1}}  # fmt: skip


def xml_of(chance: random.Random) -> bytes:
    key = chance.choice(["x/p/a", "p/a", "", "&lol;", "x/p/" + "z" * 2000, "\x00"])
    parts = [f"<Contents><Key>{key}</Key><Size>{chance.choice(['1', 'x', '-1', ''])}</Size></Contents>",
             "<IsTruncated>true</IsTruncated>", "<IsTruncated>false</IsTruncated>", "<Contents/>",
             "<NextContinuationToken>t</NextContinuationToken>", f"<Message>no {SECRET}</Message>",
             "<LastModified>soon</LastModified>", "<CommonPrefixes><Prefix>x/p/</Prefix></CommonPrefixes>",
             "<Code>SlowDown</Code>", "<Code>" + "x" * 3000 + "</Code>", "<a>" * 300]  # fmt: skip
    top = chance.choice(["ListBucketResult", "Error", "html"])
    bomb = '<!DOCTYPE a [<!ENTITY lol "lollollol">]>' if chance.random() < 0.2 else ""
    inside = "".join(chance.choices(parts, k=chance.randrange(5)))
    return f"<?xml version='1.0'?>{bomb}<{top}>{inside}</{top}>".encode(errors="replace")


def body_of(chance: random.Random, request: Request) -> bytes:
    match chance.randrange(8):
        case 0:
            return b""
        case 1:
            return chance.randbytes(chance.choice([1, 5, 20, 21, 200]))
        case 2:
            return json.dumps(listing_of(chance)).encode()
        case 3:
            return xml_of(chance)
        case 4:
            return b"[" * chance.choice([10, 5000]) + b'"' + request.headers.get("Authorization", "").encode()
        case 5:
            return gzip.compress(bytes(1 << 20))
        case 6:
            return bytes(chance.choice([MOST, MOST + 1, 100_000]))
        case _:
            return b"<html>" + repr(request.headers).encode()


def framed(chance: random.Random, body: bytes) -> tuple[list[str], bytes]:
    match chance.randrange(6):
        case 0:
            return [], body
        case 1:
            size = max(0, len(body) + chance.choice([-1, 1, 1000]))
            return [f"Content-Length: {size}"], body
        case 2:
            cut = [body[i : i + 777] for i in range(0, len(body), 777)]
            ends = chance.choice(
                [
                    b"0\r\n\r\n",
                    b"",
                    b"0\r\n",
                    b"zz\r\n",
                    b"-1\r\n",
                    b"fffffffffffffffff\r\n",
                    b"0;x\r\nA: b\r\n\r\n",
                ]
            )
            return ["Transfer-Encoding: chunked"], b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in cut) + ends
        case _:
            return [f"Content-Length: {len(body)}"], body


DATA = bytes(range(200))


def right(request: Request) -> bytes:
    """Return a valid response of any of the three servers."""
    path, span = request.path, re.fullmatch(r"bytes=(-?\d+)(?:-(\d+))?", request.headers.get("Range", ""))
    if request.method in ("PUT", "DELETE"):
        return ok(b"", "Server: tstore/1", status="200 OK" if request.method == "PUT" else "204 No Content")
    if request.method == "POST":
        return ok(b'{"size": "100", "crc32c": null}')
    if "list-type" in path:
        return ok(b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
    if "list=" in path or "?list" in path or (path.startswith("/storage/v1") and "prefix" in path):
        return ok(b'{"entries": [{"key": "p/a", "size": 1}], "folders": []}', "Server: tstore/1")
    if path.startswith("/storage/v1"):
        return ok(b'{"name": "x/k", "size": "200"}')
    if span is None:
        body = b"" if request.method == "HEAD" else DATA
        return ok(body, "Server: tstore/1", 'ETag: "a"', length=len(DATA))
    start = int(span[1]) if span[2] else len(DATA) + int(span[1])
    stop = min(len(DATA), int(span[2]) + 1 if span[2] else len(DATA))
    return part(DATA[start:stop], f"{start}-{stop - 1}/{len(DATA)}", "Server: tstore/1")


def changed(chance: random.Random, response_bytes: bytes) -> bytes:
    """Return the response, perhaps with a header added, a line removed or a byte changed."""
    head, _, body = response_bytes.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    match chance.randrange(5):
        case 0:
            lines.insert(chance.randrange(1, len(lines) + 1), chance.choice(HEADERS).encode("latin-1", "replace"))
        case 1:
            del lines[chance.randrange(len(lines))]
        case 2:
            lines[0] = f"HTTP/1.1 {chance.choice(STATUSES)}".encode()
        case 3:
            at = chance.randrange(len(response_bytes))
            return response_bytes[:at] + chance.randbytes(1) + response_bytes[at + 1 :]
        case _:
            pass
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def response(chance: random.Random, request: Request) -> bytes:
    if chance.random() < 0.5:
        return changed(chance, right(request))
    if chance.random() < 0.02:
        return chance.randbytes(100)
    frame, body = framed(chance, body_of(chance, request))
    headers = [*frame, *chance.choices(HEADERS, k=chance.choice([0, 0, 1, 1, 2, 3, 5]))]
    chance.shuffle(headers)
    version = chance.choice(["HTTP/1.1"] * 20 + ["HTTP/1.0", "HTTP/2", "HTTP/9.9", "HTCPCP/1.0", ""])
    head = "\r\n".join([f"{version} {chance.choice(STATUSES)}", *headers, "", ""])
    return head.encode("latin-1", "replace") + body


async def played(chance: random.Random, request: Request) -> None:
    """Send a response at once, in pieces, in part, or endlessly."""
    data, writer = response(chance, request), request.writer
    if chance.random() < 0.03:
        data = b"HTTP/1.1 100 Continue\r\n\r\n" * chance.choice([1, 3, 5000]) + data
    manner = chance.choice(["whole"] * 12 + ["pieces", "cut", "hang", "reset", "behind"])
    if manner == "pieces":
        for at in range(0, min(len(data), 3000), 300):
            writer.write(data[at : at + 300])
            await asyncio.sleep(0)
        data = data[3000:]
    if manner in ("cut", "hang", "reset"):
        data = data[: chance.randrange(len(data) + 1)]
    if manner == "behind":
        data += response(chance, request)
    writer.write(data)
    if manner == "reset":
        writer.transport.abort()
    elif manner == "hang":
        await asyncio.sleep(5)
    elif not writer.is_closing():
        writer.close()


def http(url: str) -> Storage:
    return HttpStorage(url, token=SECRET, timeout=0.2)


def gcs(url: str) -> Storage:
    return GcsStorage("gs://bucket/x", token=SECRET, endpoint_url=url, timeout=0.2)


def s3(url: str) -> Storage:
    config = {"read_timeout": 0.2, "connect_timeout": 0.2}
    return S3Storage("s3://bucket/x", endpoint_url=url, key="tester", secret="is-never-sent", config_kwargs=config)


async def got(objects: Storage) -> None:
    assert len(await objects.get("tstore.json", max_size=MOST)) <= MOST


async def read(objects: Storage) -> None:
    await objects.read("k", 5, [bytearray(10), bytearray(10)], 20)


async def looked(objects: Storage) -> None:
    info = await objects.head("k")
    assert info is None or (info.size >= 0 and (info.age is None or 0 <= info.age < float("inf")))


async def named(objects: Storage) -> None:
    assert all(key.startswith("p/") for key in await objects.list("p/"))


async def foldered(objects: Storage) -> None:
    assert await objects.folders("p/") is not None


Call = Callable[[Storage], Awaitable[None]]
CALLS: list[Call] = [
    got, read, looked, named, foldered,
    lambda o: o.put("k", [b"x" * 100], PutMode.CREATE), lambda o: o.put("k", [b"x"], PutMode.REPLACE),
    lambda o: o.delete("k"),
]  # fmt: skip


def check_error(error: BaseException, hidden: bool) -> None:
    assert isinstance(error, TStoreError), f"{type(error).__name__}: {error}"
    assert len(str(error)) < 1500
    following: list[BaseException | None] = [error]
    seen: set[int] = set()
    while following:
        link = following.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            following += [link.__cause__, link.__context__]
            assert SECRET not in f"{link} {link.args!r}" or not hidden, f"{type(link).__name__} shows the token"


@pytest.mark.parametrize("kind", [http, gcs, s3], ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:.*ignores Range:RuntimeWarning")
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # botocore leaves some bodies unread
@pytest.mark.filterwarnings("ignore:Unclosed connection:ResourceWarning")
@pytest.mark.timeout(int(float(os.environ.get("TSTORE_FUZZ_SECONDS", "0"))) + 300)
async def test_random_responses_end_in_data_or_an_error_of_tstore(
    kind: Callable[[str], Storage], thresholds: Thresholds
) -> None:
    thresholds(CONNECT_SECONDS=0.2, EMPTY_PAGES=5)
    seconds, seed = os.environ.get("TSTORE_FUZZ_SECONDS"), os.environ.get("TSTORE_FUZZ_SEED")
    end = time.monotonic() + float(seconds) if seconds else None
    outcomes: Counter[str] = Counter()
    playing: list[random.Random] = []

    async def play(request: Request) -> None:
        await played(playing[0], request)

    async with serving(play) as server:
        objects = kind(server.url)
        for case in [int(seed)] if seed else itertools.count() if end else range(CASES):
            if end and time.monotonic() > end:
                break
            chance = random.Random(f"{kind.__name__} {case}")
            playing[:] = [chance]
            call = chance.choice(CALLS)
            outcome = "returned"
            try:
                await asyncio.wait_for(on_io(call(objects)), SLOWEST_CASE)
            except BaseException as error:
                error.add_note(f"TSTORE_FUZZ_SEED={case} repeats this case")
                check_error(error, kind is not s3)
                outcome = type(error).__name__
            outcomes[outcome] += 1
            if case % 50 == 49 and kind is not s3:
                await on_io(objects.close())
                objects = kind(server.url)  # a new client has not learned what the server supports
        await on_io(objects.close())
    print(f"{kind.__name__} answers: {sum(outcomes.values())} cases, {dict(outcomes)}")
    assert seed or (outcomes["returned"] and outcomes["Corrupt"] and outcomes["Unavailable"])

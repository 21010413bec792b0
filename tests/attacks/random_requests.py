"""Requests with parts swapped, doubled and left out at random, by seed."""

from __future__ import annotations

import asyncio
import contextlib
import random

from tests.attacks.case import check
from tests.attacks.requests import ASKED, CREATE, HEAD
from tests.attacks.target import Target
from tests.support.http_server import MARKER, READ

__all__ = ["send"]

_WORDS = [
    b"Range", b"If-Range", b"If-Match", b"If-None-Match", b"If-Modified-Since", b"Content-Length", b"Host",
    b"Transfer-Encoding", b"Connection", b"Upgrade", b"Expect", b"Content-Encoding", b"Authorization",
    b"X-TStore-XXH3", b"Content-Type", b"Content-Range", b"Cookie", b"*", b"chunked", b"close", b"100-continue",
    b"gzip", b"bytes=0-", b"bytes=-1", b"GET", b"PUT", b"HEAD", b"DELETE", b"POST", b"HTTP/1.1", b"HTTP/1.0", b"0",
    b"/tstore.json", b"/latest", b"/?list", b"/?list&limit=", b"/txn/abc/pack-0-0",
    b"/commits/00000000000000000001",
    b"/roots/00000000000000000064", b"/txn/abc/part-00000-of-00001", b"/-/health", b"\r\n", b"\r\n", b": ", b" ",
    b"\0", b"\xff", b"%2e%2e", b"5\r\nabcde\r\n0\r\n\r\n", MARKER,
]  # fmt: skip


async def send(target: Target, seed: int) -> None:
    """Send requests with parts swapped, doubled and left out."""
    choice = random.Random(seed)
    good = b"PUT /txn/fuzz/pack-%d HTTP/1.1\r\n" % seed + CREATE + b"Content-Length: 5\r\n\r\nabcde"
    sent = bytearray(choice.choice([good, ASKED + HEAD + b"\r\n", good + ASKED + HEAD + b"\r\n"]))
    for _ in range(choice.randrange(1, 6)):
        at = choice.randrange(len(sent))
        sent[at : at + choice.choice((0, 0, 1, 4, 20))] = choice.choice(_WORDS)
    async with target.wire() as raw:
        await raw.send(bytes(sent))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):  # the server may wait for the rest of an incomplete request
                response = await raw.rest()
                check(b"HTTP/1.1 500" not in response, f"seed {seed}: a 500 for {bytes(sent)!r}")
    head = f"GET /tstore.json HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {READ}\r\n\r\n"
    reply = await target.ask(head.encode())
    check(reply == (200, MARKER), f"seed {seed}: an honest GET after {bytes(sent)!r} got {reply}")

"""Responses of an S3 server, each of which becomes an error of tstore."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.support.raw_http import RawResponse, Server, close, hang, ok, part, serving, then
from tests.support.thresholds import Thresholds
from tstore.core.runtime.event_loops import on_io
from tstore.core.storage.objects import PutMode
from tstore.core.storage.s3.store import S3Storage
from tstore.errors import (
    AlreadyExists,
    Corrupt,
    Denied,
    InvalidArgument,
    NotFound,
    StorageFull,
    Throttled,
    TStoreError,
    Unavailable,
)

SECRET = "not-to-be-shown"


def refusal(status: str, code: str, *fields: str) -> bytes:
    """Return an error response in the format of S3."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no {code}</Message></Error>"
    return ok(body.encode(), "Content-Type: application/xml", *fields, status=status)


@pytest.fixture(autouse=True)
def connections_are_fast(thresholds: Thresholds) -> None:
    thresholds(CONNECT_SECONDS=0.5)  # which the wait for a silent server includes


@contextlib.asynccontextmanager
async def connected(server: Server, patience: float = 60) -> AsyncIterator[S3Storage]:
    """Connect with a client that waits for a silent server so many seconds."""
    objects = S3Storage(
        "s3://bucket/x",
        endpoint_url=server.url,
        key="tester",
        secret=SECRET,
        config_kwargs={"read_timeout": patience, "connect_timeout": patience},
    )
    try:
        yield objects
    finally:
        await on_io(objects.close())


async def calling(objects: S3Storage, call: str, *arguments: object) -> object:
    if call == "pages":
        return [page async for page in objects.pages("")]
    return await getattr(objects, call)(*arguments)


async def asked(server: Server, call: str, *arguments: object, patience: float = 60) -> object:
    async with connected(server, patience) as objects:
        return await on_io(calling(objects, call, *arguments))


REFUSALS: list[tuple[bytes, type[TStoreError]]] = [
    (refusal("403 Forbidden", "AccessDenied"), Denied),
    (refusal("403 Forbidden", "SignatureDoesNotMatch"), Denied),
    (refusal("403 Forbidden", "RequestTimeTooSkewed"), Denied),
    (refusal("400 Bad Request", "ExpiredToken"), Denied),
    (refusal("400 Bad Request", "InvalidToken"), Denied),
    (refusal("404 Not Found", "NoSuchBucket"), InvalidArgument),
    (refusal("400 Bad Request", "InvalidBucketName"), InvalidArgument),
    (refusal("400 Bad Request", "EntityTooLarge"), StorageFull),
    (refusal("507 Insufficient Storage", "QuotaExceeded"), StorageFull),
    (refusal("503 Slow Down", "SlowDown", "Retry-After: 7"), Throttled),
    (refusal("429 Too Many Requests", "TooManyRequests"), Throttled),
    (refusal("500 Internal Server Error", "InternalError"), Unavailable),
    (refusal("503 Service Unavailable", "ServiceUnavailable"), Unavailable),
    (refusal("400 Bad Request", "RequestTimeout"), Unavailable),
    (refusal("409 Conflict", "ConditionalRequestConflict"), Unavailable),
    (refusal("400 Bad Request", "BadDigest"), Unavailable),
    (refusal("400 Bad Request", "IncompleteBody"), Unavailable),
    (refusal("501 Not Implemented", "NotImplemented"), Denied),
    (ok(b"<html>gateway</html>", status="502 Bad Gateway"), Unavailable),
]


CALLS: list[tuple[str, tuple[object, ...]]] = [
    ("get", ("k",)),
    ("put", ("k", [b"x"], PutMode.CREATE)),
    ("pages", ()),
    ("delete", ("k",)),
]


@pytest.mark.parametrize(("response", "error"), REFUSALS, ids=lambda p: getattr(p, "__name__", None))
async def test_refusals(response: bytes, error: type[TStoreError]) -> None:
    async with serving(response) as server, connected(server) as objects:
        for call, arguments in CALLS:
            server.requests.clear()
            with pytest.raises(error, match="s3://bucket/x") as raised:
                await on_io(calling(objects, call, *arguments))
            if isinstance(raised.value, Throttled) and b"Retry-After" in response:
                assert raised.value.retry_after == 7
            assert SECRET not in f"{raised.value!r} {raised.value.__cause__!r}"
            assert len(server.requests) == 1, "a request is made once; retries are decided elsewhere"


async def test_the_outcomes_of_a_create_that_fails_its_condition() -> None:
    taken = refusal("412 Precondition Failed", "PreconditionFailed")
    async with serving(taken, ok(b"", "x-amz-meta-tstore-put: anothers", length=3)) as server:
        with pytest.raises(AlreadyExists, match="k"):
            await asked(server, "put", "k", [b"x"], PutMode.CREATE)
        assert server.requests[0].headers["If-None-Match"] == "*"
    async with serving(taken, ok(b"", status="404 Not Found")) as server:
        with pytest.raises(Unavailable, match="first existed, then did not"):
            await asked(server, "put", "k", [b"x"], PutMode.CREATE)


READS: list[tuple[RawResponse, type[TStoreError]]] = [
    (part(b"abc", "0-2/9"), Corrupt),  # shorter than requested, with a matching Content-Range
    (part(b"abcde", "1-5/9"), Corrupt),  # other bytes
    (ok(b"abcdefghi"), Corrupt),  # ranges are ignored
    (part(b"abc", "0-4/9"), Corrupt),
    (then(ok(b"abc", "Content-Range: bytes 0-4/9", status="206 Partial Content", length=5), close), Unavailable),
    (then(ok(b"abc", "Content-Range: bytes 0-4/9", status="206 Partial Content", length=5), hang), Unavailable),
    (close, Unavailable),
    (hang, Unavailable),
    (refusal("416 Range Not Satisfiable", "InvalidRange"), Corrupt),
    (refusal("404 Not Found", "NoSuchKey"), NotFound),
    (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", Unavailable),
]


@pytest.mark.parametrize(("response", "error"), READS)
async def test_reads(response: RawResponse, error: type[TStoreError]) -> None:
    patience = 0.5 if error is Unavailable else 60
    async with serving(response) as server:
        with pytest.raises(error, match="s3://bucket/x"):
            await asked(server, "read", "k", 0, [bytearray(5)], 5, patience=patience)


@pytest.mark.parametrize("body", [b"<html>welcome</html>", b"{}", b""])
async def test_an_invalid_list_is_corrupt(body: bytes) -> None:
    async with serving(ok(body, "Content-Type: text/html")) as server:
        with pytest.raises(TStoreError, match="s3://bucket/x"):
            await asked(server, "pages")


GIVEN_UP: dict[str, tuple[str, tuple[object, ...], bytes]] = {
    "a refusal that never ends": ("get", ("k",), ok(b"", status="500 No", length=100_000)),
    "a list that never ends": ("pages", (), ok(b"", length=100_000)),
    "a list that is too long": ("pages", (), ok(bytes(5 << 20), length=6 << 20)),
    "a refusal that is too long": ("get", ("k",), ok(bytes(5 << 20), status="500 No", length=6 << 20)),
    "an object with a date that is none": ("get", ("k",), ok(b"", "Last-Modified: soon", length=100_000)),
    "an object that never ends": ("get", ("k",), ok(b"", length=100_000)),
}


@pytest.mark.parametrize(("call", "arguments", "response"), GIVEN_UP.values(), ids=GIVEN_UP)
async def test_a_response_not_read_to_its_end_leaves_no_connection_open(
    call: str, arguments: tuple[object, ...], response: bytes
) -> None:
    async with serving(response) as server, connected(server, 0.5) as objects:
        with pytest.raises(TStoreError) as raised:
            await on_io(calling(objects, call, *arguments))
        async with asyncio.timeout(60):  # while the error and the objects of its traceback are alive
            await server.left.wait()
        assert raised.value

"""Every status that a server may send, for every request to every kind of server, is one kind of error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.support import web_server
from tstore.core.storage.base import Storage
from tstore.core.storage.gcs.store import GcsStorage
from tstore.core.storage.http.store import HttpStorage
from tstore.core.storage.objects import PutMode
from tstore.core.storage.retry import RetryingStorage, RetryPolicy
from tstore.core.storage.s3.store import S3Storage
from tstore.errors import (
    AlreadyExists,
    Corrupt,
    Denied,
    InvalidArgument,
    NotFound,
    StorageFull,
    TemporaryFailure,
    Throttled,
    TStoreError,
)

TEMPORARY = [408, 409, 421, 425, 499, 500, 502, 503, 504, 506, 508, 509, 520, 522, 524, 529, 530, 598, 599]
DENIED = [401, 402, 403, 405, 407, 451, 501, 505, 511]
LASTING = [400, 406, 411, 414, 417, 418, 422, 423, 424, 426, 428, 431]  # no use to repeat them
# codes of S3 that decide whatever the status, 400 in most cases
S3_CODES = {
    "RequestTimeout": TemporaryFailure,
    "IncompleteBody": TemporaryFailure,
    "BadDigest": TemporaryFailure,
    "XAmzContentSHA256Mismatch": TemporaryFailure,
    "SlowDown": Throttled,
    "ThrottlingException": Throttled,
    "ExpiredToken": Denied,
    "QuotaExceeded": StorageFull,
    "InvalidRequest": InvalidArgument,
    "SomethingNew": InvalidArgument,
}


class Responding:
    """A server that sends the same response to every request."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.body = ""
        self.requests = 0
        self.recovers_after = 0
        self.url = ""

    async def respond(self, request: web.Request) -> web.Response:
        await request.read()
        self.requests += 1
        if self.requests == self.recovers_after:
            self.status = 404
        headers = {"X-TStore-Version": "1", **self.headers}  # so that `HttpStorage` writes to it
        return web.Response(status=self.status, text=self.body, headers=headers, content_type="application/xml")


def storage_at(url: str, provider: str) -> Storage:
    match provider:
        case "http":
            return HttpStorage(url, token="t")
        case "gcs":
            return GcsStorage("gs://bucket/s", endpoint_url=url, token="anon")
        case _:
            return S3Storage("s3://bucket/s", endpoint_url=url, key="k", secret="s")


@pytest.fixture
async def server() -> AsyncIterator[Responding]:
    made = Responding()
    async with web_server.serving(made.respond) as made.url:
        yield made


@pytest.fixture(params=["http", "gcs", "s3"])
async def objects(request: pytest.FixtureRequest, server: Responding) -> AsyncIterator[Storage]:
    made = storage_at(server.url, request.param)
    yield made
    await made.close()


def calls(objects: Storage) -> Iterator[tuple[str, Callable[[], Awaitable[Any]]]]:
    async def listing() -> object:
        return [page async for page in objects.pages("a/")]

    yield "get", lambda: objects.get("k")
    yield "read", lambda: objects.read("k", 0, [bytearray(5)], 5)
    yield "head", lambda: objects.head("k")
    yield "create", lambda: objects.put("k", [b"x"], PutMode.CREATE)
    yield "replace", lambda: objects.put("k", [b"x"], PutMode.REPLACE)
    yield "list", listing
    yield "delete", lambda: objects.delete("k")


async def errors_of(objects: Storage) -> dict[str, TStoreError | None]:
    """Return the error of each kind of request, None for one that succeeds."""
    errors: dict[str, TStoreError | None] = {}
    for name, call in calls(objects):
        try:
            await call()
        except TStoreError as error:
            errors[name] = error
        else:
            errors[name] = None
    return errors


@pytest.mark.parametrize("body", ["", "<html>no</html>", "{}"])
async def test_a_status_means_the_same_in_every_request(server: Responding, objects: Storage, body: str) -> None:
    server.body = body
    expected: dict[int, type[TStoreError] | tuple[type[TStoreError], ...]] = {
        **dict.fromkeys(TEMPORARY, TemporaryFailure),
        **dict.fromkeys(DENIED, Denied),
        **dict.fromkeys(LASTING, (InvalidArgument, Corrupt)),
        413: StorageFull,
        507: StorageFull,
        429: Throttled,
    }
    wrong = []
    for server.status, kind in expected.items():
        for name, error in (await errors_of(objects)).items():
            if not isinstance(error, kind) or (kind is TemporaryFailure and isinstance(error, Throttled)):
                wrong.append(f"{name} {server.status}: {error!r}")
    assert not wrong


async def test_what_is_missing_or_there(server: Responding, objects: Storage) -> None:
    server.status = 404
    errors = await errors_of(objects)
    assert errors["delete"] is None
    for name in ("create", "replace", "list"):
        assert isinstance(errors[name], NotFound if isinstance(objects, HttpStorage) else InvalidArgument), name
    if not isinstance(objects, GcsStorage):  # which has words for a missing object, as opposed to a missing bucket
        assert isinstance(errors["get"], NotFound)
        assert isinstance(errors["read"], NotFound)
        assert errors["head"] is None
    server.status = 412
    for name, error in (await errors_of(objects)).items():
        if name == "create":
            # S3 and GCS look whether the object is the create's own; this server says 412 to that too
            assert isinstance(error, AlreadyExists), name


@pytest.mark.parametrize("status", [429, 503, 500, 408])
@pytest.mark.parametrize(("after", "seconds"), [("7", 7.0), ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0)])
async def test_retry_after_is_read(
    server: Responding, objects: Storage, status: int, after: str, seconds: float
) -> None:
    server.status = status
    server.headers = {"Retry-After": after, "Date": "Thu, 01 Jan 1970 00:01:00 GMT"}
    for name, error in (await errors_of(objects)).items():
        assert isinstance(error, Throttled), name
        assert error.retry_after == seconds, name


@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize("objects", ["s3"], indirect=True)
async def test_the_codes_of_s3(server: Responding, objects: Storage, status: int) -> None:
    server.status = status
    for code, kind in S3_CODES.items():
        server.body = f"<Error><Code>{code}</Code><Message>why</Message></Error>"
        for name, error in (await errors_of(objects)).items():
            if name == "head":  # its response has no body
                continue
            if kind is InvalidArgument and status != 400:
                kind = Denied
            assert isinstance(error, kind), (code, name)


@pytest.mark.parametrize("status", [408, 425, 499, 500, 503, 429])
async def test_a_server_that_is_starting_is_waited_for(server: Responding, objects: Storage, status: int) -> None:
    """Its first response is already a response, so the short deadline for wrong addresses does not apply."""
    policy = RetryPolicy(min_pause=0.001, max_pause=0.01, deadline=30, first_deadline=0, connect_deadline=0)
    server.status, server.recovers_after = status, 20
    with pytest.raises((NotFound, InvalidArgument)):
        await RetryingStorage(objects, policy).get("k")
    assert server.requests >= 20

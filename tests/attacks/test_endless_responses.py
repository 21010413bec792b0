"""Endless responses: a client gives up, within bounds of time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.raw_http import RawResponse, Request, hang, ok, serving
from tests.support.thresholds import Thresholds
from tstore.core.format.bounds import COLLECTION_BYTES
from tstore.core.log.reader import LogReader
from tstore.core.runtime.event_loops import on_io
from tstore.core.runtime.pool import Workers
from tstore.core.storage.base import Storage
from tstore.core.storage.cache import Cache, CachedStorage
from tstore.core.storage.connect import connect
from tstore.core.storage.gcs.store import GcsStorage
from tstore.core.storage.http.store import HttpStorage
from tstore.core.storage.limits import FREE_BYTES, SHARED_BYTES, Deadline, ResponseMemory, one_call
from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Durability, PutMode, overlong
from tstore.core.storage.remote import RemoteStorage, as_remote
from tstore.core.storage.retry import RetryPolicy
from tstore.core.storage.s3.store import S3Storage
from tstore.errors import Corrupt, InvalidArgument, TStoreError, Unavailable
from tstore.lab.simulation.virtual import VirtualLoop

TIMEOUT = 0.3
OURS = "Server: tstore/9"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def http(url: str) -> Storage:
    return HttpStorage(url, timeout=TIMEOUT)


def gcs(url: str) -> Storage:
    return GcsStorage("gs://bucket/x", token="anon", endpoint_url=url, timeout=TIMEOUT)


def s3(url: str) -> Storage:
    config = {"read_timeout": TIMEOUT, "connect_timeout": TIMEOUT}
    return S3Storage("s3://bucket/x", endpoint_url=url, key="k", secret="s", config_kwargs=config)


DIALECTS = [http, gcs, s3]


@pytest.fixture
def impatient(thresholds: Thresholds) -> None:
    thresholds(CONNECT_SECONDS=0.2, BODY_RATE=4096)


@contextlib.asynccontextmanager
async def asking(kind: Callable[[str], Storage], *responses: RawResponse) -> AsyncIterator[RemoteStorage]:
    async with serving(*responses) as server:
        storage = RemoteStorage(kind(server.url))
        try:
            yield storage
        finally:
            await storage.close()


async def writing(request: Request, piece: bytes, pause: float = 0.0) -> None:
    with contextlib.suppress(ConnectionError):
        while not request.writer.is_closing():
            request.writer.write(piece)
            await request.writer.drain()
            await asyncio.sleep(pause)


def again(begin: bytes, piece: bytes, pause: float = 0.0) -> RawResponse:
    """Send `begin`, and then `piece` forever."""

    async def response(request: Request) -> None:
        request.writer.write(begin)
        await writing(request, piece, pause)

    return response


# ---- time


@pytest.mark.parametrize("kind", DIALECTS)
@pytest.mark.parametrize(
    ("begin", "piece", "pause"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.0),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.05),
        (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", 0.05),
        (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n", 0.05),
        (b"HTTP/1.1 200 OK\r\nX-A: ", b"b", 0.05),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"x", 0.02),
        (HEAD, b"1\r\nx\r\n", 0.02),
        (HEAD, b"1;", 0.02),
        (b"HTTP/1.1 500 No\r\nContent-Type: text/plain\r\nContent-Length: 100000\r\n\r\n", b"x", 0.02),
        (b"HTTP/1.1 401 No\r\nContent-Type: text/plain\r\nContent-Length: 100000\r\n\r\n", b"x", 0.02),
    ],
)
async def test_endless_responses_are_given_up(
    kind: Callable[[str], Storage], begin: bytes, piece: bytes, pause: float, impatient: None
) -> None:
    async with asking(kind, again(begin, piece, pause)) as storage:
        with pytest.raises(TStoreError):
            await asyncio.wait_for(storage.get("commits/00000000000000000001"), 60)


@pytest.mark.parametrize("kind", DIALECTS)
async def test_slow_redirects_share_one_deadline(kind: Callable[[str], Storage], impatient: None) -> None:
    async def led(request: Request) -> bytes:
        await asyncio.sleep(0.2)
        return ok(b"", f"Location: /{uuid.uuid4()}", status="302 Found")

    async with asking(kind, led) as storage:
        with pytest.raises(TStoreError) as caught:
            await asyncio.wait_for(storage.get("tstore.json"), 60)
        assert isinstance(caught.value, Unavailable) or kind is s3


async def test_a_body_below_the_minimum_rate_is_given_up_with_an_error(impatient: None) -> None:
    async with asking(http, again(HEAD, b"40\r\n" + bytes(64) + b"\r\n", 0.05)) as storage:
        with pytest.raises(
            Unavailable, match=r"only \d+ bytes were moved within .* slower than 4096 bytes a second"
        ):
            await asyncio.wait_for(storage.get("tstore.json"), 60)


async def test_a_server_that_receives_below_the_minimum_rate_is_given_up(impatient: None) -> None:
    async def sip(request: Request) -> None:
        await hang(request)

    async with asking(http, ok(b"", OURS), sip) as storage:
        with pytest.raises(Unavailable, match=r"silent|slower"):
            await asyncio.wait_for(storage.create("k", bytes(64 << 20), Durability.FSYNC), 60)


@pytest.mark.parametrize("kind", DIALECTS)
@pytest.mark.parametrize(("size", "arrives"), [(6000, True), (10, False)])
async def test_after_a_body_was_sent_the_response_has_the_time_that_the_body_may_take(
    kind: Callable[[str], Storage], size: int, arrives: bool, impatient: None
) -> None:
    async def slow(request: Request) -> bytes:
        await request.writer.drain()
        await asyncio.sleep(1.2)  # the body may still be in a buffer on its way, at 4096 bytes a second
        etag = f'ETag: "{hashlib.md5(bytes(size)).hexdigest()}"'  # without it, S3 objects are read back
        return ok(b'{"size": "6000"}' if kind is gcs else b"", "Connection: close", etag, status="200 OK")

    async with asking(kind, *([ok(b"", OURS)] if kind is http else []), slow) as storage:
        create = storage.create("k", bytes(size), Durability.FSYNC)
        if arrives:
            await create
        else:
            with pytest.raises(Unavailable, match="silent"):
                await create


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop whose clock jumps to the next timer, so that a busy machine changes nothing."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(**fixtures))

    return run


@on_virtual_time
async def test_a_transfer_above_the_minimum_rate_has_no_deadline(thresholds: Thresholds) -> None:
    thresholds(BODY_RATE=1000)
    async with Deadline(0.4) as within:
        for _ in range(60):
            await asyncio.sleep(0.02)
            within.extend(1000)
    for size, pause in [(1 << 40, 60), (1, 0.01)]:  # far ahead of the minimum rate and then silent; too slow
        with pytest.raises(TimeoutError):
            await moving(size, pause)


async def moving(size: int, pause: float) -> None:
    async with Deadline(0.1) as within:
        while True:
            within.extend(size)
            await asyncio.sleep(pause)


@on_virtual_time
async def test_time_spent_by_the_client_does_not_count() -> None:
    async with Deadline(0.2) as within:
        await within.pause(asyncio.sleep(0.5))
        within.extend(1)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "1"])
@pytest.mark.parametrize("url", ["http://host", "gs://bucket/x"])
def test_a_timeout_is_a_number_of_seconds(url: str, timeout: Any) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        connect(url, {"timeout": timeout})


# ---- bytes


def endless(kind: str) -> RawResponse:
    """Return an endless body, with or without a declared length, or as a range."""
    fields = {
        "chunked": "Transfer-Encoding: chunked",
        "untold": "Connection: close",
        "told": f"Content-Length: {1 << 60}",
        "told short": "Content-Length: 4097",
        "part": f"Content-Length: {1 << 60}\r\nContent-Range: bytes 0-{(1 << 60) - 1}/{1 << 60}",
    }[kind]
    status = "206 Partial Content" if kind == "part" else "200 OK"
    piece = b"10000\r\n" + bytes(0x10000) + b"\r\n" if kind == "chunked" else bytes(0x10000)
    return again(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode(), piece)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", ["chunked", "untold", "told", "told short", "part"])
async def test_an_object_ends_at_the_bound_of_its_kind(dialect: Callable[[str], Storage], kind: str) -> None:
    async with asking(dialect, endless(kind)) as storage:
        with pytest.raises(TStoreError, match=r"tstore\.json") as caught:
            await asyncio.wait_for(storage.get("tstore.json"), 60)
        assert isinstance(caught.value, Corrupt) or kind == "told short", (
            "short of one byte the library breaks off"
        )
        assert len(str(caught.value)) < 500
    if kind in ("chunked", "told"):
        async with asking(dialect, endless(kind)) as storage:
            with pytest.raises(Corrupt, match=r"commits/1 is longer than \d+ bytes.*restore it"):
                await asyncio.wait_for(storage.get("commits/1"), 60)


STORAGES = ["local", "memory", "objects", "cached", "fsspec"]


@contextlib.asynccontextmanager
async def storage_of(kind: str, tmp_path: Any) -> AsyncIterator[Storage]:
    name = str(uuid.uuid4())
    made: Storage
    match kind:
        case "local":
            made = LocalStorage(tmp_path)
        case "memory":
            made = MemoryStorage(name)
        case "objects":
            made = as_remote(MemoryStorage(name))
        case "cached":
            made = CachedStorage(LocalStorage(tmp_path / "store"), Cache(tmp_path / "cache"), "x")
        case _:
            made = connect(f"memory2://{name}")
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize("kind", STORAGES[:-1])
async def test_every_storage_stops_at_the_bound(kind: str, tmp_path: Any) -> None:
    async with storage_of(kind, tmp_path) as storage:
        bounds = {"tstore.json": 4 << 10, "latest": 64, "commits/1": 8 << 20, "txn/a/alive-0": 4 << 10}
        for key, most in bounds.items():
            await storage.replace(key, bytes(most))
            assert len(await storage.get(key)) == most
            await storage.replace(key, bytes(most + 1))
            with pytest.raises(Corrupt, match=f"{key} is longer than {most} bytes") as caught:
                await storage.get(key)
            assert len(str(caught.value)) < 500
        with pytest.raises(Corrupt, match="is longer than"):
            await storage.leading(["commits/1"])
        await storage.replace("commits/2", b"tstoreR\2" + bytes(9 << 20))  # the record of a gc may be longer
        assert len(await storage.get("commits/2")) == 8 + (9 << 20)
        await storage.replace("txn/a/manifest-1", bytes(100))
        assert len(await storage.get("txn/a/manifest-1", 100)) == 100
        with pytest.raises(Corrupt, match="is longer than 99 bytes"):
            await storage.get("txn/a/manifest-1", 99)


async def test_objects_share_a_bounded_amount_of_memory() -> None:
    """Beyond the free bytes of each object, only one proceeds once the shared room is taken."""
    taken: list[int] = []
    held = asyncio.Event()

    async def receive(number: int) -> None:
        taken.append(0)
        async with ResponseMemory() as memory:
            while taken[number] < 100 << 20:
                if not memory.take(FREE_BYTES):
                    await memory.wait()
                taken[number] += FREE_BYTES
                await asyncio.sleep(0)
            if number == 0:
                await held.wait()

    tasks = [asyncio.ensure_future(receive(number)) for number in range(40)]
    for _ in range(500):
        await asyncio.sleep(0)
    assert sum(taken) <= 40 * FREE_BYTES + SHARED_BYTES + (100 << 20)
    assert taken[0] == 100 << 20
    held.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert taken == [100 << 20] * 40


async def test_a_cancelled_receiver_releases_its_memory() -> None:
    async def receive(size: int) -> None:
        async with ResponseMemory() as memory:
            if not memory.take(size):
                await memory.wait()
            await asyncio.Event().wait()

    first = asyncio.ensure_future(receive(SHARED_BYTES))
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(receive(SHARED_BYTES)) for _ in range(3)]
    await asyncio.sleep(0)
    others[0].cancel()
    first.cancel()
    await asyncio.wait([first, others[0]])

    async def later() -> None:
        async with ResponseMemory() as memory:
            if not memory.take(2 * FREE_BYTES):
                await memory.wait()

    waiting = asyncio.ensure_future(later())
    for task in others[1:]:
        task.cancel()
    await asyncio.wait_for(waiting, 10)
    await asyncio.wait(others)


# ---- lists


def page_of(dialect: Callable[[str], Storage], names: list[str], more: str | None) -> bytes:
    """Return a page of a list in the format of each server."""
    if dialect is http:
        listed = {"entries": [{"key": name, "size": 1} for name in names], "folders": [], "next": more}
        return ok(json.dumps(listed).encode(), OURS, "Content-Type: application/json")
    if dialect is gcs:
        items = [{"name": f"x/{name}", "size": "1"} for name in names]
        return ok(json.dumps({"items": items, **({"nextPageToken": more} if more else {})}).encode())
    entries = "".join(f"<Contents><Key>x/{name}</Key><Size>1</Size></Contents>" for name in names)
    token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    truncated = "true" if more else "false"
    body = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{token}{entries}</ListBucketResult>"
    return ok(f"<?xml version='1.0'?>{body}".encode(), "Content-Type: application/xml")


def asked_page(request: Request) -> str:
    query = parse_qs(urlsplit(request.path).query)
    return (query.get("after") or query.get("pageToken") or query.get("continuation-token") or [""])[0]


def pages(dialect: Callable[[str], Storage], page: Callable[[int], list[str]]) -> RawResponse:
    """Return a list whose every page announces another."""

    def response(request: Request) -> bytes:
        if "/-/health" in request.path:
            return ok(b"", OURS)
        number = int(asked_page(request).lstrip("p") or 0) + 1
        return page_of(dialect, page(number), f"p{number:09d}")

    return response


Listing = Callable[[RemoteStorage], Awaitable[object]]
LISTS: list[Listing] = [lambda b: b.list("p"), lambda b: b.folders("p"), lambda b: b.age("p")]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("listing_of", LISTS, ids=["list", "folders", "age"])
@pytest.mark.parametrize("names", [[], ["p/a"]], ids=["empty", "the-same"])
async def test_a_list_without_new_names_ends(
    dialect: Callable[[str], Storage], listing_of: Listing, names: list[str], thresholds: Thresholds
) -> None:
    thresholds(EMPTY_PAGES=10)
    async with asking(dialect, pages(dialect, lambda number: names)) as storage:
        with pytest.raises(Corrupt, match="no new name for 10 pages"):
            await asyncio.wait_for(listing_of(storage), 60)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_endless_list_of_new_names_ends(
    dialect: Callable[[str], Storage], thresholds: Thresholds
) -> None:
    thresholds(LISTING_BYTES=100_000)

    def page(number: int) -> list[str]:
        return [f"p{number:09d}-{i:03d}" for i in range(100)]

    async with asking(dialect, pages(dialect, page)) as storage:
        with pytest.raises(Corrupt, match=r"longer than 100000 bytes \(\d+ names\)"):
            await asyncio.wait_for(storage.list("p"), 60)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_list_that_is_too_slow_ends(dialect: Callable[[str], Storage], thresholds: Thresholds) -> None:
    thresholds(LISTING_GRACE=0.2, LISTING_RATE=1_000_000)  # more than one name per page reaches

    def page(number: int) -> list[str]:
        return [f"p{number:09d}"]

    async with asking(dialect, pages(dialect, page)) as storage:
        with pytest.raises(Unavailable, match=r"only \d+ names after .* too slow"):
            await asyncio.wait_for(storage.list("p"), 60)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_retried_list_ends_too(dialect: Callable[[str], Storage], thresholds: Thresholds) -> None:
    thresholds(EMPTY_PAGES=10)
    async with serving(pages(dialect, lambda number: ["p/a"])) as server:
        storage = as_remote(dialect(server.url))
        with pytest.raises(Corrupt, match="no new name"):
            await asyncio.wait_for(storage.list("p"), 60)
        await storage.close()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_names_outside_the_prefix_are_refused(dialect: Callable[[str], Storage]) -> None:
    async with asking(dialect, pages(dialect, lambda number: ["other/a"])) as storage:
        with pytest.raises(Corrupt, match="requested"):
            await asyncio.wait_for(storage.list("p/"), 60)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("body", [b"[" * 100, b" " * 1000, b"<a/>" * 100])
async def test_an_endless_page_is_given_up(dialect: Callable[[str], Storage], body: bytes) -> None:
    chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n"

    async def response(request: Request) -> bytes | None:
        if "/-/health" in request.path:
            return ok(b"", OURS)
        request.writer.write(HEAD)
        await writing(request, chunk * 600)
        return None

    async with asking(dialect, response) as storage:
        with pytest.raises(Corrupt):
            await asyncio.wait_for(storage.list("p"), 60)


# ---- error responses


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("status", ["500 No", "403 No", "404 No"])
async def test_an_endless_error_response_is_reported_by_its_status(
    dialect: Callable[[str], Storage], status: str
) -> None:
    begin = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    first = [ok(b"", OURS)] if dialect is http else []
    async with asking(dialect, *first, again(begin, b"10000\r\n" + b"x" * 0x10000 + b"\r\n")) as storage:
        if dialect is http:
            await storage.size("k")
        calls = [storage.get("k"), storage.create("k", b"x", Durability.FSYNC)]
        for call in calls if status == "404 No" else [*calls, storage.delete("k")]:
            with pytest.raises(TStoreError) as caught:
                await asyncio.wait_for(call, 60)
            assert len(str(caught.value)) < 1000


async def test_each_kind_of_object_keeps_its_own_bound() -> None:
    objects = MemoryStorage(str(uuid.uuid4()))
    await on_io(objects.put("k", [b"12345"], PutMode.CREATE))
    assert await on_io(objects.get("k", max_size=5)) == b"12345"
    with pytest.raises(Corrupt, match="longer than 4 bytes"):
        await on_io(objects.get("k", max_size=4))


# ---- one call with many requests


async def silent(silence: float) -> str:
    """Return the error of a request to a silent server."""
    within = Deadline(silence)
    with pytest.raises(TimeoutError):
        async with within:
            await asyncio.Event().wait()
    return within.message


@on_virtual_time
async def test_all_attempts_of_a_call_share_one_deadline(impatient: None) -> None:
    with one_call(0.7) as call:
        said = [await silent(0.2)]  # plus 0.2 s for the connection
        assert call.remaining <= 0.3
        said += [await silent(0.2)]
        assert call.remaining <= 0
        assert "no complete response within 0.7 s, in all attempts" in said[-1]
    assert "silent for 0.2 s" in await silent(0.2), "which is the limit of a request, not of the call"


@on_virtual_time
async def test_a_body_above_the_minimum_rate_may_outlast_the_deadline_of_its_call(impatient: None) -> None:
    clock = asyncio.get_running_loop().time
    with one_call(0.4) as call:
        async with Deadline(0.4) as within:
            began = clock()
            while clock() < began + 1.0:
                await asyncio.sleep(0.01)
                within.extend(1000)
        assert call.remaining > 0


@on_virtual_time
async def test_a_longer_timeout_of_the_caller_extends_the_deadline_of_a_call(impatient: None) -> None:
    with one_call(0.1) as call:
        assert "silent for 0.3 s" in await silent(0.3)
        assert call.remaining < 0, "so that nothing is repeated"


class Silent(MemoryStorage):
    """Does not respond; requests end at their deadline."""

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        raise Unavailable(await silent(0.3))


async def test_retries_belong_to_one_call(impatient: None) -> None:
    brisk = RetryPolicy(min_pause=0.001, max_pause=0.001, deadline=0.3, first_deadline=0.3)
    with pytest.raises(Unavailable, match=r"within 0\.3 s, in all attempts"):
        await as_remote(Silent(str(uuid.uuid4())), brisk).get("tstore.json")


# ---- abandoned calls


async def test_a_call_cancelled_in_the_queue_ends_no_thread() -> None:
    workers = Workers(1, "test")
    begun, going = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        going.wait(60)

    first, second = workers.submit(busy), workers.submit(lambda: None)
    assert begun.wait(60)
    assert second.cancel()
    going.set()
    assert workers.submit(lambda: 5).result(60) == 5
    assert first.result(60) is None
    await asyncio.wait_for(asyncio.to_thread(workers.drain), 60)


# ---- many long objects


LONG_RECORD = b"tstoreR\2" + bytes(COLLECTION_BYTES - 8)


class Held(MemoryStorage):
    """Has records of the maximum length of a gc's, and counts those in flight and in memory at once."""

    held = most_held = 0

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        if not key.startswith("commits/"):
            return await super().get(key, max_size)
        if max_size is not None and max_size < len(LONG_RECORD):
            raise overlong(key, max_size)
        self.held += 1
        self.most_held = max(self.held, self.most_held)
        await asyncio.sleep(0.01)
        self.held -= 1
        return LONG_RECORD


async def test_long_records_are_read_one_at_a_time() -> None:
    objects = Held(str(uuid.uuid4()))
    log = LogReader(as_remote(objects))
    results = await asyncio.gather(*[log.record(version) for version in range(1, 33)], return_exceptions=True)
    assert {type(error) for error in results} == {Corrupt}
    assert objects.most_held == 1


async def test_long_objects_are_not_read_ahead() -> None:
    objects = Held(str(uuid.uuid4()))
    keys = [f"commits/{version:020d}" for version in range(1, 33)]
    read, hole, cut, _ = await as_remote(objects).leading(keys)
    assert ([len(data) for data in read], hole, cut) == ([COLLECTION_BYTES] * 2, False, True)
    assert objects.most_held == 1


@pytest.mark.parametrize("kind", ["local", "objects"])
async def test_short_objects_are_read_together_and_long_ones_in_small_groups(kind: str, tmp_path: Any) -> None:
    sizes = [100, 20 << 20, 20 << 20, 100, 100]
    async with storage_of(kind, tmp_path) as storage:
        keys = [f"commits/{number}" for number in range(7)]
        for key, size in zip(keys, sizes, strict=False):
            await storage.create(key, b"tstoreR\2" + bytes(size), Durability.NONE)
        first = await storage.leading(keys)
        assert ([len(data) - 8 for data in first.objects], first.truncated) == (sizes[:3], True)
        rest = await storage.leading(keys[3:])
        assert ([len(data) - 8 for data in rest.objects], rest.hole, rest.truncated) == (sizes[3:], False, False)

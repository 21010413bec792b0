"""Stores in public buckets and behind CDNs, whose servers forbid what does not exist."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from aiohttp import web

import tstore
from tests.support import web_server
from tests.support.gcs_endpoint import Endpoint as GcsEndpoint
from tests.support.gcs_endpoint import Fault, Wrong
from tests.support.s3_endpoint import Endpoint as S3Endpoint
from tests.support.s3_endpoint import error as s3_error
from tstore.core.storage.objects import Durability
from tstore.errors import Denied, InvalidArgument, NotFound, TStoreError


class Public:
    """A bucket that forbids what does not exist, and what it `hides`, to readers."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        self.options = options
        self.hides = re.compile("nothing")
        self.is_public = False

    def forbids(self, key: str, names: Any) -> bool:
        return self.is_public and (key not in names or self.hides.search(key) is not None)


@contextlib.asynccontextmanager
async def s3() -> AsyncIterator[Public]:
    async with S3Endpoint().running() as endpoint:
        public = Public("s3://checkpoints/run", endpoint.options())

        def refuse(request: web.Request) -> web.Response | None:
            key = request.match_info["path"].partition("/")[2]
            return s3_error(403, "AccessDenied") if public.forbids(key, endpoint.objects) else None

        endpoint.refuse = refuse
        yield public


@contextlib.asynccontextmanager
async def gcs(status: int) -> AsyncIterator[Public]:
    endpoint = GcsEndpoint()
    async with endpoint.running():
        bucket = endpoint.new_bucket()
        public = Public(f"gs://{bucket}/run", {"endpoint_url": endpoint.url, "token": "anon"})

        def faults(request: web.Request) -> Fault | None:
            key = unquote(request.rel_url.raw_path).partition("/o/")[2]
            forbidden = public.forbids(key, endpoint.buckets[bucket])
            return Fault(Wrong.REFUSED, status, reason="forbidden") if forbidden else None

        endpoint.faults = faults
        yield public


@contextlib.asynccontextmanager
async def cdn() -> AsyncIterator[Public]:
    """A server of files in front of the bucket of `s3`, with another URL and without options."""
    async with S3Endpoint().running() as endpoint:
        public = Public("s3://checkpoints/run", endpoint.options())

        async def respond(request: web.Request) -> web.StreamResponse:
            key = request.match_info["path"]
            if public.forbids(key, endpoint.objects):
                return s3_error(403, "AccessDenied")
            data, headers = endpoint.objects[key], {"Accept-Ranges": "bytes"}
            if (asked := request.http_range).start is None:
                return web.Response(body=data, headers=headers)
            part = data[asked]
            headers["Content-Range"] = f"bytes {asked.start}-{asked.start + len(part) - 1}/{len(data)}"
            return web.Response(status=206, body=part, headers=headers)

        async with web_server.serving(respond) as url:
            public.options["cdn"] = f"{url}/run"
            yield public


PublicStore = tuple[Public, tstore.Store, str, dict[str, Any]]


@pytest.fixture(params=["s3", "gcs-403", "gcs-401", "cdn"])
async def public(
    request: pytest.FixtureRequest,
) -> AsyncIterator[PublicStore]:
    """The bucket, a writer of a store in it, and the URL and the options of its readers."""
    kind, _, status = request.param.partition("-")
    async with {"s3": s3, "cdn": cdn, "gcs": lambda: gcs(int(status))}[kind]() as made:
        url, options = made.options.pop("cdn", made.url), made.options
        async with await tstore.open(made.url, storage_options=options) as writer:
            for step in range(3):
                await tstore.save(writer, tree(step), step=step)
            yield made, writer, url, {} if kind == "cdn" else options


def tree(step: int) -> dict[str, Any]:
    return {"w": np.full(5000, step, "f4"), "b": np.full(3, step, "f4")}


async def test_a_reader_takes_what_is_forbidden_for_absent(public: PublicStore) -> None:
    bucket, writer, url, options = public
    bucket.is_public = True
    async with await tstore.open(url, "r", storage_options=options) as store:
        assert await tstore.steps(store) == [0, 1, 2]
        assert (await tstore.restore(store))["w"].tolist() == [2] * 5000
        assert [c.version async for c in store.history()] == [3, 2, 1]
        bucket.is_public = False
        await tstore.save(writer, tree(3), step=3)
        bucket.is_public = True
        assert await tstore.steps(store) == [0, 1, 2, 3]
        assert store.traffic is not None
        assert store.traffic.requests["get"]
        with pytest.raises(NotFound, match="absent"):
            await (await store.snapshot()).array("absent")


async def test_a_reader_that_may_read_nothing_any_more_is_told(public: PublicStore) -> None:
    bucket, _, url, options = public
    bucket.is_public = True
    async with await tstore.open(url, "r", storage_options=options) as store:
        assert await tstore.steps(store) == [0, 1, 2]
        bucket.hides = re.compile("")
        with pytest.raises(Denied):  # not steps 0 to 2, as if they were the newest
            await store.snapshot()
        with pytest.raises(Denied):
            await tstore.open(url, "r", storage_options=options)


async def test_a_forbidden_object_of_a_version_is_named(public: PublicStore) -> None:
    bucket, _, url, options = public
    bucket.is_public, bucket.hides = True, re.compile("/pack-")
    async with await tstore.open(url, "r", storage_options=options) as store:
        with pytest.raises(TStoreError, match="pack-"):
            await tstore.restore(store)


async def test_a_writer_never_takes_what_is_forbidden_for_absent(public: PublicStore) -> None:
    bucket, _, url, options = public
    bucket.is_public = True
    for mode in ("r+", "a"):
        async with await tstore.open(url, mode, storage_options=options) as store:
            with pytest.raises(Denied):
                await tstore.save(store, tree(3), step=3)
    bucket.is_public = False
    async with await tstore.open(bucket.url, "r", storage_options=bucket.options) as store:
        assert [c.version async for c in store.history()] == [3, 2, 1]
        storage = store.log.storage
        for write in (
            storage.create("k", b"", Durability.FSYNC),
            storage.replace("k", b""),
            storage.delete("commits/00000000000000000001"),
        ):
            with pytest.raises(Denied, match="opened for reading"):
                await write


async def test_a_store_that_only_a_server_of_files_holds_is_read_in_every_mode() -> None:
    async with cdn() as bucket:
        url = bucket.options.pop("cdn")
        async with await tstore.open(bucket.url, storage_options=bucket.options) as writer:
            await tstore.save(writer, tree(0), step=0)
        bucket.is_public = True
        async with await tstore.open(url) as store:
            assert await tstore.steps(store) == [0]
            with pytest.raises(Denied):
                await tstore.save(store, tree(1), step=1)


@pytest.mark.parametrize("kind", ["s3", "gcs"])
@pytest.mark.parametrize("mode", ["r", "a"])
async def test_a_bucket_that_was_deleted_under_an_open_store_is_named(kind: str, mode: Any) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if kind == "s3":
            amazon = await stack.enter_async_context(S3Endpoint().running())
            url, options = "s3://checkpoints/run", amazon.options()
        else:
            google = GcsEndpoint()
            await stack.enter_async_context(google.running())
            url, options = f"gs://{google.new_bucket()}/run", {"endpoint_url": google.url, "token": "anon"}
        async with await tstore.open(url, storage_options=options) as writer:
            await tstore.save(writer, tree(0), step=0)
        store = await stack.enter_async_context(await tstore.open(url, mode, storage_options=options))
        assert await tstore.steps(store) == [0]
        if kind == "s3":
            amazon.bucket_exists = False
        else:
            google.buckets.clear()
        calls = [store.snapshot, lambda: tstore.restore(store), store.verify, lambda: tstore.steps(store)]
        if mode == "a":
            calls += [lambda: tstore.save(store, tree(1), step=1), store.collect]
        for call in calls:
            with pytest.raises(InvalidArgument, match=r"bucket .* does not exist"):
                await call()

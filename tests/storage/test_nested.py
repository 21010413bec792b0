"""Stores inside stores, which are refused when they are created, in buckets and through servers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support import gcs_endpoint, http_server, s3_endpoint
from tests.support.file_systems import Exclusive, register
from tstore import Keep
from tstore.core.storage.connect import connect
from tstore.errors import InvalidArgument, NotAStore
from tstore.service.server import Server


async def test_a_store_inside_a_store_of_a_file_system_is_refused(tmp_path: Path) -> None:
    register(Exclusive)
    url = f"exclusive://{tmp_path}/runs"
    await (await tstore.open(url, "x")).close()
    for inner in (f"{url}/1", f"{url}/a/b"):
        with pytest.raises(InvalidArgument, match=f"{inner} is inside the store {url}, whose verify"):
            await tstore.open(inner)
    await (await tstore.open(f"{url}-2", "x")).close()


@pytest.fixture(params=["gcs", "s3"])
async def bucket(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, dict[str, Any], Any]]:
    """Yield the URL of a bucket, the options for it, and its server."""
    async with contextlib.AsyncExitStack() as running:
        if request.param == "gcs":
            gcs = await running.enter_async_context(gcs_endpoint.Endpoint().running())
            yield f"gs://{gcs.new_bucket()}", {"endpoint_url": gcs.url, "token": "anon"}, gcs
        else:
            s3 = await running.enter_async_context(s3_endpoint.Endpoint().running())
            yield f"s3://{s3_endpoint.BUCKET}", s3.options(), s3


@pytest.mark.parametrize("outer", ["", "/runs", "/runs/ensemble"])
async def test_a_store_inside_a_store_of_a_bucket_is_refused(
    outer: str, bucket: tuple[str, dict[str, Any], Any]
) -> None:
    url, options, _ = bucket
    async with await tstore.open(url + outer, "x", storage_options=options) as store:
        other = await tstore.open(f"memory://{outer}{url}", "x")
        for inner in (f"{url}{outer}/1", f"{url}{outer}/a/b/c"):
            with pytest.raises(InvalidArgument, match=f"{inner} is inside the store {url}{outer}, whose verify"):
                await tstore.open(inner, storage_options=options)
            with pytest.raises(InvalidArgument, match="is inside the store"):
                await tstore.copy(other, inner, storage_options=options)
        assert await store.log.storage.list("") == ["tstore.json"]
    for beside in (f"{url}{outer}-2", f"{url}/other") if outer else ():
        await (await tstore.open(beside, "x", storage_options=options)).close()
    if outer:
        with pytest.raises(NotAStore, match="contains other files"):
            await tstore.open(url, storage_options=options)


async def test_who_may_not_see_the_folders_above_creates_a_store(bucket: tuple[str, dict[str, Any], Any]) -> None:
    url, options, server = bucket
    if isinstance(server, s3_endpoint.Endpoint):
        refusal = s3_endpoint.error(403, "AccessDenied")
        server.refuse = lambda request: None if "mine" in request.path_qs else refusal
    else:
        fault = gcs_endpoint.Fault(gcs_endpoint.Wrong.REFUSED, status=403)
        server.faults = lambda request: None if "mine" in request.path_qs or request.method == "POST" else fault
    await (await tstore.open(f"{url}/mine/1", "x", storage_options=options)).close()


async def test_a_server_of_a_folder_inside_a_store_creates_none(tmp_path: Path) -> None:
    await tstore.open(tmp_path / "runs", "x")
    async with Server(tmp_path / "runs" / "1") as server:
        with pytest.raises(InvalidArgument, match="inside another store; serve one beside it"):
            await tstore.open(server.url, "x")
    async with Server(tmp_path / "other") as server:
        await (await tstore.open(server.url, "x")).close()


@pytest.mark.parametrize("kind", ["folder", "bucket"])
async def test_a_collection_through_a_server_deletes_what_exists(kind: str, tmp_path: Path) -> None:
    """The server removes the folder of a transaction with its last object."""
    url = str(tmp_path / "served") if kind == "folder" else f"memory://{tmp_path}"
    async with Server(url, access=http_server.everybody()) as server:
        store = await tstore.open(server.url, storage_options={"token": http_server.ADMIN})
        for step in range(4):
            await tstore.save(store, {"w": np.random.default_rng(step).random(3000)}, step)
        behind = connect(url)
        await behind.replace("txn/died/alive-00000-of-00002", b'{"name":"x","time":1.0}')
        before = set(await behind.list(""))
        await store.collect(Keep(last=1), abandoned=timedelta(0))
        gone = before - set(await behind.list(""))
        assert len(gone) == 4
        traffic = store.log.storage.traffic
        assert traffic is not None
        assert traffic.requests["delete"] == len(gone) + 1  # and one of a name that never existed, as a trial
        assert len(await behind.folders("txn/")) == 1
        await store.close()

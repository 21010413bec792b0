"""Stores in buckets of S3, on a real server of its protocol (moto)."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

import tstore
from tests.support import moto_server, processes
from tests.support.moto_server import BUCKET, S3Server
from tests.support.relay import Relay
from tstore.core.runtime.event_loops import on_io
from tstore.core.storage.objects import Page, PutMode
from tstore.core.storage.s3.store import S3Storage
from tstore.errors import AlreadyExists, Denied, InvalidArgument, NotAStore, TStoreError, Unavailable
from tstore.lab import conformance

CHECKS = {check.name: check for check in conformance.CHECKS}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server.running() as running:
        yield running


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
async def objects(server: S3Server, url: str) -> AsyncIterator[S3Storage]:
    made = S3Storage(url, **server.options)
    yield made
    await on_io(made.close())


@pytest.mark.parametrize("check", [c for c in conformance.CHECKS if c.name != "long_lists"], ids=str)
async def test_conformance(check: conformance.Check, server: S3Server, url: str) -> None:
    async with Relay.to(server.host, server.port) as relay:
        through = (
            moto_server.options(f"http://{relay.host}:{relay.port}") if check.name == "lost_replies" else None
        )
        given = through or server.options
        await check(conformance.Subject.from_url(url, given, relay=relay if through else None))


async def test_a_list_of_several_pages(server: S3Server) -> None:
    objects = S3Storage(f"s3://{BUCKET}/{moto_server.FULL}", **server.options)

    async def listed() -> list[Page]:
        return [page async for page in objects.pages("txn/1/")]

    pages = await on_io(listed())
    assert [len(page.entries) for page in pages] == [1000, 5]
    assert [e.key for page in pages for e in page.entries] == [f"txn/1/pack-{n:04d}" for n in range(1005)]
    await on_io(objects.close())


async def test_four_processes_save_one_checkpoint(server: S3Server, url: str) -> None:
    code = """
        import json, os, sys
        import numpy as np, s3fs
        import tstore.sync as tstore
        url, options = sys.argv[1], json.loads(sys.argv[2])
        pids = []
        for host in range(4):
            pids.append(os.fork())
            if pids[-1] == 0:
                rows = np.arange(host * 8000, (host + 1) * 8000, dtype="float32").reshape(8, 1000)
                index = slice(host * 8, host * 8 + 8), slice(0, 1000)
                shards = tstore.Shards((32, 1000), "float32", [(index, rows)])
                with tstore.open(url, storage_options=options) as store:
                    version = tstore.save(store, {"w": shards}, step=1, host=host, hosts=4, attempt="a")
                os.write(1, b"%d" % version)
                os._exit(0)
        for pid in pids:
            assert os.waitpid(pid, 0)[1] == 0
    """
    assert processes.python(code, url, json.dumps(server.options)) == "1" * 4
    async with await tstore.open(url, "r", storage_options=server.options) as store:
        assert (await store.verify()).ok
        restored = await tstore.restore(store)
    assert np.array_equal(restored["w"], np.arange(32_000, dtype="float32").reshape(32, 1000))


@pytest.mark.parametrize("end", ["", "del store; gc.collect()"])
def test_a_store_that_nobody_closed_ends_in_silence(server: S3Server, url: str, end: str) -> None:
    code = """
        import gc, json, sys
        import numpy as np
        import tstore.sync as tstore
        store = tstore.open(sys.argv[1], storage_options=json.loads(sys.argv[2]))
        tstore.save(store, {"w": np.ones(9)}, step=1)
        exec(sys.argv[3])
    """
    process = processes.start(code, url, json.dumps(server.options), end)
    with processes.running(process):
        assert process.communicate(timeout=processes.DEADLINE) == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize(
    "check", ["one_winner", pytest.param("one_winner_among_processes", marks=pytest.mark.deep)]
)
async def test_a_server_that_ignores_the_condition_is_refused(server: S3Server, url: str, check: str) -> None:
    def ignore(sent: bytes) -> bytes:
        return sent.replace(b"If-None-Match", b"X-Some-Header")

    async with Relay.to(server.host, server.port, ignore) as liar:
        given = moto_server.options(f"http://{liar.host}:{liar.port}")
        for mode in ("x", "a"):
            with pytest.raises(Denied, match="does not create exclusively"):
                await tstore.save(await tstore.open(url, mode, storage_options=given), {"x": 1}, 1)
        with pytest.raises(AssertionError, match="of 8 racing creates"):
            await CHECKS[check](conformance.Subject.from_url(url, given))
    async with await tstore.open(url, "x", storage_options=server.options):  # nothing of it was left
        pass


async def test_a_create_sent_twice_by_the_client_is_recognised(server: S3Server, url: str) -> None:
    async with Relay.to(server.host, server.port) as relay:
        made = S3Storage(url, **moto_server.options(f"http://{relay.host}:{relay.port}"))

        async def create(key: str) -> None:
            await made.put(key, [b"mine"], PutMode.CREATE)

        await on_io(create("before"))  # the connection is kept, and so the request is sent again
        with relay.losing("response"):
            await on_io(create("k"))
        assert relay.lost == 1
        with pytest.raises(AlreadyExists):
            await on_io(create("k"))
        await on_io(made.close())


async def test_the_suite_detects_a_create_that_does_not_recognise_itself(server: S3Server, url: str) -> None:
    def forget(sent: bytes) -> bytes:
        return sent.replace(b"x-amz-meta-tstore-put", b"x-amz-meta-something-")

    async with Relay.to(server.host, server.port, forget) as relay:
        given = moto_server.options(f"http://{relay.host}:{relay.port}")
        with pytest.raises(AssertionError, match="its own object as another's"):
            await CHECKS["lost_replies"](conformance.Subject.from_url(url, given, relay=relay))


async def test_the_errors_of_wrong_urls_and_options_are_clear(server: S3Server, url: str) -> None:
    async def fails(expected: type[TStoreError], match: str, where: str = url, **options: object) -> None:
        given = {**server.options, **options}
        with pytest.raises(expected, match=match) as raised:
            await asyncio.wait_for(tstore.open(where, storage_options=given), 60)
        assert "not-a-secret" not in f"{raised.value!r} {raised.value.__cause__!r}"

    await fails(InvalidArgument, "bucket nowhere does not exist", "s3://nowhere/x")
    await fails(InvalidArgument, "Invalid endpoint", endpoint_url="nonsense")
    await fails(InvalidArgument, "'secrets'.*expected .*secret", secrets="x")
    await fails(InvalidArgument, "s3://bucket", "s3://")
    await fails(InvalidArgument, "s3://bucket", "s3://key:secret@bucket/x")
    with pytest.raises(NotAStore, match=r"no tstore.json"):
        await tstore.open(url, "r", storage_options=server.options)


async def test_a_wrong_endpoint_is_unavailable(url: str) -> None:
    made = S3Storage(url, **moto_server.options("http://127.0.0.1:9"))
    with pytest.raises(Unavailable, match="endpoint"):
        await on_io(made.get("k"))
    await on_io(made.close())


async def test_without_credentials(server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    made = S3Storage(url, endpoint_url=server.endpoint)
    with pytest.raises(Denied, match="AWS_ACCESS_KEY_ID"):
        await on_io(made.get("k"))
    await on_io(made.close())


async def test_credentials_from_the_environment_suffice(
    server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    async with await tstore.open(url) as store:
        async with store.transaction() as tx:
            await (await tx.create_array("x", shape=(3,), dtype="int32")).write(np.arange(3, dtype="int32"))
    async with await tstore.open(url, "r") as store:
        assert (await (await (await store.snapshot()).array("x")).read()).tolist() == [0, 1, 2]


async def test_secrets_are_not_shown(
    server: S3Server, objects: S3Storage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tstore")
    caplog.set_level(logging.DEBUG, "s3fs")
    async with await tstore.open(objects.url, "x", storage_options=server.options) as store:
        with pytest.raises(AlreadyExists) as raised:
            await on_io(objects.put("tstore.json", [b"x"], PutMode.CREATE))
        shown = f"{objects!r} {store!r} {raised.value!r} {raised.value.__cause__!r}"
    assert "not-a-secret" not in caplog.text + shown

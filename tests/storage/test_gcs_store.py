"""Whole stores on Google Cloud Storage: many hosts, and a server with random faults."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

import tstore
from tests.support import forks, gcs
from tests.support.gcs_endpoint import Endpoint, Fault, Wrong
from tstore.core.storage.gcs.store import GcsStorage
from tstore.core.storage.remote import as_remote
from tstore.core.storage.retry import RetryPolicy
from tstore.errors import CommitOutcomeUnknown, Conflict, Denied, InvalidArgument, NotAStore, Unavailable

HOSTS = 8
ROWS = 4096


async def test_a_checkpoint_is_saved_and_restored(emulator: str) -> None:
    options = {"endpoint_url": emulator}
    tree = {"a": np.arange(300_000, dtype=np.float32), "b": {"c": np.ones((7, 5)), "d": np.float32(3)}}
    url = f"gs://{gcs.new_bucket(emulator)}/run 1"
    store = await tstore.open(url, storage_options=options)
    for step in (1, 2):
        await tstore.save(store, tree, step=step)
    await store.close()
    again = await tstore.open(f"{url}/", mode="r", storage_options=options)
    restored = await tstore.restore(again, step=2)
    assert np.array_equal(restored["a"], tree["a"])
    assert np.array_equal(restored["b"]["c"], np.ones((7, 5)))
    assert (await again.verify()).ok
    await again.close()


async def test_opening_a_store_reports_an_expired_token(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint()
    endpoint.token = "another"
    options = {"endpoint_url": "", "token": "ya29.secret"}
    with caplog.at_level("DEBUG"):
        async with endpoint.running():
            options["endpoint_url"] = endpoint.url
            for mode in ("r", "a", "x"):
                with pytest.raises(Denied, match="refused the credentials as wrong or expired") as raised:
                    await tstore.open(f"gs://{endpoint.new_bucket()}/run", mode=mode, storage_options=options)
                assert "secret" not in f"{raised.value!r} {raised.value.__cause__!r}"
    assert set(endpoint.shown) == {"Bearer ya29.secret"}
    assert caplog.records
    assert "ya29.secret" not in caplog.text


async def test_opening_a_store_reports_a_missing_bucket(emulator: str) -> None:
    for mode in ("r", "a", "x"):
        with pytest.raises(InvalidArgument, match="bucket nowhere does not exist"):
            await tstore.open("gs://nowhere/run", mode=mode, storage_options={"endpoint_url": emulator})
    url = f"gs://{gcs.new_bucket(emulator)}/run"
    with pytest.raises(NotAStore, match=rf"{url} is not a tstore store"):
        await tstore.open(url, mode="r", storage_options={"endpoint_url": emulator})


HOST = """
import os, numpy, tstore, tstore.sync
url, endpoint, host, hosts, rows = arguments
os.environ["STORAGE_EMULATOR_HOST"] = endpoint
mine = slice(host * rows // hosts, (host + 1) * rows // hosts)
part = numpy.full((rows // hosts, 256), host, "f4")
w = tstore.Shards((rows, 256), "float32", [((mine, slice(0, 256)), part)])
for step in (1, 2):
    tree = {"w": w, "step": step}
    version = tstore.sync.save(url, tree, step, host=host, hosts=hosts, attempt="a", timeout=50)
    os.write(out, f"{host} {step} {version}\\n".encode())
"""


async def test_eight_processes_save_one_checkpoint(
    emulator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, out = f"gs://{gcs.new_bucket(emulator)}/job", tmp_path / "out"
    with forks.forks(HOST, "gcsfs.core") as server:
        hosts = [server.start(out, url, emulator, host, HOSTS, ROWS) for host in range(HOSTS)]
        assert [server.wait(pid) for pid in hosts] == [0] * HOSTS
    told = Counter(tuple(line.split()[1:]) for line in out.read_text().splitlines())
    assert told == {("1", "1"): HOSTS, ("2", "2"): HOSTS}
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator)
    for step in (1, 2):
        restored = await tstore.restore(url, step)
        assert (restored["w"][:, 7] == np.repeat(np.arange(HOSTS), ROWS // HOSTS)).all()
        assert restored["step"] == step
    store = await tstore.open(url, mode="r")
    assert (await store.verify()).ok
    await store.close()


MORTAL = """
import numpy, tstore, tstore.sync
url, endpoint = arguments
store = tstore.sync.open(url, storage_options={"endpoint_url": endpoint})
big = {str(i): numpy.full((4, 1 << 20), i, "f4") for i in range(3)}  # 48 MiB: more than one pack
tstore.sync.save(store, big | {"step": 2}, 2)
"""


async def test_a_host_killed_during_a_save_leaves_the_old_version(tmp_path: Path) -> None:
    endpoint, stuck = Endpoint(), asyncio.Event()

    def second_pack_never_ends(request: web.Request) -> Fault | None:
        if request.method != "POST" or not any(asked.startswith("POST") for asked in endpoint.requests[:-1]):
            return None
        stuck.set()
        return Fault(Wrong.SILENT)

    async with endpoint.running():
        bucket = endpoint.new_bucket()
        url, options = f"gs://{bucket}/job", {"endpoint_url": endpoint.url}
        store = await tstore.open(url, storage_options=options)
        await tstore.save(store, {"step": 1}, 1)
        endpoint.requests.clear()
        endpoint.faults = second_pack_never_ends
        with forks.forks(MORTAL) as server:
            host = await asyncio.to_thread(server.start, tmp_path / "out", url, endpoint.url)
            await stuck.wait()
            os.kill(host, signal.SIGKILL)
            assert await asyncio.to_thread(server.wait, host) == -signal.SIGKILL
        endpoint.faults = lambda request: None
        packs = [name for name in endpoint.buckets[bucket] if "/pack-" in name]
        assert packs
        assert await tstore.steps(store) == [1]
        report = await store.collect(abandoned=timedelta(0))
        assert len(report.transactions) == 1
        assert not [name for name in endpoint.buckets[bucket] if name in packs]
        assert (await tstore.restore(store, 1))["step"] == 1
        assert (await store.verify()).ok
        await store.close()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(2, 20))])
async def test_no_acknowledged_commit_is_lost_among_faults(seed: int) -> None:
    endpoint = Endpoint()
    acknowledged: dict[str, int] = {}
    unknown: set[str] = set()

    async def opened(mode: tstore.Mode = "a") -> tstore.Store:
        objects = GcsStorage(url, endpoint_url=endpoint.url)
        return await tstore.open(as_remote(objects, policy=RetryPolicy(min_pause=0.001, max_pause=0.01)), mode)

    async def write(writer: int) -> None:
        store = await opened()
        for number in range(6):
            name = f"{writer}-{number}"
            try:
                async with store.transaction(message=name) as tx:
                    values = np.full(3000, 100 * writer + number, "i4")  # 12 kB: in a pack
                    array = await tx.create_array(f"mine/{name}", shape=(3000,), dtype="int32")
                    await array.write(values)
                    shared = await tx.array("shared")
                    await shared[writer : writer + 1].write(values[:1])  # in one chunk with the others'
                assert tx.version is not None
                acknowledged[name] = tx.version
            except CommitOutcomeUnknown:
                unknown.add(name)
            except (Unavailable, Conflict):
                pass
        await store.close()

    async with endpoint.running():
        url = f"gs://{endpoint.new_bucket()}/{uuid.uuid4()}"
        store = await opened()
        async with store.transaction() as tx:
            array = await tx.create_array("shared", shape=(4,), dtype="int32", fill_value=0)
            await array.write(np.zeros(4, "i4"))
        endpoint.faults = endpoint.chaos(seed, 0.2)
        await asyncio.gather(*map(write, range(4)))
        endpoint.faults = lambda request: None
        endpoint.release()
        await store.close()

        store = await opened("r")
        history = {commit.version: commit.message async for commit in store.history()}
        assert sorted(history) == list(range(1, max(history) + 1))
        times = Counter(history.values())
        assert acknowledged
        for name, version in acknowledged.items():
            assert (history[version], times[name]) == (name, 1)
        assert {m for m in times if m and "-" in m} <= acknowledged.keys() | unknown
        assert (await store.verify()).ok
        snapshot = await store.snapshot()
        for name in acknowledged:
            stored = await (await snapshot.array(f"mine/{name}")).read()
            writer, number = map(int, name.split("-"))
            assert (stored == 100 * writer + number).all()
        shared = await (await snapshot.array("shared")).read()
        for writer in range(4):
            done = [int(n.partition("-")[2]) for n in acknowledged if n.startswith(f"{writer}-")]
            assert not done or shared[writer] >= 100 * writer + max(done)
        await store.close()

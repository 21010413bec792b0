"""The order of the system calls of a commit, which makes it durable."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import numpy as np
import pytest

import tstore
from tests.support.http_server import MARKER, PACK, WRITE, client_of, everybody
from tests.support.polling import until
from tstore.core.format.layout import commit_key
from tstore.errors import DeadlineExceeded
from tstore.lab.conformance.faults import open_faulty
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Server


class CallLog:
    """The system calls in order, as (name, path)."""

    def __init__(self, top: Path) -> None:
        self.top = str(top)
        self.entries: list[tuple[str, str]] = []

    def add(self, name: str, path: str) -> None:
        path = os.path.realpath(path) if name == "fsync" else path
        relative = os.path.relpath(path, self.top)
        self.entries.append((name, relative))

    def first(self, name: str, match: Callable[[str], bool]) -> int:
        return next(i for i, (w, p) in enumerate(self.entries) if w == name and match(p))

    def last(self, name: str, match: Callable[[str], bool]) -> int:
        return max(i for i, (w, p) in enumerate(self.entries) if w == name and match(p))

    def count(self, name: str) -> int:
        return sum(w == name for w, _ in self.entries)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CallLog:
    log = CallLog(tmp_path)
    fsync, link, pwritev, mkdir, replace = os.fsync, os.link, os.pwritev, os.mkdir, os.replace

    def path_of(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def logged_fsync(fd: int) -> None:
        log.add("fsync", path_of(fd))
        fsync(fd)

    def logged_link(source: str, target: str) -> None:
        log.add("link", target)
        link(source, target)

    def logged_pwritev(fd: int, buffers: object, offset: int) -> int:
        log.add("write", path_of(fd))
        return pwritev(fd, buffers, offset)  # type: ignore[arg-type]

    def logged_mkdir(path: str, *more: int) -> None:
        log.add("mkdir", path)  # before: another thread may sync the parent as soon as the folder exists
        mkdir(path, *more)

    def logged_replace(source: str, target: str) -> None:
        log.add("replace", target)
        replace(source, target)

    for name, call in [
        ("fsync", logged_fsync),
        ("link", logged_link),
        ("pwritev", logged_pwritev),
        ("mkdir", logged_mkdir),
        ("replace", logged_replace),
    ]:
        monkeypatch.setattr(os, name, call)
    return log


def containing(text: str) -> Callable[[str], bool]:
    return lambda path: text in path


def check_order(calls: CallLog, store: str = "s") -> None:
    """Check that all bytes and names a record refers to are synced before its link, and that name after it."""
    record = calls.last("link", containing("/commits/"))
    for name, text in [("write", "/pack-"), ("write", "/commits/.")]:
        assert calls.last(name, containing(text)) < record
    for path in {p for w, p in calls.entries if w == "write" and "/pack-" in p}:
        synced = calls.last("fsync", lambda p, path=path: p == path)
        assert calls.last("write", lambda p, path=path: p == path) < synced < record
        folder = os.path.dirname(path)
        assert synced < calls.last("fsync", lambda p, folder=folder: p == folder) < record
    names = {p for w, p in calls.entries if w == "link" and "/commits/" not in p}
    for path in {p for p in names if "/merging-" not in p}:  # these only say who merges, and may get lost
        linked = calls.first("link", lambda p, path=path: p == path)
        folder = os.path.dirname(path)
        assert linked < calls.last("fsync", lambda p, folder=folder: p == folder)
        assert linked < record
    for path in {p for w, p in calls.entries if w == "mkdir"}:  # and every parent folder
        made = calls.first("mkdir", lambda p, path=path: p == path)
        assert made < record
        assert ("fsync", os.path.dirname(path) or ".") in calls.entries[made:record], path
    temporary = calls.last("write", containing("/commits/."))
    assert temporary < calls.last("fsync", containing("/commits/.")) < record
    assert record < calls.last("fsync", lambda p: p == f"{store}/commits")


async def test_a_save_into_a_new_store(calls: CallLog, tmp_path: Path) -> None:
    tree = {f"w{i}": np.random.default_rng(i).random(50_000) for i in range(40)}
    tree |= {f"b{i}": np.arange(3) for i in range(600)}  # enough for a separate manifest object
    await tstore.save(tmp_path / "deep" / "er" / "s", tree, 0)
    assert any(w == "link" and "/manifest-" in p for w, p in calls.entries)
    check_order(calls, "deep/er/s")


async def test_a_save_into_an_old_store(calls: CallLog, tmp_path: Path) -> None:
    await tstore.save(tmp_path / "s", {"w": np.zeros(50_000)}, 0)
    calls.entries.clear()
    await tstore.save(tmp_path / "s", {"w": np.ones(50_000)}, 1)
    assert not any(w == "link" and "/txn/" in p for w, p in calls.entries)  # only the flush syncs `txn`
    check_order(calls)


async def test_a_small_commit_is_one_durable_object(calls: CallLog, tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "s")
    async with store.transaction() as tx:
        await (await tx.create_array("a", (4,), "int8")).write(1)
    calls.entries.clear()
    async with store.transaction() as tx:
        await (await tx.array("a"))[1].write(2)
    assert [w for w, _ in calls.entries] == ["write", "fsync", "link", "fsync"]


async def test_a_server_names_only_durable_objects_as_existing(calls: CallLog, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    async with Server(tmp_path / "s", access=everybody()) as server, client_of(server, WRITE) as client:
        for key, data in [(PACK, b"123"), ("/tstore.json", MARKER)]:
            assert (await client.create(key, data)).status == 201
            calls.entries.clear()  # as if the server had died before it flushed the folder
            assert (await client.create(key, data)).status == 412
            assert calls.entries == [("fsync", os.path.normpath(f"s{os.path.dirname(key)}"))]


async def test_a_server_sends_only_durable_records(
    calls: CallLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose request to create one got no response reads it, and takes its commit for durable.

    The server that received the request was killed, or another process created the record.
    """
    store = await tstore.open(tmp_path / "s")

    async def is_synced_for(method: str, version: int) -> bool:
        calls.entries.clear()
        assert (await client(method, f"/{commit_key(version)}")).status == 200
        return ("fsync", "s/commits") in calls.entries

    async with store.transaction():
        pass
    async with Server(tmp_path / "s", access=everybody()) as server, client_of(server, WRITE) as client:
        assert await is_synced_for("GET", 1)
        assert not await is_synced_for("GET", 1)
        async with store.transaction():
            pass
        assert await is_synced_for("HEAD", 2)
        async with await tstore.open(server.url, storage_options={"token": WRITE}) as remote:
            async with remote.transaction():
                pass
        assert not await is_synced_for("GET", 3)
        async with store.transaction():
            pass
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "I/O error")))
            assert (await client("GET", f"/{commit_key(4)}")).status == 503
        assert await is_synced_for("GET", 4)
    async with Server(tmp_path / "s", mode="r", access=everybody()) as server, client_of(server, WRITE) as client:
        assert not await is_synced_for("GET", 4)


async def test_fragments_of_a_group_are_durable(calls: CallLog, tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "s")

    async def host(number: int) -> int:
        rows = slice(number * 1000, number * 1000 + 1000)
        part = tstore.Shards((2000, 10), "f8", [((rows, slice(0, 10)), np.full((1000, 10), float(number)))])
        return await tstore.save(store, {"w": part}, 0, host=number, hosts=2, attempt="a")

    calls.entries.clear()
    await asyncio.gather(host(0), host(1))
    check_order(calls)
    for number in range(2):
        part = calls.first("link", containing(f"/part-{number:05d}"))
        assert any(w == "fsync" and "/txn/" in p for w, p in calls.entries[part:])


async def test_a_host_that_finds_its_own_record_makes_its_name_durable(
    calls: CallLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host may have linked the record of the group without having synced the folder yet."""
    store, faults = await open_faulty(tmp_path / "s")
    tx = store.transaction()
    await (await tx.create_array("a", (4,), "int8")).write(1)
    faults.lose_reply("create", "commits/*")
    assert await tx.commit() == 1
    synced = [i for i, (w, p) in enumerate(calls.entries) if w == "fsync" and p == "s/commits"]
    assert len(synced) >= 2


async def test_a_copy_makes_the_names_of_its_records_durable(calls: CallLog, tmp_path: Path) -> None:
    """Those too that an interrupted copy had created and not yet synced."""
    store = await tstore.open(f"memory://{tmp_path.name}")
    for _ in range(2):
        async with store.transaction():
            pass
    await tstore.copy(store, tmp_path / "s")
    synced = calls.last("fsync", "s/commits".__eq__)
    assert calls.last("link", containing("/commits/")) < synced < calls.last("link", "s/tstore.json".__eq__)
    (tmp_path / "s/tstore.json").unlink()
    calls.entries.clear()
    await tstore.copy(store, tmp_path / "s")
    assert calls.first("fsync", "s/commits".__eq__) < calls.first("link", "s/tstore.json".__eq__)


async def test_without_durability_nothing_is_synced(calls: CallLog, tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "s", "x")
    calls.entries.clear()
    await tstore.save(store, {"w": np.zeros(50_000)}, 0, durability="none")
    async with store.transaction(durability="none") as tx:
        await (await tx.create_array("a", (4,), "int8")).write(1)
    assert calls.count("fsync") == 0
    assert calls.count("link") == 2


@pytest.mark.parametrize(("durability", "fsyncs"), [("none", 0), ("fsync", 2)])
async def test_a_void_record_is_as_durable_as_the_commit(
    durability: Literal["fsync", "none"], fsyncs: int, calls: CallLog, tmp_path: Path
) -> None:
    """If it were more durable than the commits below it, it would be above a gap after a power failure."""
    store, faults = await open_faulty(tmp_path / "s")
    async with store.transaction(durability=durability):
        pass
    calls.entries.clear()
    faults.postpone("create", "commits/*")
    async with store.transaction(durability=durability) as tx:
        pass
    assert tx.version == 3
    assert synced(calls, "s/commits") == fsyncs
    assert (await store.log.reader.record(2)).durable == (durability == "fsync")


async def test_only_the_hint_is_replaced_by_a_rename(calls: CallLog, tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "s")
    for _ in range(130):
        async with store.transaction(durability="none"):
            pass
    assert {p for w, p in calls.entries if w == "replace"} == {"s/latest"}


async def test_a_durable_commit_syncs_the_data_it_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step references chunks of an earlier one that was saved without fsync, so they must be flushed first."""
    entries: list[str] = []
    sync, link = os.sync, os.link
    monkeypatch.setattr(os, "sync", lambda: (entries.append("sync"), sync()))

    def logged_link(source: str, target: str) -> None:
        entries.append(Path(target).name)
        link(source, target)

    monkeypatch.setattr(os, "link", logged_link)
    store = await tstore.open(tmp_path / "store")
    frozen = np.arange(100_000.0)
    await tstore.save(store, {"frozen": frozen, "x": 0.0}, 0, durability="none")
    await tstore.save(store, {"frozen": frozen, "x": 1.0}, 1)
    await tstore.save(store, {"frozen": frozen, "x": 2.0}, 2)
    commits = [e for e in entries if e == "sync" or e.isdigit()]
    assert commits == [f"{1:020}", "sync", f"{2:020}", f"{3:020}"]


async def test_an_archive_is_as_durable_as_the_data_of_its_records(
    calls: CallLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collection expires nothing, so it has no record for which everything would be flushed."""
    monkeypatch.setattr(os, "sync", lambda: calls.add("sync", "."))
    store = await tstore.open(tmp_path / "s")
    with override_constants(ARCHIVE_EVERY=4, ROOT_EVERY=4):
        for _ in range(9):
            async with store.transaction(durability="none"):
                pass
        assert (await store.collect()).version is None
    archived = calls.first("link", containing("/archives/"))
    assert calls.first("sync", containing("")) < archived
    assert calls.first("fsync", containing("s/archives/.")) < archived


async def test_a_voided_record_is_saved_before_it_is_replaced(calls: CallLog, tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "s")
    for _ in range(2):
        async with store.transaction():
            pass
    await store.repair(void_intact=[2])
    replaced = calls.first("replace", containing("/commits/"))
    assert calls.first("link", containing("/damaged/")) < calls.first("fsync", "s/damaged".__eq__) < replaced


async def test_a_folder_whose_fsync_failed_is_synced_by_the_next_attempt(
    calls: CallLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await tstore.open(tmp_path / "s", "x")
    fsync, failures = os.fsync, [OSError(errno.EIO, "injected fault")]

    def failing(fd: int) -> None:
        if failures and os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / "s"):
            raise failures.pop()
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    calls.entries.clear()
    assert await store.transaction().commit() == 2  # above a void record
    assert not failures
    assert calls.first("fsync", "s".__eq__) < calls.first("link", containing("/commits/"))


def synced(calls: CallLog, path: str) -> int:
    """Return how often a file or folder was synced."""
    return calls.entries.count(("fsync", path))


async def group_member(store: tstore.Store, host: int, timeout: float = 20.0) -> int:
    """Commit as one of two hosts, and return their version."""
    tx = store.transaction(name="n", host=host, hosts=2, attempt="a")
    a = await tx.create_array("a", (4,), "int8", (2,))
    await a[2 * host : 2 * host + 2].write(host)
    return await tx.commit(timeout)


async def test_a_waiting_host_syncs_the_name_of_the_record(calls: CallLog, tmp_path: Path) -> None:
    """The host that created the record may have died before it synced the folder."""
    stores = [await tstore.open(tmp_path / "s") for _ in range(2)]
    waiting = asyncio.create_task(group_member(stores[0], 0))
    await until(lambda: stores[1].log.storage.list("txn/"), waiting)
    assert await group_member(stores[1], 1) == await waiting == 1
    record = calls.last("link", containing("/commits/"))
    assert calls.entries[record:].count(("fsync", "s/commits")) == 2


async def test_a_redelivered_fragment_is_made_durable(calls: CallLog, tmp_path: Path) -> None:
    """The host may have died in its first delivery, before the name was durable."""
    for _ in range(2):
        store = await tstore.open(tmp_path / "s")
        calls.entries.clear()
        with pytest.raises(DeadlineExceeded):
            await group_member(store, 1, 0.01)
        [folder] = (tmp_path / "s" / "txn").iterdir()
        assert synced(calls, f"s/txn/{folder.name}")


async def test_the_folder_of_a_transaction_that_was_collected_is_synced_again(
    calls: CallLog, tmp_path: Path
) -> None:
    """The hosts gave up, and repeat the transaction after another process collected it, and then another one."""
    stores = [await tstore.open(tmp_path / "s") for _ in range(2)]

    async def host(number: int, timeout: float, attempt: str = "a") -> int:
        tx = stores[number].transaction(name="n", host=number, hosts=2, attempt=attempt)
        a = await tx.create_array("a", (4000,), "f8", (2000,))
        await a[2000 * number : 2000 * number + 2000].write(np.full(2000, number))
        return await tx.commit(timeout)

    for number, attempt in itertools.product(range(2), "ab"):
        with pytest.raises(DeadlineExceeded):
            await host(number, 0.01, attempt)
        report = await (await tstore.open(tmp_path / "s")).collect(abandoned=timedelta(0))
        assert len(report.transactions) == 1
    calls.entries.clear()
    assert await asyncio.gather(*[host(number, 20.0) for number in range(2)]) == [5, 5]
    check_order(calls)


async def test_an_existing_commit_is_synced_before_its_report(calls: CallLog, tmp_path: Path) -> None:
    """By `finish`, by a repeated save, and by `outcome`: its creator may have died before it was durable."""
    store = await tstore.open(tmp_path / "s")

    def saved(host: int) -> Awaitable[int]:
        w = tstore.Shards((4,), "int8", [((slice(2 * host, 2 * host + 2),), np.full(2, host, "int8"))])
        return tstore.save(store, {"w": w}, 1, host=host, hosts=2, attempt="a")

    assert await asyncio.gather(saved(0), saved(1)) == [1, 1]
    [transaction] = [c.transaction async for c in store.history()]
    reports: list[Callable[[], Awaitable[int | None]]] = [
        lambda: store.finish(transaction),
        lambda: saved(1),
        lambda: store.outcome(transaction),
    ]
    for report in reports:
        calls.entries.clear()
        assert await report() == 1
        assert synced(calls, "s/commits")


async def test_an_existing_save_without_fsync_is_synced_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    sync = os.sync
    monkeypatch.setattr(os, "sync", lambda: (flushed.append("sync"), sync()))
    store = await tstore.open(tmp_path / "s")

    def saved(durability: Literal["fsync", "none"]) -> Awaitable[int]:
        whole = {"w": np.zeros(5000)}
        hosts = [
            tstore.save(store, whole, 1, host=h, hosts=2, attempt="a", durability=durability) for h in range(2)
        ]
        return asyncio.gather(*hosts)  # type: ignore[return-value]

    await saved("none")
    assert flushed == []
    assert await saved("fsync") == [1, 1]
    assert flushed == ["sync", "sync"]

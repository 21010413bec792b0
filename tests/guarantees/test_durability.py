"""What is durable, and when: the order of the system calls behind a commit."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import tstore
from tstore.errors import DeadlineExceeded


class Journal:
    """What was asked of the system, in order: (what, path)."""

    def __init__(self, top: Path) -> None:
        self.top = str(top)
        self.entries: list[tuple[str, str]] = []

    def add(self, what: str, path: str) -> None:
        path = os.path.realpath(path) if what == "fsync" else path
        relative = os.path.relpath(path, self.top)
        self.entries.append((what, relative))

    def first(self, what: str, match: Callable[[str], bool]) -> int:
        return next(i for i, (w, p) in enumerate(self.entries) if w == what and match(p))

    def last(self, what: str, match: Callable[[str], bool]) -> int:
        return max(i for i, (w, p) in enumerate(self.entries) if w == what and match(p))

    def count(self, what: str) -> int:
        return sum(w == what for w, _ in self.entries)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    calls = Journal(tmp_path)
    fsync, link, pwritev, mkdir, replace = os.fsync, os.link, os.pwritev, os.mkdir, os.replace

    def path_of(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def logged_fsync(fd: int) -> None:
        calls.add("fsync", path_of(fd))
        fsync(fd)

    def logged_link(source: str, target: str) -> None:
        calls.add("link", target)
        link(source, target)

    def logged_pwritev(fd: int, buffers: object, offset: int) -> int:
        calls.add("write", path_of(fd))
        return pwritev(fd, buffers, offset)  # type: ignore[arg-type]

    def logged_mkdir(path: str, *more: int) -> None:
        mkdir(path, *more)
        calls.add("mkdir", path)

    def logged_replace(source: str, target: str) -> None:
        calls.add("replace", target)
        replace(source, target)

    for name, call in [
        ("fsync", logged_fsync),
        ("link", logged_link),
        ("pwritev", logged_pwritev),
        ("mkdir", logged_mkdir),
        ("replace", logged_replace),
    ]:
        monkeypatch.setattr(os, name, call)
    return calls


def of(text: str) -> Callable[[str], bool]:
    return lambda path: text in path


def check_order(journal: Journal, store: str = "s") -> None:
    """Every byte and name that a record refers to is durable before the record has its name, and then that is."""
    record = journal.last("link", of("/commits/"))
    for what, text in [("write", "/pack-"), ("write", "/commits/.")]:
        assert journal.last(what, of(text)) < record
    for path in {p for w, p in journal.entries if w == "write" and "/pack-" in p}:
        synced = journal.last("fsync", lambda p, path=path: p == path)
        assert journal.last("write", lambda p, path=path: p == path) < synced < record
        folder = os.path.dirname(path)
        assert synced < journal.last("fsync", lambda p, folder=folder: p == folder) < record
    names = {p for w, p in journal.entries if w == "link" and "/commits/" not in p}
    for path in {p for p in names if "/merging-" not in p}:  # these only say who merges, and may be lost
        linked = journal.first("link", lambda p, path=path: p == path)
        folder = os.path.dirname(path)
        assert linked < journal.last("fsync", lambda p, folder=folder: p == folder)
        assert linked < record
    temporary = journal.last("write", of("/commits/."))
    assert temporary < journal.last("fsync", of("/commits/.")) < record
    assert record < journal.last("fsync", lambda p: p == f"{store}/commits")


async def test_a_save_into_a_new_store(journal: Journal, tmp_path: Path) -> None:
    tree = {f"w{i}": np.random.default_rng(i).random(50_000) for i in range(40)}
    tree |= {f"b{i}": np.arange(3) for i in range(600)}  # a manifest of its own
    await tstore.save(tmp_path / "deep" / "er" / "s", tree, 0)
    assert any(w == "link" and "/manifest-" in p for w, p in journal.entries)
    check_order(journal, "deep/er/s")
    record = journal.last("link", of("/commits/"))
    for what, path in list(journal.entries):
        if what == "mkdir":  # and every folder on the way to them
            parent = os.path.dirname(path) or "."
            assert journal.first("mkdir", lambda p, path=path: p == path) < record
            assert any(
                w == "fsync" and p == parent
                for w, p in journal.entries[journal.entries.index((what, path)) : record]
            ), path


async def test_a_save_into_an_old_store(journal: Journal, tmp_path: Path) -> None:
    await tstore.save(tmp_path / "s", {"w": np.zeros(50_000)}, 0)
    journal.entries.clear()
    await tstore.save(tmp_path / "s", {"w": np.ones(50_000)}, 1)
    check_order(journal)


async def test_a_small_commit_is_one_durable_object(journal: Journal, tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "s")
    async with store.transaction() as tx:
        await (await tx.create_array("a", (4,), "int8")).write(1)
    journal.entries.clear()
    async with store.transaction() as tx:
        await (await tx.array("a"))[1].write(2)
    assert [w for w, _ in journal.entries] == ["write", "fsync", "link", "fsync"]


async def test_a_group_delivers_durable_fragments(journal: Journal, tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "s")

    async def host(number: int) -> int:
        rows = slice(number * 1000, number * 1000 + 1000)
        part = tstore.Shards((2000, 10), "f8", [((rows, slice(0, 10)), np.full((1000, 10), float(number)))])
        return await tstore.save(store, {"w": part}, 0, host=number, hosts=2, attempt="a")

    journal.entries.clear()
    await asyncio.gather(host(0), host(1))
    check_order(journal)
    for number in range(2):
        part = journal.first("link", of(f"/part-{number:05d}"))
        assert any(w == "fsync" and "/txn/" in p for w, p in journal.entries[part:])


async def test_who_meets_its_own_record_makes_its_name_durable(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a group may be another's, who has linked it and not yet made the folder durable."""
    from tstore.conformance.faults import open_faulty

    store, faults = await open_faulty(tmp_path / "s")
    tx = store.transaction()
    await (await tx.create_array("a", (4,), "int8")).write(1)
    faults.lose_reply("create", "commits/*")
    assert await tx.commit() == 1
    synced = [i for i, (w, p) in enumerate(journal.entries) if w == "fsync" and p == "s/commits"]
    assert len(synced) >= 2


async def test_without_durability_nothing_is_forced(journal: Journal, tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "s")
    journal.entries.clear()
    await tstore.save(store, {"w": np.zeros(50_000)}, 0, durability="none")
    async with store.transaction(durability="none") as tx:
        await (await tx.create_array("a", (4,), "int8")).write(1)
    assert journal.count("fsync") == 0
    assert journal.count("link") == 2


async def test_nothing_is_renamed_over_but_the_hint(journal: Journal, tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "s")
    for _ in range(130):
        async with store.transaction(durability="none"):
            pass
    assert {p for w, p in journal.entries if w == "replace"} == {"s/latest"}


async def test_a_durable_commit_makes_durable_what_it_is_built_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a step that was saved without fsync are referenced by the next; so they must be flushed first."""
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


def synced(journal: Journal, path: str) -> int:
    """How often a file or folder was forced."""
    return journal.entries.count(("fsync", path))


async def group_member(store: tstore.Store, host: int, timeout: float = 20.0) -> int:
    """Deliver what one of two hosts has, and return the version of both."""
    tx = store.transaction(name="n", host=host, hosts=2, attempt="a")
    a = await tx.create_array("a", (4,), "int8", (2,))
    await a[2 * host : 2 * host + 2].write(host)
    return await tx.commit(timeout)


async def test_a_host_that_waits_makes_the_name_of_the_record_durable(journal: Journal, tmp_path: Path) -> None:
    """Who created it may have died in between."""
    stores = [await tstore.open(tmp_path / "s") for _ in range(2)]
    waiting = asyncio.create_task(group_member(stores[0], 0))
    while not await stores[1].log.storage.list("txn/"):  # noqa: ASYNC110 - nothing is told when it has delivered
        await asyncio.sleep(0)
    assert await group_member(stores[1], 1) == await waiting == 1
    record = journal.last("link", of("/commits/"))
    assert journal.entries[record:].count(("fsync", "s/commits")) == 2


async def test_a_fragment_that_is_delivered_again_is_made_durable(journal: Journal, tmp_path: Path) -> None:
    """The first delivery may have died before its name was."""
    for _ in range(2):
        store = await tstore.open(tmp_path / "s")
        journal.entries.clear()
        with pytest.raises(DeadlineExceeded):
            await group_member(store, 1, 0.01)
        [folder] = (tmp_path / "s" / "txn").iterdir()
        assert synced(journal, f"s/txn/{folder.name}")


async def test_a_commit_that_exists_is_durable_before_it_is_told_again(journal: Journal, tmp_path: Path) -> None:
    """By `finish`, by a repeated save of a host, and as an outcome; its creator may have died before it was."""
    store = await tstore.open(tmp_path / "s")

    def saved(host: int) -> Awaitable[int]:
        w = tstore.Shards((4,), "int8", [((slice(2 * host, 2 * host + 2),), np.full(2, host, "int8"))])
        return tstore.save(store, {"w": w}, 1, host=host, hosts=2, attempt="a")

    assert await asyncio.gather(saved(0), saved(1)) == [1, 1]
    [transaction] = [c.transaction async for c in store.history()]
    calls: list[Callable[[], Awaitable[int | None]]] = [
        lambda: store.finish(transaction),
        lambda: saved(1),
        lambda: store.outcome(transaction),
    ]
    for call in calls:
        journal.entries.clear()
        assert await call() == 1
        assert synced(journal, "s/commits")


async def test_a_save_that_exists_without_fsync_is_forced_when_it_is_asked_for(
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

"""Faulty folders, disks and files: each causes a clear error, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tstore
import tstore.core.store
from tests.support import processes
from tstore.errors import (
    AlreadyExists,
    Denied,
    InvalidArgument,
    Misuse,
    NotAStore,
    NotFound,
    StorageFull,
)

TREE = {"w": np.arange(100_000.0), "b": np.arange(3)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A store with step 0."""
    asyncio.run(tstore.save(tmp_path / "store", TREE, 0))
    return tmp_path / "store"


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


async def intact(store: Path) -> None:
    """Check that the store has the first step and nothing else."""
    restored = await tstore.restore(store, 0)
    for name, values in TREE.items():
        assert (restored[name] == values).all()
    assert await tstore.steps(store) == [0]
    assert (await (await tstore.open(store, "r")).verify()).ok


# ---- no store


async def test_an_empty_folder_becomes_a_store_only_when_asked(tmp_path: Path) -> None:
    with pytest.raises(NotAStore):
        await tstore.open(tmp_path, "r")
    assert list(tmp_path.iterdir()) == []
    store = await tstore.open(tmp_path, "x")
    assert (store.mode, store.url) == ("x", str(tmp_path))
    with pytest.raises(AlreadyExists, match="mode='a'"):
        await tstore.open(tmp_path, "x")
    assert (await tstore.open(tmp_path, "a")).uuid == store.uuid


async def test_a_store_must_exist_to_be_opened_for_reading_and_writing(tmp_path: Path) -> None:
    for url in (tmp_path, tmp_path / "typo", f"memory://{tmp_path}"):
        with pytest.raises(NotAStore):
            await tstore.open(url, "r+")
        with pytest.raises(NotAStore):
            await tstore.quantize(url, "e4m3")
    assert list(tmp_path.iterdir()) == []
    await tstore.save(tmp_path, {"w": np.ones(100)}, 0)
    async with await tstore.open(tmp_path, "r+") as store:
        assert store.mode == "r+"
        async with store.transaction() as tx:
            await tx.create_array("x", (2,), "int8")
    assert (await tstore.quantize(tmp_path, "e4m3")).version == 3


@pytest.mark.parametrize("mode", ["r", "r+", "a", "x"])
async def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, mode: tstore.core.store.Mode) -> None:
    (tmp_path / "model.bin").write_bytes(b"mine")
    with pytest.raises(NotAStore, match=str(tmp_path)):
        await tstore.open(tmp_path, mode)
    assert files(tmp_path) == {"model.bin"}


@pytest.mark.parametrize("mode", ["r", "a", "x"])
@pytest.mark.parametrize("below", ["", "/x"])
async def test_a_file_is_not_a_store(tmp_path: Path, mode: tstore.core.store.Mode, below: str) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"mine")
    with pytest.raises((NotAStore, NotFound), match=r"model\.bin"):
        await tstore.open(f"{path}{below}", mode)
    assert path.read_bytes() == b"mine"


# ---- a disk that cannot be written


async def test_a_read_only_file_system_is_denied(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    real = os.open

    def read_only(path: str, flags: int, *more: int, **keywords: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system", path)
        return real(path, flags, *more, **keywords)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(Denied, match="read-only"):
        await tstore.save(saved, {"x": np.zeros(1)}, 1)
    monkeypatch.undo()
    await intact(saved)


# ---- a full disk

FULL = """
    import json, resource, sys
    import numpy as np
    import tstore.sync as tstore
    url, limit, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = tstore.open(url)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    values = np.random.default_rng(0).integers(0, 255, size, "u1")
    try:
        tstore.save(store, {"x": values}, 1, codecs=json.loads(sys.argv[4]))
    except tstore.errors.TStoreError as error:
        print(type(error).__name__, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert (tstore.restore(store, 0)["b"] == np.arange(3)).all()
    print(tstore.steps(store))
"""


@pytest.mark.parametrize(
    ("limit", "size", "codecs"),
    [
        (1 << 20, 40_000_000, None),  # the pack
        (1 << 20, 40_000_000, [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 0}}]),
        (100, 1000, None),  # the record
        (5000, 20_000, None),
    ],
    ids=str,
)
def test_a_limit_of_file_size(saved: Path, limit: int, size: int, codecs: object) -> None:
    before = files(saved)
    told, after = processes.python(FULL, saved, limit, size, json.dumps(codecs)).splitlines()
    assert told.startswith("StorageFull")
    assert str(saved) in told
    assert "free space" in told
    assert after == "[0]"
    assert files(saved) == before  # the written space is released
    asyncio.run(intact(saved))
    assert asyncio.run(tstore.save(saved, TREE, 1)) == 2


def mounted(folder: Path, size: str) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A disk of 24 MiB, or None if this user may not mount one."""
    folder = tmp_path / "disk"
    there = mounted(folder, "24m")
    yield folder if there else None
    if there:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(small_disk: Path | None, saved: Path) -> None:
    """Without the permission to mount a disk, a limit on the file size replaces it."""
    if small_disk is None:
        told = processes.python(FULL, saved, 1 << 20, 40_000_000, "null")
        assert told.startswith("StorageFull")
        return
    store = small_disk / "store"
    shutil.copytree(saved, store)
    told, after = processes.python(FULL, store, 0, 40_000_000, "null").splitlines()
    assert told.startswith("StorageFull")
    assert after == "[0]"
    assert files(store) == files(saved)
    asyncio.run(intact(store))
    # small data still fits, although packs are allocated in larger extents
    assert processes.python(FULL, store, 0, 15_000_000, "null").splitlines() == ["[0, 1]"]


async def test_a_gc_on_a_disk_without_a_byte_says_what_it_needs(saved: Path) -> None:
    from tstore.lab.conformance.faults import open_faulty

    await tstore.save(saved, TREE, 1)
    before = files(saved)
    store, faults = await open_faulty(saved)
    faults.fail("create", "commits/*", error=StorageFull, times=10)
    with pytest.raises(StorageFull, match=r"Nothing was collected.*some KiB.*free that much"):
        await store.collect(tstore.Keep(last=1))
    assert files(saved) == before
    faults.clear_rules()
    assert (await store.collect(tstore.Keep(last=1))).versions == [1]


@pytest.mark.parametrize("operation", ["append", "finish", "create", "flush"])
@pytest.mark.parametrize("error", [StorageFull, Denied, tstore.errors.Unavailable])
async def test_any_write_that_fails_leaves_the_earlier_step(saved: Path, operation: str, error: type) -> None:
    from tstore.lab.conformance.faults import open_faulty

    store, faults = await open_faulty(saved)
    faults.fail(operation, "txn/*" if operation != "create" else "commits/*", error=error, times=10)
    before = files(saved)
    tree = {"x": np.random.default_rng(0).random(200_000)}
    with pytest.raises((error, tstore.errors.CommitOutcomeUnknown)):
        await tstore.save(store, tree, 1)
    faults.clear_rules()
    await intact(saved)
    if operation in ("append", "finish"):
        assert files(saved) == before
    assert await tstore.save(store, tree, 1) >= 2
    assert (await tstore.restore(saved, 1))["x"].tobytes() == tree["x"].tobytes()


async def test_too_many_open_files_are_named(saved: Path) -> None:
    told = processes.python(
        """
        import resource, sys
        import numpy as np
        import tstore.sync as tstore
        store = tstore.open(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 4096))
        try:
            tstore.save(store, {"x": np.zeros(100_000)}, 1)
        except tstore.errors.TStoreError as error:
            print(type(error).__name__, error)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
        print(tstore.steps(store))
        """,
        saved,
    )
    assert "ulimit -n" in told
    assert told.splitlines()[-1] == "[0]"
    await intact(saved)


# ---- calls at the wrong time or with invalid arguments


async def filled(url: Path) -> tstore.Store:
    """A store with an array "a" of ones, tagged "good"."""
    store = await tstore.open(url)
    async with store.transaction(tag="good") as tx:
        await (await tx.create_array("a", (4,), "int8")).write(1)
    return store


async def test_one_host_can_t_have_one_transaction_open_twice(tmp_path: Path) -> None:
    store = await filled(tmp_path)

    def opened(host: int = 0, attempt: str = "a") -> tstore.Transaction:
        return store.transaction(name="n", host=host, hosts=2, attempt=attempt)

    tx = opened()
    await (await tx.create_array("b", (2,), "int8")).write(1)
    with pytest.raises(Misuse, match="host 0 already has transaction 'n' open"):
        opened()
    others = [opened(1), opened(0, "b")]
    assert {t.ended for t in others} == {False}
    await tx.abort()
    assert not opened().ended


@pytest.mark.parametrize("timeout", [0, -1, -0.5, float("nan")])
async def test_an_invalid_timeout_is_refused_before_anything_is_done(tmp_path: Path, timeout: float) -> None:
    store = await filled(tmp_path)
    before = files(tmp_path)
    for hosts in (1, 2):
        with pytest.raises(InvalidArgument, match="timeout"):
            await tstore.save(store, TREE, 1, timeout=timeout, host=0, hosts=hosts, attempt="a")
        tx = store.transaction(name="n", host=0, hosts=hosts, attempt="a")
        await (await tx.create_array("b", (2,), "int8")).write(1)
        with pytest.raises(InvalidArgument, match="timeout"):
            await tx.commit(timeout)
        assert not tx.ended
        await tx.abort()
    assert files(tmp_path) == before


async def test_a_tag_that_is_taken_is_refused_unless_it_is_moved_by_name(tmp_path: Path) -> None:
    store = await filled(tmp_path)
    with pytest.raises(AlreadyExists, match=r"'good' already names version 1.*move_tag="):
        async with store.transaction(tag="good"):
            pass
    with pytest.raises(AlreadyExists, match="good"):
        await store.transaction(tag="good").create_array("b", (1,), "int8")
    assert (await store.snapshot()).version == 1
    async with store.transaction(tag="better", move_tag="good") as tx:
        await (await tx.array("a")).write(2)
    async with store.transaction(move_tag="new"):
        pass
    assert await store.tags() == {"better": 2, "good": 2, "new": 3}
    with pytest.raises(InvalidArgument, match="tag"):
        store.transaction(move_tag="12")
    with pytest.raises(InvalidArgument, match="passed twice"):
        store.transaction(tag="a", move_tag="a")


async def test_a_missing_tag_can_t_be_dropped(tmp_path: Path) -> None:
    store = await filled(tmp_path)
    with pytest.raises(NotFound, match=r"no tag 'god' to drop; its tags are: good"):
        async with store.transaction(drop_tag="god"):
            pass
    with pytest.raises(InvalidArgument, match="passed twice"):
        store.transaction(move_tag="good", drop_tag="good")
    with pytest.raises(InvalidArgument, match="without a name"):
        store.transaction(drop_tag="good", name="n", host=0, hosts=2, attempt="a")
    assert await store.tags() == {"good": 1}

"""Stores in special folders: without links, read-only, in tmpfs."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tstore
from tests.support import processes
from tstore.core.format import kernels
from tstore.core.format.bounds import ROOT_BYTES
from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.objects import Durability
from tstore.errors import AlreadyExists, Corrupt, Denied, InvalidArgument
from tstore.lab import conformance
from tstore.service.server.folder import ConfinedStorage

TREE = {"a": np.arange(1000.0), "b": {"c": np.ones((3, 4), np.float32)}}
IN_PROCESS = [check for check in conformance.CHECKS if check.name != "one_winner_among_processes"]


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "no links on this file system", target)

    monkeypatch.setattr(os, "link", refuse)


@pytest.fixture
def no_safe_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        """A libc without renameat2(2)."""

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Old())


@pytest.mark.usefixtures("no_links")
@pytest.mark.parametrize("check", IN_PROCESS, ids=str)
async def test_a_folder_without_links_conforms_too(check: conformance.Check, tmp_path: Path) -> None:
    await check(conformance.Subject.from_url(str(tmp_path)))


@pytest.mark.usefixtures("no_links", "no_safe_rename")
@pytest.mark.parametrize("mode", ["x", "a"])
async def test_a_folder_without_links_and_safe_renames_is_refused(tmp_path: Path, mode: tstore.Mode) -> None:
    with pytest.raises(Denied, match=r"neither link\(2\) nor renaming without replacing.*another file system"):
        await (await tstore.open(tmp_path / "s", mode)).transaction().paths()  # creates it if the mode is "a"
    assert list((tmp_path / "s").iterdir()) == []


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in memory (tmpfs)."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


async def test_a_store_in_tmpfs_works(shm: Path) -> None:
    findings = await conformance.run_checks(conformance.Subject.from_url(str(shm / "s")))
    assert [f for f in findings if f.outcome == "fails"] == []
    await tstore.save(shm / "s", TREE, step=1)
    assert np.array_equal((await tstore.restore(shm / "s"))["a"], TREE["a"])


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


async def test_a_read_only_folder_can_be_read(public: Path) -> None:
    await tstore.save(public / "s", TREE, step=1)
    await tstore.save(public / "s", TREE, step=2)
    for path in [public / "s", *(public / "s").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    public.chmod(0o555)
    code = """
        import os, sys
        import numpy as np
        import tstore.sync as tstore
        from tstore.cli import main
        from tstore.lab import conformance  # imported before the permissions are dropped
        if os.getuid() == 0:
            os.setuid(65534)  # root is never denied
        where = sys.argv[1]
        for mode in ("r", "a"):
            with tstore.open(where, mode) as store:
                assert store.verify().ok
                assert tstore.steps(store) == [1, 2]
                assert tstore.restore(store, step=1)["a"].sum() == 499500
        def save(size):
            tstore.save(where, {"a": np.arange(float(size))}, step=3)
        for call in (lambda: save(3), lambda: save(100_000), lambda: tstore.open(where + "2", "x")):
            try:
                call()
            except tstore.errors.Denied as error:
                print(error)
        print(main(["probe", where]))
    """
    said = processes.python(code, public / "s").splitlines()
    assert f"can't create {public}/s/commits/" in said[0]
    assert all(f"{public}/s" in line and "check the owner, the permissions" in line for line in said[:3])
    assert f"can't create {public}/s2" in said[2]
    assert "it can be read but not written" in said[-2]
    assert said[-1] == "0"
    public.chmod(0o755)


@pytest.mark.parametrize("key", ["\ud800", "a/\udcff"], ids=ascii)
async def test_names_that_servers_refuse_are_refused(tmp_path: Path, key: str) -> None:
    storage = LocalStorage(tmp_path)
    for call in (storage.get(key), storage.size(key), storage.create(key, b"", Durability.NONE)):
        with pytest.raises(InvalidArgument, match="UTF-8"):
            await call


@pytest.mark.parametrize("key", ["x" * 300, "x/" * 3000 + "x"], ids=len)
async def test_names_that_are_too_long_are_refused(tmp_path: Path, key: str) -> None:
    storage = LocalStorage(tmp_path)
    for call in (storage.get(key), storage.size(key), storage.create(key, b"", Durability.NONE)):
        with pytest.raises(InvalidArgument, match="too long"):
            await call
    assert await storage.empty()


async def test_a_name_taken_by_a_link_is_taken(tmp_path: Path) -> None:
    """A link takes a name, even if it is dangling."""
    (tmp_path / "elsewhere").write_bytes(b"keep")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "s" / "b").symlink_to(tmp_path / "nowhere")
    storage = LocalStorage(tmp_path / "s")
    for key in ("a", "b"):
        with pytest.raises(AlreadyExists):
            await storage.create(key, b"mine", Durability.FSYNC)
        with pytest.raises(AlreadyExists):
            storage.writer(key, Durability.FSYNC)
    await storage.replace("a", b"hint")
    await storage.delete("b")
    assert (tmp_path / "elsewhere").read_bytes() == b"keep"
    assert not (tmp_path / "nowhere").exists()


SPECIAL = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "device": lambda path: os.symlink("/dev/zero", path),
}


@pytest.mark.parametrize("kind", SPECIAL)
async def test_only_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    key = "txn/a/pack-0"
    (tmp_path / "txn" / "a").mkdir(parents=True)
    SPECIAL[kind](tmp_path / key)
    storage = LocalStorage(tmp_path)
    for call in (storage.get(key), storage.read(key, 0, [bytearray(1)], 1)):
        with pytest.raises(Corrupt, match=f"{key}: it is not a regular file; restore"):
            await asyncio.wait_for(call, 60)


async def test_a_pipe_in_place_of_a_pack_is_a_fault(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "s", TREE, step=1)
    [pack] = (tmp_path / "s").glob("txn/*/pack*")
    pack.unlink()
    os.mkfifo(pack)
    os.mkfifo(tmp_path / "s" / "commits" / ".object.0.tmp")
    store = await tstore.open(tmp_path / "s")
    await asyncio.wait_for(store.log.storage.sweep(), 60)
    with pytest.raises(Corrupt, match="not a regular file"):
        await asyncio.wait_for(tstore.restore(store), 60)
    report = await asyncio.wait_for(store.verify(), 60)
    assert len(report.faults) == 2
    assert all("not a regular file" in fault for fault in report.faults)


@pytest.mark.parametrize("size", [200 << 20, 3000 << 20])
def test_a_long_object_takes_its_size_of_memory_or_none(tmp_path: Path, size: int) -> None:
    """An object within its bound is in memory once; a longer one is not read."""
    (tmp_path / "roots").mkdir()
    with (tmp_path / "roots" / f"{64:020d}").open("wb") as file:
        file.truncate(size)
    code = """
        import asyncio, resource, sys
        from tstore.errors import Corrupt
        from tstore.core.storage.local.store import LocalStorage
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        async def size():
            return len(await LocalStorage(sys.argv[1]).get(f"roots/{64:020d}")) >> 20
        before = peak()
        try:
            print(asyncio.run(size()))
        except Corrupt as error:
            print(error)
        print(peak() - before)
    """
    result, peak = processes.fresh_python(code, tmp_path).splitlines()
    if size > ROOT_BYTES:
        assert f"is longer than {ROOT_BYTES} bytes" in result
        assert int(peak) < 8
    else:
        assert int(result) == size >> 20
        assert int(peak) < (size >> 20) + 8


# ---- concurrent writers


def unfinished(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*.tmp") if p.name.startswith(".")]


@pytest.fixture(params=["locks", "no locks"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    if request.param == "no locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    return request.param == "locks"


@pytest.mark.usefixtures("locks")
def test_concurrent_writers_of_one_object_do_not_interfere(tmp_path: Path) -> None:
    storages = [LocalStorage(tmp_path / "s") for _ in range(2)]
    first, second = [s.upload("txn/a/pack-0", 4, Durability.FSYNC) for s in storages]
    for writer in (second, first):
        writer.append([b"data"], 4)
    first.finish()
    with pytest.raises(AlreadyExists):
        second.finish()
    assert (tmp_path / "s/txn/a/pack-0").read_bytes() == b"data"
    assert unfinished(tmp_path) == []


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path, locks: bool) -> None:
    code = """
import os, sys
from tstore.core.storage.objects import Durability
from tstore.core.storage.local.store import LocalStorage
LocalStorage(sys.argv[1]).upload("txn/a/pack-0", 4, Durability.FSYNC)
os.kill(os.getpid(), 9)
"""
    died = subprocess.run([sys.executable, "-c", code, tmp_path / "s"], check=False)
    assert died.returncode == -signal.SIGKILL
    [left] = unfinished(tmp_path)
    writer = LocalStorage(tmp_path / "s").upload("txn/a/pack-0", 4, Durability.FSYNC)
    assert left.exists() != locks
    writer.discard()
    if not locks:
        os.utime(left, (0, 0))
        LocalStorage(tmp_path / "s").upload("txn/a/pack-0", 4, Durability.FSYNC).discard()
    assert unfinished(tmp_path) == []


async def leading_of(storage: LocalStorage, keys: list[str], unless: str) -> object:
    """Return what `leading` returns, or the error that it raises."""
    try:
        return await storage.leading(keys, unless)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="files are read one by one")
async def test_short_objects_read_in_one_call_are_those_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in place of an object: nothing, a hole, a long one, a link, a folder, a pipe, no permission."""
    contents: list[bytes | None] = [b"", b"tstore" * 100, bytes(65535), bytes(65536), bytes(65537), None]
    keys = [f"commits/{n}" for n in range(5)]
    rng = random.Random(1)
    for case in range(300):
        folder = tmp_path / f"{case}"
        (folder / "commits").mkdir(parents=True)
        for key in keys[: rng.randrange(len(keys) + 1)]:
            path, kind = folder / key, rng.randrange(20)
            content = rng.choice(contents) if kind < 14 else b"x"
            if kind == 14:
                path.symlink_to(rng.choice(["nowhere", str(folder / keys[0]), "."]))
            elif kind == 15:
                path.mkdir()
            elif kind == 16:
                os.mkfifo(path)
            elif content is not None:
                path.write_bytes(content)
        drawn = rng.randrange(1, len(keys) + 1)
        unless = rng.choice(["", *keys])
        for make in (LocalStorage, ConfinedStorage):
            at_once = await leading_of(make(folder), keys[:drawn], unless)
            with monkeypatch.context() as patch:
                patch.setattr("tstore.core.storage.local.store.read_leading", lambda *_: ([], []))
                one_by_one = await leading_of(make(folder), keys[:drawn], unless)
            assert at_once == one_by_one
    assert kernels.read_leading(os.path.join, str(tmp_path), iter(["no", "such"])) == ([], None)
    for keys in ("", ["no"], None):  # an object without a next item would end the process
        with pytest.raises(TypeError, match="iterator"):
            kernels.read_leading(os.path.join, str(tmp_path), keys)
    with pytest.raises(InvalidArgument):
        await LocalStorage(tmp_path).leading(["commits/../1"])


async def test_a_store_inside_a_store_is_refused(tmp_path: Path) -> None:
    """Also by a copy, through a link, and if a folder between the two does not exist yet."""
    outer, other = await tstore.open(tmp_path / "runs", "x"), await tstore.open(tmp_path / "other", "x")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for inner in (tmp_path / "runs" / "a", tmp_path / "runs" / "a" / "b", tmp_path / "link" / "c"):
        with pytest.raises(InvalidArgument, match="is inside the store"):
            await tstore.open(inner)
        with pytest.raises(InvalidArgument, match="is inside the store"):
            await tstore.copy(other, inner)
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["tstore.json"]
    assert (await outer.verify()).ok
    await tstore.open(tmp_path / "beside")

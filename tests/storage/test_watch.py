"""Waiting for new objects: a notification ends the wait early, and without one nothing is missed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from pathlib import Path

import pytest

from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Durability
from tstore.core.storage.watch import Watch

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what appears in a folder")


@linux
async def test_a_wait_ends_when_an_object_appears(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    await storage.create("commits/1", b"", Durability.NONE)
    for number in "23":  # the second watch has the descriptor of the first
        async with Watch(storage, "commits") as watch:
            assert watch.notified
            waiting = asyncio.create_task(watch.wait(3600))
            await storage.create(f"commits/{number}", b"", Durability.NONE)
            await asyncio.wait_for(waiting, 60)


@linux
async def test_objects_created_between_two_waits_are_reported(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    await storage.create("commits/1", b"", Durability.NONE)
    async with Watch(storage, "commits") as watch:
        await watch.wait(0)
        await storage.create("commits/2", b"", Durability.NONE)
        await asyncio.wait_for(watch.wait(3600), 60)


@linux
async def test_unfinished_objects_are_not_reported(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    await storage.create("commits/1", b"", Durability.NONE)
    async with Watch(storage, "commits") as watch:
        waiting = asyncio.create_task(watch.wait(3600))
        (tmp_path / "commits" / ".x.tmp").touch()
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        for _ in range(3):  # each iteration of the loop handles all earlier events
            await loop.run_in_executor(None, lambda: None)
        assert not waiting.done()
        await storage.create("commits/2", b"", Durability.NONE)
        await asyncio.wait_for(waiting, 60)


async def test_other_storage_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Watch(MemoryStorage("m"), "commits") as watch:
        assert not watch.notified
        await watch.wait(0.001)
    async with Watch(LocalStorage(tmp_path), "missing") as watch:
        assert not watch.notified

    class Other:
        """A libc without inotify."""

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Other())
    async with Watch(LocalStorage(tmp_path), ".") as watch:
        assert not watch.notified


@linux
async def test_few_descriptors_outlive_their_watches(tmp_path: Path) -> None:
    def descriptors() -> int:
        paths = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return sum("inotify" in os.readlink(path) for path in paths if os.path.islink(path))

    before = descriptors()  # of other tests in this process
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(32):
            await stack.enter_async_context(Watch(LocalStorage(tmp_path), "."))
        assert descriptors() >= 32
    assert descriptors() <= before + 4

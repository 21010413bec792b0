"""A power failure during a commit leaves the old version or the new one; once acknowledged, the new one."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tstore
from tests.support import power
from tstore.core.copying.copy import copy_to
from tstore.core.format.layout import commit_key
from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.objects import Durability
from tstore.errors import NotAStore, NotFound, Unavailable
from tstore.lab.simulation.scenario import override_constants

ROOT = 8
"""The version with a root."""
INLINE = 1 << 10
"""The longest manifest inside a record, in bytes."""
WIDE = 30
"""The number of arrays of a checkpoint, enough for a separate manifest object."""
DRAWN = 5
"""The number of random states per moment, besides the extremes."""

Work = Callable[[Path], Awaitable[object]]


def tree(value: int, arrays: int = WIDE) -> dict[str, np.ndarray]:
    return {"x": np.full(9_000, value), **{f"b{i}": np.full(3, value) for i in range(arrays)}}


async def save(url: Path) -> None:
    await tstore.save(url, tree(1), 1)


async def small(url: Path) -> None:
    async with await tstore.open(url) as store, store.transaction(tag="step/1") as tx:
        await (await tx.array("x")).write(1)
        await (await tx.array("b0"))[:2].write(1)
        await (await tx.array("b0"))[2].write(1)


async def group(url: Path) -> None:
    async def host(number: int) -> int:
        rows = slice(number * 4_500, (number + 1) * 4_500)
        x = tstore.Shards((9_000,), "int64", [((rows,), np.full(4_500, 1))])
        return await tstore.save(url, {**tree(1), "x": x}, 1, host=number, hosts=2, attempt="a")

    assert len(set(await asyncio.gather(host(0), host(1)))) == 1


WORKS: dict[str, tuple[Work, int, int]] = {  # operation, arrays of step 0, version committed
    "save": (save, WIDE, 2),
    "first save": (save, 0, 1),
    "small": (small, 1, 2),
    "group": (group, WIDE, 2),
    "with a root": (small, 1, ROOT),
}


@pytest.fixture
def frequent_roots() -> Iterator[None]:
    with override_constants(ROOT_EVERY=ROOT, INLINE_MANIFEST_BYTES=INLINE):
        yield


async def value_of(url: Path, version: int) -> int:
    """Return 0 or 1, the value that all arrays have; 0 if there is no store or an empty one."""
    try:
        store = await tstore.open(url, "r")
    except (NotAStore, NotFound):
        return 0
    async with store:
        report = await store.verify()
        assert report.ok, report.faults
        steps = await tstore.steps(store)
        if not steps:
            assert (await store.snapshot()).version == 0
            return 0
        tree_read = await tstore.restore(store)
        [value] = {int(v) for values in tree_read.values() for v in np.unique(values)}
        assert len(tree_read) in (2, WIDE + 1)
        assert steps[-1] == value
        assert (await store.snapshot()).version == version - 1 + value
        return value


async def survives(url: Path, version: int, acknowledged: bool) -> int:
    value = await value_of(url, version)
    if acknowledged:
        assert value == 1
    await tstore.save(url, {"x": np.full(3, 7)}, 2, durability="none")  # the next writer needs no repair
    assert (await tstore.restore(url))["x"].tolist() == [7] * 3
    return value


def lay_out(files: dict[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


async def replay(recorder: power.Recorder, place: Path, version: int) -> set[tuple[bool, int]]:
    """Check each state that a failure may leave, and return the pairs (acknowledged, value) that occurred."""
    rng = random.Random(int(os.environ.get("TSTORE_CRASH_SEED", "0")))
    met, known = set(), set()
    for until in reversed(range(len(recorder.acts) + 1)):  # most faults show after the last acts
        acknowledged = until == len(recorder.acts)
        for files in recorder.states(until, rng, DRAWN):
            state = hash((acknowledged, *sorted(files.items())))
            if state not in known:
                known.add(state)
                folder = place / str(len(known))
                lay_out(files, folder)
                met.add((acknowledged, await survives(folder / "s", version, acknowledged)))
                shutil.rmtree(folder, ignore_errors=True)
    assert len(known) > 10
    return met


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.usefixtures("frequent_roots")
async def test_a_power_failure_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    act, before, version = WORKS[work]
    url = tmp_path / "disk" / "s"
    url.parent.mkdir()
    if before:
        await tstore.save(url, tree(0, before), 0)
        store = await tstore.open(url)
        for number in range(version - 2):  # durable, otherwise the commit would begin with a sync
            async with store.transaction(durability="none" if number < version - 3 else "fsync"):
                pass
    with monkeypatch.context() as patch:
        patch.setattr("tstore.core.storage.local.pack._EXTENT", 1 << 16)  # else each state has 64 MiB
        recorder = power.Recorder(url.parent, patch)
        await act(url)
    assert bool(list(url.glob("txn/*/manifest*"))) == (before == WIDE or not before)
    met = await replay(recorder, tmp_path / "left", version)
    assert met == {(False, 0), (False, 1), (True, 1)}


class SlowCopy(LocalStorage):
    """A destination that another copy completes meanwhile; this one dies as soon as it has created version 3."""

    def __init__(self, folder: Path, meanwhile: Callable[[], Awaitable[object]]) -> None:
        super().__init__(folder)
        self._meanwhile = meanwhile

    async def empty(self) -> bool:
        empty = await super().empty()
        await self._meanwhile()
        return empty

    async def sync(self) -> None:
        await self._die()
        await super().sync()

    async def flush(self, prefix: str, durability: Durability) -> None:
        await self._die()
        await super().flush(prefix, durability)

    async def _die(self) -> None:
        if await self.size(commit_key(3)) is not None:
            raise Unavailable("the process is killed")


async def test_a_power_failure_after_a_commit_above_two_concurrent_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copier that does not know of the other's store, and dies, leaves no record that a later one lacks."""
    source, earlier, copied = tmp_path / "source", tmp_path / "earlier", tmp_path / "disk" / "s"
    for step in range(2):
        await tstore.save(source, {"x": np.full(3, step)}, step)
    shutil.copytree(source, earlier)
    await tstore.save(source, {"x": np.full(3, 2)}, 2)
    copied.parent.mkdir()
    with monkeypatch.context() as patch:
        recorder = power.Recorder(copied.parent, patch)
        with pytest.raises(Unavailable, match="killed"):
            await copy_to(await tstore.open(source), SlowCopy(copied, lambda: tstore.copy(earlier, copied)))
        assert await tstore.save(copied, {"x": np.full(3, 3)}, 3) == 4
    for number, files in enumerate(recorder.states(len(recorder.acts), random.Random(0), DRAWN)):
        lay_out(files, tmp_path / "left" / str(number))
        async with await tstore.open(tmp_path / "left" / str(number) / "s", "r") as left:
            assert (await left.snapshot()).version == 4
            assert (await left.verify()).ok


async def test_a_power_failure_after_a_collection_above_one_that_was_killed_while_archiving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are deleted only once their archive is durable, even if its creator never learned that."""
    url, twin = tmp_path / "disk" / "s", tmp_path / "twin"
    url.parent.mkdir()
    with override_constants(ROOT_EVERY=4, ARCHIVE_EVERY=4):
        async with await tstore.open(url) as store:
            for step in range(12):
                await tstore.save(store, {"x": np.full(3, step)}, step)
            shutil.copytree(url, twin)
            await (await tstore.open(twin)).collect()
            (url / "archives").mkdir()
            with monkeypatch.context() as patch:
                recorder = power.Recorder(url.parent, patch)
                for archive in sorted(
                    (twin / "archives").iterdir()
                ):  # linked, and killed before the folder's fsync
                    temporary, created = url / "archives" / ".killed.tmp", url / "archives" / archive.name
                    fd = os.open(temporary, os.O_CREAT | os.O_WRONLY)
                    os.pwritev(fd, [archive.read_bytes()], 0)
                    os.fsync(fd)
                    os.close(fd)
                    os.link(temporary, created)
                    os.unlink(temporary)
                await store.collect()
        assert len(list(url.glob("commits/*"))) < len(list(twin.glob("commits/*")))
        for number, files in enumerate(recorder.states(len(recorder.acts), random.Random(0), DRAWN)):
            lay_out(files, tmp_path / "left" / str(number))
            async with await tstore.open(tmp_path / "left" / str(number) / "s", "r") as left:
                assert [commit.tag async for commit in left.history()] == [f"step/{n}" for n in range(11, -1, -1)]
                assert (await left.verify()).ok

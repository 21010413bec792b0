"""How many threads a write uses."""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
import tstore.sync
from tstore.core.data.writer import PackSet, WriteJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.runtime.pool import WORKERS
from tstore.core.storage.base import PackReader, PackWriter
from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import BufferStream, Durability


class MeetingPacks(MemoryStorage):
    """The first writes to packs wait for each other: as many as there are workers, or the write fails."""

    def __init__(self) -> None:
        super().__init__(uuid.uuid4().hex)
        self._meeting = threading.Barrier(WORKERS, timeout=20)
        self._met = threading.Event()

    def writer(self, key: str, durability: Durability) -> PackWriter:
        pack = super().writer(key, durability)
        append = pack.append

        def meeting(buffers: BufferStream, size: int) -> int:
            if not self._met.is_set():
                self._meeting.wait()
                self._met.set()
            return append(buffers, size)

        pack.append = meeting  # type: ignore[method-assign]
        return pack


@pytest.mark.parametrize("codecs", [None, ["bytes", "zstd"], "e4m3"])
async def test_a_write_of_many_short_chunks_uses_all_workers(codecs: str | list[str] | None) -> None:
    values = np.random.default_rng(1).standard_normal((WORKERS * 4 << 20) // 4).astype("float32")
    store = await tstore.open(MeetingPacks())
    async with store.transaction() as tx:
        array = await tx.create_array("a", values.shape, "float32", (128 << 10,), codecs)
        await array.write(values)
    snapshot = await store.snapshot()
    assert (await (await snapshot.array("a")).read()).shape == values.shape


async def test_values_that_are_made_when_they_are_needed_are_freed_once_they_are_written() -> None:
    """As those of an import: here each region is an array of 1 MiB."""
    alive, count = 0, 12 * WORKERS
    at_once: list[int] = []

    def freed() -> None:
        nonlocal alive
        alive -= 1

    def regions() -> Iterator[tuple[tuple[int, ...], np.ndarray[Any, Any]]]:
        nonlocal alive
        for number in range(count):
            values = np.full(1 << 18, number, "f4")
            weakref.finalize(values, freed)
            alive += 1
            at_once.append(alive)
            yield (number,), values
            del values

    packs = PackSet(MemoryStorage(uuid.uuid4().hex), "txn/a", Durability.NONE)
    meta = ArrayMeta.new((count << 18,), "f4", (1 << 18,))
    job = WriteJob("a", meta, regions())
    await packs.write([job])
    assert len(job.rows) == count
    in_batches = 2 * (WORKERS + 1)  # each worker has one of two values, and the next is being made
    assert max(at_once[8 * WORKERS :]) <= in_batches + 1


@pytest.mark.parametrize("way", ["awaited", "blocking"])
async def test_a_long_read_uses_several_threads(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two requests wait for each other; a blocking read makes one of them in the calling thread."""
    values = np.arange((16 << 20) // 4, dtype="f4")
    async with (await tstore.open(tmp_path)).transaction(durability="none") as tx:
        await (await tx.create_array("a", values.shape, "f4", (1 << 18,), ["bytes", "zstd"])).write(values)
    meeting, met, readers = threading.Barrier(2, timeout=20), threading.Event(), set[threading.Thread]()
    reader = LocalStorage.reader

    class Meeting:
        def __init__(self, inner: PackReader) -> None:
            self._inner = inner

        def read_into(self, offset: int, buffers: Any, size: int) -> None:
            readers.add(threading.current_thread())
            if not met.is_set():
                meeting.wait()
                met.set()
            self._inner.read_into(offset, buffers, size)

    monkeypatch.setattr(LocalStorage, "reader", lambda self, key: Meeting(reader(self, key)))
    if way == "awaited":
        read = await (await (await (await tstore.open(tmp_path)).snapshot()).array("a")).read()
    else:
        read = tstore.sync.open(tmp_path).snapshot().array("a").read()
        assert threading.current_thread() in readers
    assert np.array_equal(read, values)
    assert len(readers) >= 2

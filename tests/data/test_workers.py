"""How many threads a write uses."""

from __future__ import annotations

import threading
import uuid

import numpy as np
import pytest

import tstore
from tstore.runtime.pool import WORKERS
from tstore.storage.base import PackWriter
from tstore.storage.memory import MemoryStorage
from tstore.storage.objects import BufferStream, Durability


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

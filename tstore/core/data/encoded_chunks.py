"""Reading the encoded bytes of chunks, whole or in part, verified and not decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from tstore.core.data.reader import pack_reader, unreadable
from tstore.core.format.checksums import BLOCK, CHECK_SIZE, block_checks
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.runtime.budget import scratch
from tstore.core.runtime.pool import WORKERS, each
from tstore.core.storage.base import Storage
from tstore.errors import Corrupt, NotFound

__all__ = ["Deliver", "read_encoded", "read_part"]

Deliver = Callable[[ChunkRow, npt.NDArray[np.uint8]], None]
"""Called in a worker thread with the reference to a chunk and its verified bytes, valid during the call."""


async def read_encoded(storage: Storage, path: str, rows: Iterable[ChunkRow], deliver: Deliver) -> None:
    """Call `deliver` with the bytes of each chunk; raise `Corrupt` for a damaged chunk or a missing pack."""
    url = storage.url

    def read(row: ChunkRow) -> None:
        label = f"{path}, chunk number {row.number}"
        with scratch(row.length) as data:
            try:
                if row.length:
                    pack_reader(storage, row.pack).read_into(row.offset, [data], row.length)
            except (Corrupt, NotFound) as error:
                raise unreadable(label, row.pack, url, error) from error
            if (checks := block_checks(data.data)) != row.checks:
                raise Corrupt(f"{label}: {row.mismatch(checks, url)}")
            deliver(row, data)

    await each(read, rows, storage.tuning.streams if storage.tuning.latency_bound else WORKERS)


def read_part(storage: Storage, path: str, row: ChunkRow, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a chunk from `start` up to `stop`, which lie inside it; raise `Corrupt`. Blocking.

    Only the blocks that contain these bytes are read and verified.
    """
    if start == stop:
        return np.empty(0, np.uint8)
    label, first, last = f"{path}, chunk number {row.number}", start // BLOCK, -(-stop // BLOCK)
    data = np.empty(min(last * BLOCK, row.length) - first * BLOCK, np.uint8)
    try:
        pack_reader(storage, row.pack).read_into(row.offset + first * BLOCK, [data], len(data))
    except (Corrupt, NotFound) as error:
        raise unreadable(label, row.pack, storage.url, error) from error
    checks = block_checks(data.data)
    if checks != row.checks[first * CHECK_SIZE : last * CHECK_SIZE]:
        raise Corrupt(f"{label}: {row.mismatch(checks, storage.url, first)}")
    return data[start - first * BLOCK : stop - first * BLOCK]

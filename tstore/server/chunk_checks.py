"""The check that the chunks of a record have the bytes that it says, before a server accepts the record.

A save refers to a chunk of the newest step if the checksum is the same, without reading the chunk. So a record
with a false checksum would make later saves unreadable.

1. Chunks that the newest version has at the same path were checked before. All others are read back, by worker
   threads, in pieces of a few MiB. (`validation` checks those that are inline.)
2. Clients take turns after a few pieces, so that a small record does not wait for a large one.
3. After `_LONGEST` seconds the response is 503, after which clients try again. The pieces checked so far are
   remembered, so that the next request continues from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt
from tstore.format.checksums import BLOCK, CHECK_SIZE, digest
from tstore.format.chunk_refs import ChunkTable
from tstore.runtime.budget import scratch
from tstore.runtime.concurrency import batched, together
from tstore.runtime.pool import each, run
from tstore.server.limits import PIECE, Shares
from tstore.server.responses import Refused
from tstore.server.turns import Turns
from tstore.storage.base import Storage

__all__ = ["ChunkChecks", "Piece"]

_LONGEST = 15.0  # seconds; clients wait for 30
_TURN = 4  # pieces for each thread
_TABLES = 4  # tables of chunks that are prepared at once
_REMEMBERED = 1 << 16  # pieces


class Piece(NamedTuple):
    """Blocks of chunks that are read together from a pack: the start and stop of each, and their checksums.

    `key` is a hash of all of this and of the version of the newest garbage collection: until the next collection,
    no pack can be deleted and created again.
    """

    pack: str
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    checks: npt.NDArray[np.uint8]
    key: bytes

    @property
    def size(self) -> int:
        """The number of bytes from the first block to the last."""
        return int(self.stops[-1] - self.starts[0])


class ChunkChecks:
    """Reads the chunks that records add to the store behind one server."""

    def __init__(self, storage: Storage, wait: float, turns: Turns) -> None:
        self._storage = storage
        self._turns = turns
        self._reads = Shares(1, wait, "its turn to have chunks checked")
        self._checked: dict[bytes, None] = {}

    async def absent_packs(self, ends: Mapping[str, int]) -> AsyncIterator[str]:
        """Yield the packs that do not exist; raise `Corrupt` for one that is shorter than its chunks require."""
        for keys in batched(ends):
            for key, size in zip(keys, await together(self._storage.size, keys), strict=True):
                if size is None:
                    yield key
                elif size < ends[key]:
                    raise Corrupt(f"{key} has {size} bytes, but a chunk in it ends at {ends[key]}")

    async def check(self, added: Iterator[ChunkTable], collected: int, client: Hashable) -> None:
        """Raise `Corrupt` if chunks do not have their checksums, `Refused` (503) if more time is needed.

        `added` is sorted by pack and offset. `collected` is the version of the newest garbage collection.
        """
        for key in list(itertools.islice(self._checked, max(0, len(self._checked) - _REMEMBERED))):
            del self._checked[key]

        def next_pieces() -> list[list[Piece]]:
            """Return the unchecked pieces of each of the next `_TABLES` tables, or of as many as are left."""
            size, tables = self._storage.tuning.batch, itertools.islice(added, _TABLES)
            return [[p for p in _pieces(table, size, collected) if p.key not in self._checked] for table in tables]

        try:
            async with asyncio.timeout(_LONGEST):
                while True:
                    piece_lists = await self._turns.run(client, next_pieces)
                    for pieces in piece_lists:
                        await self._read(pieces, client)
                    if len(piece_lists) < _TABLES:
                        return
        except TimeoutError:
            raise Refused(
                503, "the server is still reading the chunks of this commit; try again", {"Retry-After": "1"}
            ) from None

    async def _read(self, pieces: Sequence[Piece], client: Hashable) -> None:
        """Check pieces; other clients have their turns after every few."""
        if len(pieces) == 1 and pieces[0].size <= PIECE:
            await run(self._check, pieces[0])  # takes less time than a turn
            return
        streams = self._storage.tuning.streams
        for first in range(0, len(pieces), _TURN * streams):
            async with self._reads.claim(client, 1):
                some = pieces[first : first + _TURN * streams]
                await each(self._check, some, min(len(some), streams))

    def _check(self, piece: Piece) -> None:
        """Read one piece; raise `Corrupt` if a block does not have its checksum. Blocking."""
        starts, stops, checks = piece.starts.tolist(), piece.stops.tolist(), piece.checks.tobytes()
        first = starts[0]
        with scratch(piece.size) as buffer:
            self._storage.reader(piece.pack).read_into(first, [buffer], piece.size)
            actual = [digest(buffer.data[a - first : b - first]) for a, b in zip(starts, stops, strict=True)]
        if b"".join(actual) == checks:
            self._checked[piece.key] = None
            return
        wrong = next(i for i, one in enumerate(actual) if one != checks[i * CHECK_SIZE : (i + 1) * CHECK_SIZE])
        size, at = stops[wrong] - starts[wrong], starts[wrong]
        raise Corrupt(
            f"the {size} bytes at {at} of {piece.pack} do not have the checksum in the manifest; write these "
            "chunks again, in a new transaction"
        )


def _pieces(table: ChunkTable, size: int, collected: int) -> Iterator[Piece]:
    """Yield pieces of at most `size` bytes, or of one block."""
    counts = np.diff(table.blocks)
    within = np.arange(len(table.checks)) - np.repeat(table.blocks[:-1], counts)
    start = np.repeat(table.offset.astype(np.int64), counts) + BLOCK * within
    stop = np.minimum(start + BLOCK, np.repeat((table.offset + table.length).astype(np.int64), counts))
    pack = np.repeat(table.pack, counts)
    first = 0
    for end in [*(np.flatnonzero(np.diff(pack)) + 1).tolist(), len(pack)]:
        while first < end:
            fitting = int(np.searchsorted(stop[first:end], start[first] + size, "right"))
            last = first + max(1, fitting)
            name, at = str(table.packs[pack[first]]), slice(first, last)
            values = start[at], stop[at], table.checks[at]
            text = b"".join([f"{collected} {name}\0".encode(), *(column.tobytes() for column in values)])
            yield Piece(name, *values, hashlib.sha256(text).digest())
            first = last

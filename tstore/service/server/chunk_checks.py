"""The check of a record's chunks against their checksums, before a server accepts the record.

A save reuses a chunk of the newest step that has the same checksum, without reading it. So a record with a false
checksum would make later saves unreadable.

1. Chunks that the newest version has at the same path were checked before. In any other chunk, a block that starts
   at a multiple of `BLOCK` in its pack was hashed when the server received the pack (`ReceivedPacks`). All other
   blocks are read back, by worker threads, in pieces of a few MiB. (`format.validation` checks inline chunks.)
2. Clients take turns after a few pieces, so that a small record does not wait for a large one.
3. After `_MAX_SECONDS` the response is 503, and clients retry. Chunks are checked in the order of pack keys and
   offsets, and `CheckProgress` records the position, so that the next request continues from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.checksums import BLOCK, CHECK_SIZE, BlockHash, as_checks, digest
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.runtime.budget import scratch
from tstore.core.runtime.concurrency import batched
from tstore.core.runtime.pool import each, run
from tstore.core.storage.base import Storage
from tstore.errors import Corrupt
from tstore.service.server.quotas import PIECE, Shares, Turns
from tstore.service.server.responses import Refused

__all__ = ["CheckProgress", "ChunkChecks", "Extent", "ReceivedPacks"]

_MAX_SECONDS = 15.0  # a client waits 30 seconds for the response
_TURN = 4  # pieces for each thread in one turn
_TABLES = 4  # tables of chunks that are prepared at once
_MAX_POSITIONS = 256
_MAX_RECEIVED = 16 << 20  # bytes of memory for the checksums of received packs
_RECEIVED_PACK = 512  # bytes of memory for each received pack, beside its checksums


class ReceivedPacks:
    """The block checksums of the most recently received packs; other packs are read back.

    If a pack is created again, its new checksums replace the old ones. Like `CheckProgress`, the checksums are
    valid until the next garbage collection.
    """

    def __init__(self) -> None:
        self._packs: OrderedDict[str, tuple[int, npt.NDArray[np.uint8]]] = OrderedDict()
        self._size = 0

    def add(self, pack: str, blocks: BlockHash) -> None:
        """Add the checksums of a pack that has been received and stored."""
        self._remove(pack)
        checks = as_checks(blocks.checks())
        self._packs[pack] = blocks.size, checks
        self._size += checks.nbytes + _RECEIVED_PACK
        while self._size > _MAX_RECEIVED:
            self._remove(next(iter(self._packs)))

    def unverified(self, blocks: Extent) -> Extent:
        """Return the blocks that are not known to match their checksums."""
        pack, starts, stops, expected = blocks
        if (received := self._packs.get(pack)) is None:
            return blocks
        size, checks = received
        is_block = (starts % BLOCK == 0) & (starts < size) & (stops == np.minimum(starts + BLOCK, size))
        hashed = np.flatnonzero(is_block)
        unverified = np.ones(len(starts), bool)
        unverified[hashed] = (checks[starts[hashed] // BLOCK] != expected[hashed]).any(axis=1)
        return Extent(pack, starts[unverified], stops[unverified], expected[unverified])

    def _remove(self, pack: str) -> None:
        if (received := self._packs.pop(pack, None)) is not None:
            self._size -= received[1].nbytes + _RECEIVED_PACK


class CheckProgress:
    """For each commit being checked, the pack and the offset of the next block to check.

    These positions and the packs `received` are valid until the next garbage collection: before it, no pack can be
    deleted and created again. Each block before a position was checked by a request for this commit, or was in the
    newest version at the time of such a request. If there are too many positions, the client with the most loses
    its oldest one.
    """

    def __init__(self) -> None:
        self.received = ReceivedPacks()
        self._positions: dict[bytes, tuple[Hashable, str, int]] = {}

    def position(self, commit_id: bytes) -> tuple[str, int]:
        """Return the pack and the offset before which all blocks of a commit are checked."""
        _, pack, offset = self._positions.get(commit_id, (None, "", 0))
        return pack, offset

    def advance(self, commit_id: bytes, client: Hashable, piece: Extent) -> None:
        """Record that the check of a commit, requested by a client, has reached the end of a piece."""
        position = max(self.position(commit_id), (piece.pack, int(piece.stops[-1])))  # others may be ahead
        self._positions.pop(commit_id, None)
        self._positions[commit_id] = client, *position
        if len(self._positions) > _MAX_POSITIONS:
            [(greedy, _)] = Counter(owner for owner, _, _ in self._positions.values()).most_common(1)
            del self._positions[next(key for key, (owner, _, _) in self._positions.items() if owner == greedy)]


class Extent(NamedTuple):
    """Blocks of chunks that are read together from a pack: the start and stop of each, and their checksums."""

    pack: str
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    checks: npt.NDArray[np.uint8]

    @property
    def size(self) -> int:
        """The number of bytes from the first block to the last."""
        return int(self.stops[-1] - self.starts[0])

    def split(self, size: int) -> Iterator[Extent]:
        """Yield parts of at most `size` bytes, or of one longer block."""
        first, end = 0, len(self.starts)
        while first < end:
            fitting = int(np.searchsorted(self.stops[first:], self.starts[first] + size, "right"))
            last = first + max(1, fitting)
            yield Extent(self.pack, self.starts[first:last], self.stops[first:last], self.checks[first:last])
            first = last


class ChunkChecks:
    """Checks the chunks that records add to the store behind one server."""

    def __init__(self, storage: Storage, wait: float, turns: Turns) -> None:
        self._storage = storage
        self._turns = turns
        self._read_turns = Shares(1, wait, waiting_for="its turn to have chunks checked")

    async def absent_packs(self, ends: Mapping[str, int]) -> AsyncIterator[str]:
        """Yield the packs that do not exist; raise `Corrupt` for one that is shorter than its chunks require.

        `ends` maps each pack to the end of its last chunk.
        """
        for keys in batched(ends):
            sizes = await self._storage.sizes(keys)
            for key in keys:
                if key not in sizes:
                    yield key
                elif sizes[key] < ends[key]:
                    raise Corrupt(f"{key} has {sizes[key]} bytes, but a chunk in it ends at {ends[key]}")

    async def check(
        self, added: Iterator[ChunkTable], content: object, progress: CheckProgress, client: Hashable
    ) -> None:
        """Raise `Corrupt` if chunks do not match their checksums, `Refused` (503) if more time is needed.

        `added` are the chunks that the newest version lacks, sorted by pack key and offset. `content` identifies
        the commit in `progress`. Both `added` and `progress` belong to the same state of the log.
        """
        commit_id = b""

        def next_pieces() -> list[list[Extent]]:
            """Return the unchecked pieces of each of the next `_TABLES` tables, or of all that remain."""
            nonlocal commit_id
            commit_id = commit_id or hashlib.sha256(msgspec.msgpack.encode(content)).digest()
            position, batch = progress.position(commit_id), self._storage.tuning.batch
            tables = itertools.islice(added, _TABLES)
            pieces = [_pieces(table, batch, progress.received) for table in tables]
            return [[p for p in table_pieces if (p.pack, p.starts[-1]) >= position] for table_pieces in pieces]

        try:
            async with asyncio.timeout(_MAX_SECONDS):
                while True:
                    piece_lists = await self._turns.run(client, next_pieces)
                    for pieces in piece_lists:
                        await self._read(pieces, client, lambda piece: progress.advance(commit_id, client, piece))
                    if len(piece_lists) < _TABLES:
                        return
                    if all_pieces := [piece for pieces in piece_lists for piece in pieces]:
                        progress.advance(commit_id, client, all_pieces[-1])
        except TimeoutError:
            raise Refused(
                503, "the server is still reading the chunks of this commit; try again", {"Retry-After": "1"}
            ) from None

    async def _read(self, pieces: Sequence[Extent], client: Hashable, advance: Callable[[Extent], None]) -> None:
        """Check pieces, a few in each turn.

        After each turn, call `advance` with the last piece of the leading ones that are checked.
        """
        if len(pieces) == 1 and pieces[0].size <= PIECE:
            await run(self._check, pieces[0])  # takes less time than a turn; the caller records the progress
            return
        streams = self._storage.tuning.streams
        for first in range(0, len(pieces), _TURN * streams):
            async with self._read_turns.claim(client, 1):
                await self._read_some(pieces[first : first + _TURN * streams], streams, advance)

    async def _read_some(self, pieces: Sequence[Extent], streams: int, advance: Callable[[Extent], None]) -> None:
        checked: set[int] = set()

        def check(index: int) -> None:
            self._check(pieces[index])
            checked.add(index)

        try:
            await each(check, range(len(pieces)), min(len(pieces), streams))
        finally:
            if count := next(i for i in itertools.count() if i not in checked):
                advance(pieces[count - 1])

    def _check(self, piece: Extent) -> None:
        """Read one piece; raise `Corrupt` if a block does not match its checksum. Blocking."""
        starts, stops, checks = piece.starts.tolist(), piece.stops.tolist(), piece.checks.tobytes()
        first = starts[0]
        with scratch(piece.size) as buffer:
            self._storage.reader(piece.pack).read_into(first, [buffer], piece.size)
            actual = [digest(buffer.data[a - first : b - first]) for a, b in zip(starts, stops, strict=True)]
        if b"".join(actual) == checks:
            return
        wrong = next(i for i, check in enumerate(actual) if check != checks[i * CHECK_SIZE : (i + 1) * CHECK_SIZE])
        size, offset = stops[wrong] - starts[wrong], starts[wrong]
        raise Corrupt(
            f"the {size} bytes at {offset} of {piece.pack} do not match their checksum in the manifest; write "
            "these chunks again, in a new transaction"
        )


def _pieces(table: ChunkTable, size: int, received: ReceivedPacks) -> Iterator[Extent]:
    """Yield the blocks to read back, in pieces of at most `size` bytes, or of one longer block."""
    counts = np.diff(table.blocks)
    block = np.arange(len(table.checks)) - np.repeat(table.blocks[:-1], counts)
    start = np.repeat(table.offset.astype(np.int64), counts) + BLOCK * block
    stop = np.minimum(start + BLOCK, np.repeat((table.offset + table.length).astype(np.int64), counts))
    pack = np.repeat(table.pack, counts)
    ends = [*(np.flatnonzero(np.diff(pack)) + 1).tolist(), len(pack)]
    for first, end in itertools.pairwise([0, *ends] if len(pack) else []):
        name = str(table.packs[pack[first]])
        blocks = Extent(name, start[first:end], stop[first:end], table.checks[first:end])
        yield from received.unverified(blocks).split(size)

"""Segments: the references to the chunks of a long array, split so that they are read on demand; pure, no I/O.

1. A manifest contains the references to the chunks of a short array. Those of a longer one are in segments of at
   most `SEGMENT_ROWS` rows, which are bytes in packs, as chunks are. The manifest has a `Segment` for each.
2. A segment consists of the columns of its rows, one after the other: number (u64), pack (u32), offset (u64),
   length (u64), and the checksums (16 bytes for each block). `pack` has positions in `Segment.packs`, so the packs
   to which an array refers are known without its segments.
3. A `SortedRun` looks up references in consecutive segments: it reads those whose range of chunk numbers has
   one of the numbers sought. A root repeats the segments of the manifests before it, but not their rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.checksums import CHECK_SIZE, as_checks, digest
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.errors import Corrupt

__all__ = [
    "MIN_SEGMENTED",
    "NO_SOURCE",
    "SEGMENT_BYTES",
    "SEGMENT_ROW",
    "SEGMENT_ROWS",
    "Segment",
    "SegmentSource",
    "SortedRun",
    "cut",
    "decode_segment",
    "encode_segment",
    "fitting",
    "parse_segments",
    "segment_columns",
]

SEGMENT_ROWS = 16 << 10
"""The maximum number of rows in a segment."""

SEGMENT_BYTES = 1 << 20
"""The maximum bytes of a segment, so that one checksum covers it; longer rows stay in the manifest."""

MIN_SEGMENTED = 4 << 10
"""The maximum rows of an array that are stored in the manifest itself."""

_ROW_BYTES = 28  # bytes of a row in a segment, without its checksums


class Segment(msgspec.Struct, frozen=True, gc=False):
    """The reference to a segment, and what is known of its rows without reading it.

    The rows have chunk numbers from `first` to `last`, refer to `packs`, and their chunks have `stored_bytes` in
    total. The segment is at `offset` in `pack`.
    """

    first: int
    last: int
    rows: int
    stored_bytes: int
    packs: tuple[str, ...]
    pack: str
    offset: int
    length: int
    check: bytes


SEGMENT_ROW = np.dtype(
    [
        ("first", "<u8"),
        ("last", "<u8"),
        ("rows", "<u8"),
        ("stored_bytes", "<u8"),
        ("packs", "<u4"),
        ("pack", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("check", f"V{CHECK_SIZE}"),
    ]
)
"""The row of a segment in a manifest: the fields of `Segment`; `packs` is a count, `pack` a position."""


def segment_columns(
    segments: Sequence[Segment], names: Mapping[str, int]
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32]]:
    """Return the rows of segments, and the positions of all their packs; `names` has the position of each pack."""
    rows = [
        (s.first, s.last, s.rows, s.stored_bytes, len(s.packs), names[s.pack], s.offset, s.length, s.check)
        for s in segments
    ]
    return np.array(rows, SEGMENT_ROW), np.array([names[pack] for s in segments for pack in s.packs], "<u4")


def parse_segments(data: bytes, positions: npt.NDArray[np.uint32], names: Sequence[str]) -> list[Segment]:
    """Return the segments of rows, given the positions of all their packs in `names`; raise `Corrupt`."""
    if len(data) % SEGMENT_ROW.itemsize:
        raise Corrupt("the last segment of a manifest is cut short")
    rows = np.frombuffer(data, SEGMENT_ROW)
    if int(rows["packs"].sum(dtype=np.uint64)) != len(positions):
        raise Corrupt("the pack counts of the segments in a manifest do not add up to its number of positions")
    if max(int(positions.max(initial=0)), int(rows["pack"].max(initial=0))) >= len(names):
        raise Corrupt("a segment refers to a pack that its manifest does not name")
    segments, at, listed = [], 0, positions.tolist()
    for first, last, count, stored, pack_count, pack, offset, length, check in rows.tolist():
        used = tuple([names[position] for position in listed[at : at + pack_count]])
        at += pack_count
        segment = Segment(first, last, count, stored, used, names[pack], offset, length, check)
        _check(segment)
        segments.append(segment)
    return segments


def _check(segment: Segment) -> None:
    """Raise `Corrupt` if the fields of a segment contradict each other."""
    first, last, rows = segment.first, segment.last, segment.rows
    if not (0 < rows <= last - first + 1 and last < 1 << 62 and len(segment.packs) <= rows <= SEGMENT_ROWS):
        raise Corrupt(f"a segment has {rows} rows for the chunks from {first} to {last}")
    checks = segment.length - _ROW_BYTES * rows
    if checks < CHECK_SIZE * rows or checks % CHECK_SIZE or segment.length > SEGMENT_BYTES:
        raise Corrupt(f"a segment of {rows} rows has {segment.length} bytes")
    if max(segment.offset, segment.length, segment.stored_bytes) >= 1 << 62:
        raise Corrupt("a segment has an impossible offset or length")
    if not (segment.pack and all(segment.packs)):
        raise Corrupt("a segment, or one of its chunks, is in an inline pack")


class SegmentSource(Protocol):
    """The source of the bytes of segments."""

    def load(self, segments: Sequence[Segment]) -> list[ChunkTable]:
        """Return the rows of each segment; blocking. Raise `Corrupt`, or `NotFound` if a pack is missing."""


class _NoSource:
    def load(self, segments: Sequence[Segment]) -> list[ChunkTable]:
        raise RuntimeError("these segments can't be read: their manifest was not attached to a store")


NO_SOURCE: SegmentSource = _NoSource()
"""The source of the segments of a manifest that was decoded but not attached to a store."""


class SortedRun:
    """References to the chunks of one array in segments whose ranges of numbers ascend and do not overlap.

    Lookups read segments, blocking; they raise `Corrupt` for a damaged segment, `NotFound` for a missing pack.
    """

    __slots__ = ("firsts", "lasts", "segments", "source")

    def __init__(self, segments: Sequence[Segment], source: SegmentSource) -> None:
        self.segments = tuple(segments)
        self.source = source
        self.firsts = np.array([segment.first for segment in segments], np.uint64)
        self.lasts = np.array([segment.last for segment in segments], np.uint64)

    def __len__(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def stored_bytes(self) -> int:
        """The encoded bytes of all chunks."""
        return sum(segment.stored_bytes for segment in self.segments)

    @property
    def packs(self) -> set[str]:
        """The packs of all chunks and of the segments."""
        return {pack for segment in self.segments for pack in (*segment.packs, segment.pack)}

    def row(self, number: int) -> ChunkRow | None:
        """Return the row of a chunk, or None if there is none."""
        at = int(np.searchsorted(self.lasts, np.uint64(number)))
        if at == len(self.segments) or self.firsts[at] > number:
            return None
        [rows] = self.source.load(self.segments[at : at + 1])
        return rows.find(number)

    def select(self, numbers: npt.NDArray[np.integer[Any]] | range) -> ChunkTable:
        """Return the rows of these chunks, in their order; chunks without a row are omitted."""
        if isinstance(numbers, range):
            ends = np.array([numbers.start, max(numbers.start, numbers.stop - 1)], np.uint64)
            first, last = np.searchsorted(self.lasts, ends).tolist()
            wanted = self.segments[first : last + 1] if len(numbers) else ()
            return ChunkTable.concat(self.source.load(wanted)).select(numbers)
        sought = np.unique(numbers.astype(np.uint64))
        used, starts = np.unique(np.searchsorted(self.lasts, sought), return_index=True)
        found: list[ChunkTable] = []
        for at, own in zip(used.tolist(), np.split(sought, starts[1:]), strict=False):
            if at < len(self.segments):
                [rows] = self.source.load(self.segments[at : at + 1])
                positions = rows.locate(own)
                found.append(rows.take(positions[positions >= 0]))  # copied, so that one segment is in memory
        return ChunkTable.concat(found).select(numbers)

    def within(self, first: int, last: int) -> tuple[Segment, ...]:
        """Return the segments whose range has one of the numbers from `first` to `last`."""
        start = np.searchsorted(self.lasts, np.uint64(first))
        stop = np.searchsorted(self.firsts, np.uint64(last), "right")
        return self.segments[int(start) : int(stop)]

    def tables(self) -> Iterator[ChunkTable]:
        """Yield the rows of each segment."""
        for segment in self.segments:
            yield from self.source.load((segment,))

    def load(self) -> ChunkTable:
        """Return all rows, sorted by number."""
        return ChunkTable.concat(list(self.tables()))

    @property
    def is_dense(self) -> bool:
        """Whether every chunk between the first and the last has a row."""
        return len(self) == self.segments[-1].last - self.segments[0].first + 1


def fitting(table: ChunkTable) -> npt.NDArray[np.bool_]:
    """Return which rows can be in a segment: those that are short enough, of chunks that are not inline."""
    stored = np.array([isinstance(pack, str) for pack in table.packs], np.bool_)[table.pack]
    return np.logical_and(stored, np.diff(table.blocks) * CHECK_SIZE + _ROW_BYTES <= SEGMENT_BYTES)


def cut(table: ChunkTable) -> Iterator[ChunkTable]:
    """Yield the rows of a table in parts, each of which becomes a segment."""
    ends = table.blocks[1:] * CHECK_SIZE + _ROW_BYTES * np.arange(1, len(table) + 1)
    start = size = 0
    while start < len(table):
        fitting = int(np.searchsorted(ends, size + SEGMENT_BYTES, "right"))
        stop = max(start + 1, min(fitting, start + SEGMENT_ROWS))
        yield table.part(start, stop)
        start, size = stop, int(ends[stop - 1])


def encode_segment(table: ChunkTable) -> tuple[bytes, tuple[str, ...]]:
    """Return the bytes of a segment with these rows, and their packs; each row is `fitting`."""
    rows = table.with_used_packs()
    columns = (rows.number, rows.pack, rows.offset, rows.length, rows.checks)
    return b"".join([column.tobytes() for column in columns]), tuple(map(str, rows.packs))


def decode_segment(data: bytes, segment: Segment) -> ChunkTable:
    """Return the rows of a segment; raise `Corrupt` unless the bytes are those to which it refers."""
    if len(data) != segment.length or digest(data) != segment.check:
        raise Corrupt(
            f"checksum mismatch in the {segment.length} bytes at {segment.offset} in {segment.pack}, which are "
            "references to chunks; the bytes have changed since they were committed: restore the file from a "
            "copy, or read another version"
        )
    n = segment.rows
    cuts = itertools.accumulate([0, 8 * n, 4 * n, 8 * n, 8 * n])
    number, pack, offset, length, checks = (
        data[start:stop] for start, stop in itertools.pairwise([*cuts, len(data)])
    )
    table = ChunkTable.from_columns(
        segment.packs,
        np.frombuffer(number, "<u8"),
        np.frombuffer(pack, "<u4"),
        np.frombuffer(offset, "<u8"),
        np.frombuffer(length, "<u8"),
        as_checks(checks),
    )
    table.validate()
    numbers = table.number
    rising = bool((numbers[1:] > numbers[:-1]).all())
    if not rising or (int(numbers[0]), int(numbers[-1])) != (segment.first, segment.last):
        raise Corrupt(f"the segment at {segment.offset} in {segment.pack} has other chunks than its manifest says")
    if int(table.length.sum()) != segment.stored_bytes:
        raise Corrupt(f"the segment at {segment.offset} in {segment.pack} has chunks of other lengths")
    return table

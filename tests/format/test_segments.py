"""Segments of references to chunks: golden bytes, lookups compared with a dict, and damaged or lying bytes."""

from __future__ import annotations

import base64
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.thresholds import Thresholds
from tstore.core.format.checksums import digest
from tstore.core.format.objects import segments as module
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.compactions import Compaction, CompactionPlan, compacted
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.encoding import decode, encode
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.segments import Segment, SortedRun, cut, decode_segment, encode_segment
from tstore.core.format.objects.tables import Table, count_of, numbers_of, sorted_runs, stack
from tstore.core.format.tree.node import Node
from tstore.core.format.tree.validation import check_compactions
from tstore.errors import Corrupt

DOCUMENT = b'{"zarr_format":3,"node_type":"group","attributes":{}}'
ROWS = [
    ChunkRow(3, "txn/a/pack-0", 0, 10, b"a" * 16),
    ChunkRow(4, "txn/a/pack-1", 10, 0, b"b" * 16),
    ChunkRow(9, "txn/a/pack-0", 10, (1 << 20) + 1, b"c" * 32),
]
GOLDEN_SEGMENT = (
    "0{{R3000001ONa4000002><{900000000000RR910000000000000003IG5A000003IG5A000003IG5A0000000000000000RRvH"
    "00000VPRomVPRomVPRomVPRomVq#)qVq#)qVq#)qVq#)qV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1uV`F1u"
)
GOLDEN_MANIFEST = (
    "baQlXa%D{f+yD`%ZDDR{W@U49ldN=jZZBakaA9L>EikNfcy2FYFK}UFYb`OXba-wrVJ~oDV{0urkdeeSdm?&aa&lj0Z*py6bRs%4EFx}"
    "iWMyA;d2nSSIwEIsZ*_1YEFxiabaH88b#!HOB0770eUhPPp?Aax0000000000!~y^T#1H@g000000003100000006`Y0{{R300000!~_"
    "5U006`Y0000000000#0Uxi00000006`gVPRomVPRomVPRomVPRom#0UTY00031006{D0{{R3000002><{9000000{{R3000003jh!R00"
    "0000ssI20ssI20000000000lmGw#00000146ipG-vlYR9T*kf{dux#0UTY000310059=DArhpH&>OGr4^12afHP"
)


class Memory:
    """Segments in memory, and how often each was read."""

    def __init__(self) -> None:
        self.data: dict[tuple[str, int], bytes] = {}
        self.reads: list[Segment] = []

    def write(self, table: ChunkTable, pack: str = "txn/a/pack-9") -> Segment:
        data, packs = encode_segment(table)
        offset = sum(map(len, self.data.values()))
        self.data[pack, offset] = data
        first, last = table.number[[0, -1]].tolist()
        stored = int(table.length.sum())
        return Segment(first, last, len(table), stored, packs, pack, offset, len(data), digest(data))

    def load(self, segments: Sequence[Segment]) -> list[ChunkTable]:
        self.reads += segments
        return [decode_segment(self.data[s.pack, s.offset], s) for s in segments]


def segmented(memory: Memory, table: ChunkTable, rows: int) -> list[SortedRun]:
    parts = [table.part(at, min(at + rows, len(table))) for at in range(0, len(table), rows)]
    return sorted_runs([memory.write(part) for part in parts], memory)


def test_golden_bytes() -> None:
    memory = Memory()
    segment = memory.write(ChunkTable.from_rows(ROWS))
    data = base64.b85decode(GOLDEN_SEGMENT)
    assert memory.data[segment.pack, segment.offset] == data
    assert decode_segment(data, segment).rows == ROWS
    inline = ChunkTable.from_rows(ROWS[:1])
    nodes = [("w", DOCUMENT, True, (SortedRun([segment], memory), inline)), ("g", DOCUMENT, False, ())]
    manifest = Manifest.from_nodes(nodes)
    assert encode(manifest)[7] == 4  # so that an older tstore does not read it without its segments
    assert encode(manifest) == base64.b85decode(GOLDEN_MANIFEST)
    read = decode(base64.b85decode(GOLDEN_MANIFEST), Manifest).attach(memory)
    [(*_, (empty,)), (_, _, _, (table, rest))] = read.nodes()
    assert isinstance(table, SortedRun)
    assert table.segments == (segment,)
    assert isinstance(rest, ChunkTable)
    assert rest.rows == ROWS[:1]
    assert not len(empty)


NUMBERS = st.integers(0, 40)
WRITE = st.tuples(st.dictionaries(NUMBERS, st.integers(0, 99), min_size=1, max_size=30), st.integers(0, 7))


@given(st.lists(WRITE, min_size=1, max_size=25), st.lists(NUMBERS, unique=True), NUMBERS, NUMBERS)
def test_lookups_equal_those_in_a_dict(
    writes: list[tuple[dict[int, int], int]], numbers: list[int], start: int, stop: int
) -> None:
    """Each write is a table in memory, or is cut into segments of some rows."""
    memory, expected = Memory(), dict[int, ChunkRow]()
    tables: tuple[Table, ...] = ()
    for at, (chunks, rows) in enumerate(writes):
        written = [
            ChunkRow(number, f"txn/a/pack-{at % 3}", offset, number, bytes([at]) * 16)
            for number, offset in sorted(chunks.items())
        ]
        expected |= {row.number: row for row in written}
        table = ChunkTable.from_rows(written)
        added: list[Table] = [*segmented(memory, table, rows)] if rows else [table]
        tables = stack(tables, added)
    manifest = decode(encode(Manifest.from_nodes([("w", DOCUMENT, True, tables)])), Manifest).attach(memory)
    [(*_, read)] = manifest.nodes()
    for node in (Node("w", Document(DOCUMENT), tables), Node("w", Document(DOCUMENT), read)):
        assert [node.row(n) for n in range(42)] == [expected.get(n) for n in range(42)]
        assert node.chunks.rows == [expected[n] for n in sorted(expected)]
        assert node.select(np.array(numbers, np.int64)).rows == [expected[n] for n in numbers if n in expected]
        wanted = range(start, max(start, stop))
        assert node.select(wanted).rows == [expected[n] for n in wanted if n in expected]
        assert node.chunk_count == len(expected)
        assert node.stored_bytes == sum(row.length for row in expected.values())
        assert node.packs >= {row.pack for row in expected.values()}


def test_a_node_without_tables_has_no_chunks() -> None:
    node = Node("w", Document(DOCUMENT), ())
    assert (node.chunk_count, node.stored_bytes, node.packs, len(node.chunks)) == (0, 0, set(), 0)
    assert node.row(0) is None
    assert not len(node.select(range(3)))


def test_a_lookup_reads_only_the_segments_with_its_chunks() -> None:
    memory = Memory()
    rows = [ChunkRow(n, "txn/a/pack-0", n, 1, bytes(16)) for n in range(100)]
    [table] = segmented(memory, ChunkTable.from_rows(rows), 10)
    assert table.row(35) == rows[35]
    assert [s.first for s in memory.reads] == [30]
    memory.reads.clear()
    assert table.select(range(58, 71)).rows == rows[58:71]
    assert [s.first for s in memory.reads] == [50, 60, 70]
    memory.reads.clear()
    assert table.select(np.array([99, 5])).rows == [rows[99], rows[5]]
    assert [s.first for s in memory.reads] == [0, 90]
    assert table.row(100) is None


def test_a_lookup_of_few_chunks_in_many_segments_takes_little_memory() -> None:
    """The chunks of an array of 3 million chunks that a compaction of scattered rows is compared with."""
    size = 16 << 10
    checks = np.zeros((size, 16), np.uint8)

    class Made:
        def load(self, segments: Sequence[Segment]) -> list[ChunkTable]:
            columns = np.zeros(size, "<u4"), np.arange(size, dtype="<u8"), np.ones(size, "<u8"), checks.copy()
            return [
                ChunkTable.from_columns(("p",), np.arange(s.first, s.last + 1, dtype="<u8"), *columns)
                for s in segments
            ]

    references = [
        Segment(first, first + size - 1, size, size, ("p",), "p", 0, 44 * size, b"c" * 16)
        for first in range(0, 3_000_000, size)
    ]
    numbers = np.arange(0, 3_000_000, 9973, dtype="<u8")
    tracemalloc.start()
    try:
        rows = SortedRun(references, Made()).select(numbers[::-1])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(rows.number, numbers[::-1])
    assert peak < 8 << 20


def test_segments_that_newer_ones_replace_are_dropped() -> None:
    memory = Memory()
    old, new = ([ChunkRow(n, f"txn/{t}/pack-0", n, 1, bytes(16)) for n in range(100)] for t in "ab")
    [oldest] = segmented(memory, ChunkTable.from_rows(old), 10)
    change = ChunkTable.from_rows(old[25:26])
    [newest] = segmented(memory, ChunkTable.from_rows(new[15:60]), 10)
    first, second = stack(stack((oldest,), (change,)), (newest,))
    assert isinstance(first, SortedRun)
    assert [s.first for s in first.segments] == [0, 10, 60, 70, 80, 90]
    assert second is newest


def test_cuts_are_bounded_in_rows_and_bytes(thresholds: Thresholds) -> None:
    thresholds(SEGMENT_ROWS=3, SEGMENT_BYTES=200)
    short = [ChunkRow(n, "txn/a/pack-0", 0, 1, bytes(16)) for n in range(7)]
    long = [ChunkRow(n, "txn/a/pack-0", 0, 20 << 20, bytes(320)) for n in (7, 8)]
    parts = list(cut(ChunkTable.from_rows([*short, *long])))
    assert [part.number.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6], [7], [8]]
    assert [row for part in parts for row in part.rows] == [*short, *long]


def test_damage_to_any_byte_of_a_segment_is_noticed() -> None:
    memory = Memory()
    segment = memory.write(ChunkTable.from_rows(ROWS))
    data = memory.data[segment.pack, segment.offset]
    for at in range(len(data)):
        with pytest.raises(Corrupt, match="checksum mismatch"):
            decode_segment(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], segment)
    for wrong in (b"", data[:-1], data + b"\0"):
        with pytest.raises(Corrupt, match="checksum mismatch"):
            decode_segment(wrong, segment)


@pytest.mark.parametrize(
    "rows",
    [
        [ROWS[1], ROWS[0], ROWS[2]],
        [ROWS[0], ROWS[0], ROWS[2]],
        [ROWS[0], ROWS[1]],
        ROWS[1:],
        [ROWS[0], msgspec.structs.replace(ROWS[1], length=1), ROWS[2]],
    ],
)
def test_a_segment_with_other_rows_than_its_reference_is_corrupt(rows: list[ChunkRow]) -> None:
    memory = Memory()
    expected = memory.write(ChunkTable.from_rows(ROWS))
    forged = memory.write(ChunkTable.from_rows(rows))
    same = {"first": expected.first, "last": expected.last, "stored_bytes": expected.stored_bytes}
    with pytest.raises(Corrupt):
        decode_segment(memory.data[forged.pack, forged.offset], msgspec.structs.replace(forged, **same))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 0},
        {"rows": 8},
        {"rows": 1 << 60},
        {"first": 10},
        {"last": 1 << 62},
        {"length": 0},
        {"length": 139},
        {"length": 1 << 61},
        {"offset": 1 << 63},
        {"stored_bytes": 1 << 63},
        {"packs": ("commits/1",)},
        {"pack": "tstore.json"},
    ],
    ids=str,
)
def test_a_reference_that_contradicts_itself_is_corrupt(changes: dict[str, Any]) -> None:
    memory = Memory()
    segment = msgspec.structs.replace(memory.write(ChunkTable.from_rows(ROWS)), **changes)
    manifest = Manifest.from_nodes([("w", DOCUMENT, True, (SortedRun([segment], memory),))])
    with pytest.raises(Corrupt):
        manifest.validate()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("segment_count", b""),
        ("segment_count", b"\x02\0\0\0"),
        ("segment_count", b"\xff\xff\xff\xff"),
        ("segments", b""),
        ("segments", bytes(72)),
        ("segments", bytes(15)),
        ("segment_packs", b""),
        ("segment_packs", b"\xff\xff\xff\xff" * 2),
        ("packs", ()),
    ],
)
def test_columns_that_do_not_fit_are_corrupt(column: str, value: Any) -> None:
    memory = Memory()
    segment = memory.write(ChunkTable.from_rows(ROWS))
    manifest = Manifest.from_nodes([("w", DOCUMENT, True, (SortedRun([segment], memory),))])
    with pytest.raises(Corrupt):
        msgspec.structs.replace(manifest, **{column: value}).validate()


def test_stacking_many_overlapping_segments_takes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server stacks what a client sends, so the work must not grow with the square of the runs."""
    memory, calls = Memory(), 0
    segment = memory.write(ChunkTable.from_rows(ROWS[:1]))
    tables = sorted_runs([msgspec.structs.replace(segment, first=n, last=n) for n in range(3000, 0, -1)], memory)
    searched = np.searchsorted

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return searched(*args, **kwargs)

    monkeypatch.setattr(np, "searchsorted", counted)
    assert len(stack(tables[:1500], tables[1500:])) == 3000
    assert len(stack(tables, tables)) == 3000
    assert calls <= 1500 + 3000


def test_a_row_with_more_checksums_than_a_segment_may_have_is_not_in_one() -> None:
    """A chunk of 70 GB; its checksums do not fit into the block of a pack that one checksum covers."""
    rows = [ChunkRow(n, "txn/a/pack-0", 0, size << 20, bytes(16) * size) for n, size in enumerate((1, 70_000))]
    rows.append(ChunkRow(2, b"inline", 0, 6, bytes(16)))
    table = ChunkTable.from_rows(rows)
    assert module.fitting(table).tolist() == [True, False, False]
    memory = Memory()
    segment = memory.write(table.part(1, 2))
    with pytest.raises(Corrupt, match="a segment of 1 rows has"):
        Manifest.from_nodes([("w", DOCUMENT, True, (SortedRun([segment], memory),))]).validate()


def test_a_compaction_takes_the_place_of_what_it_replaces() -> None:
    """Rows that it does not replace stay above it, and rows below segments stay below."""
    memory = Memory()
    old, new = ([ChunkRow(n, f"txn/{t}/pack-0", n, 1, bytes(16)) for n in range(20)] for t in "ab")
    [lower] = segmented(memory, ChunkTable.from_rows(old), 10)
    below, above = ChunkTable.from_rows(old[3:5]), ChunkTable.from_rows(old[5:9])
    [upper] = segmented(memory, ChunkTable.from_rows(old[2:12:2]), 10)
    compacted_rows = ChunkTable.from_rows([*new[2:8], *new[10:11]])
    [table] = segmented(memory, compacted_rows, 10)
    compaction = Compaction(table, frozenset([upper.segments[0].check]), np.array([5, 7, 8], np.uint64))
    before: tuple[Table, ...] = (lower, below, upper, above)
    first, second, third, fourth = compacted(before, compaction)
    assert (first, second, third) == (lower, below, table)
    assert isinstance(fourth, ChunkTable)
    assert fourth.number.tolist() == [6]
    manifest = Manifest.from_nodes(
        [("v", DOCUMENT, True, ()), ("w", DOCUMENT, False, (above,))], {"w": compaction}
    )
    read = decode(encode(manifest), Manifest).attach(memory)
    [again] = read.compactions_by_path().values()
    assert (again.run.segments, again.replaced) == (table.segments, compaction.replaced)
    assert again.numbers.tolist() == [5, 7, 8]
    [_, (*_, tables)] = read.nodes()
    assert [len(t) for t in tables] == [4]  # what the commit wrote itself
    assert numbers_of(read.node(1)[1]).tolist() == [5, 6, 7, 8]


def test_a_compaction_is_compared_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server serves others between them; here each is of two rows, or of one segment."""
    monkeypatch.setattr("tstore.core.format.objects.compactions.SEGMENT_ROWS", 2)
    memory = Memory()
    rows = ChunkTable.from_rows([ChunkRow(n, "txn/a/pack-0", n, 1, bytes(16)) for n in range(20)])
    compaction = Compaction(SortedRun([memory.write(rows)], memory), frozenset(), rows.number)
    manifest = Manifest.from_nodes([("w", DOCUMENT, False, ())], {"w": compaction})
    record = Record(transaction="b", base=1, time=0.0, manifests=(manifest,))
    steps = list(check_compactions(record, [manifest], {"w": Node("w", Document(DOCUMENT), (rows,))}))
    assert len(steps) >= 1 + 10


def test_a_compaction_reads_some_segments_at_once_and_each_once(thresholds: Thresholds) -> None:
    thresholds(SEGMENT_ROWS=10)
    memory = Memory()
    tables: list[Table] = []
    for run in range(9):
        numbers = range(run, 9000, 9)
        rows = [ChunkRow(n, "txn/a/pack-0", n, 1, bytes(16)) for n in numbers]
        tables += segmented(memory, ChunkTable.from_rows(rows), 10)
    thresholds(MIN_SEGMENTS=1000)
    plan = CompactionPlan.make(tables, 0, 1024)
    assert plan is not None
    taken, before, most = list[int](), 0, 0
    for part in plan.parts(plan.rows()):
        taken += part.number.tolist()
        before, most = len(memory.reads), max(most, len(memory.reads) - before)
    assert taken == list(range(9000))
    assert most <= 60  # of 900: sixteen end in a range, and each run has one more that ends behind it
    assert len(memory.reads) <= 2 * 900


def test_numbers_and_counts_read_only_segments_that_lack_numbers() -> None:
    memory = Memory()
    rows = [ChunkRow(n, "txn/a/pack-0", n, 1, bytes(16)) for n in range(30)]
    [dense] = segmented(memory, ChunkTable.from_rows(rows[:20]), 10)
    [lacking] = segmented(memory, ChunkTable.from_rows(rows[20:29:2]), 10)
    assert numbers_of([dense]).tolist() == list(range(20))
    assert count_of([dense, lacking]) == 25  # their ranges do not overlap
    assert memory.reads == []
    assert numbers_of([dense, lacking]).tolist() == [*range(20), *range(20, 29, 2)]
    assert [segment.first for segment in memory.reads] == [20]
    memory.reads.clear()
    assert count_of([lacking, lacking]) == 5
    assert memory.reads


def test_a_compaction_does_not_cover_a_row_that_fits_in_no_segment() -> None:
    """The row is between segments with the former chunk and others, whose compaction would lie over the row."""
    memory = Memory()
    old = [ChunkRow(n, "txn/a/pack-0", n, 1, bytes(16)) for n in range(10)]
    long = ChunkRow(3, "txn/b/pack-0", 0, 70_000 << 20, bytes(16) * 70_000)
    upper = [ChunkRow(n, "txn/c/pack-0", n, 1, bytes(16)) for n in (1, 5)]
    above = [ChunkRow(n, "txn/d/pack-0", n, 1, bytes(16)) for n in range(5, 10)]
    [first], [second] = (segmented(memory, ChunkTable.from_rows(rows), 10) for rows in (old, upper))
    tables: tuple[Table, ...] = (first, ChunkTable.from_rows([long]), second, ChunkTable.from_rows(above))
    plan = CompactionPlan.make(tables, 0, 3)
    if plan is not None:
        parts = list(plan.parts(plan.rows()))
        table = SortedRun([memory.write(part) for part in parts], memory)
        tables = compacted(tables, Compaction(table, plan.replaced, plan.numbers))
    assert Node("w", Document(DOCUMENT), tables).row(3) == long


@pytest.mark.parametrize(
    "fields",
    [
        {"node": 2},
        {"node": -1},
        {"segments": 0},
        {"segments": 3},
        {"replaced": bytes(15)},
        {"numbers": bytes(7)},
        {"numbers": bytes(16)},
    ],
)
def test_an_invalid_compaction_is_refused(fields: dict[str, Any]) -> None:
    memory = Memory()
    rows = ChunkTable.from_rows([ChunkRow(n, "txn/a/pack-0", n, 1, bytes(16)) for n in range(20)])
    [table] = segmented(memory, rows, 10)
    compaction = Compaction(table, frozenset([bytes(16)]), np.array([1, 2], np.uint64))
    manifest = Manifest.from_nodes([("v", DOCUMENT, True, ()), ("w", DOCUMENT, False, ())], {"w": compaction})
    manifest.validate()
    [entry] = manifest.compactions
    for entries in ([msgspec.structs.replace(entry, **fields)], [entry, entry]):
        with pytest.raises(Corrupt):
            msgspec.structs.replace(manifest, compactions=tuple(entries)).validate()

"""The chunks that a record adds, against a search of all rows, and the memory that finding them takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.thresholds import Thresholds
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.checksums import CHECK_SIZE
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.added_chunks import added_chunks
from tstore.core.format.tree.node import Node
from tstore.errors import Corrupt

META = ArrayMeta.new((1 << 40,), "u1", (1,))
NARROW, WIDE = ArrayMeta.new((6, 4), "u1", (1, 1)), ArrayMeta.new((4, 6), "u1", (1, 1))
OWN, OTHERS = "txn/own/pack-0", ("txn/a/pack-0", "txn/b/pack-0", b"inline" * 20)
SIZE = 10
Tables = list[dict[int, tuple[str | bytes, int, int]]]


def table(chunks: Mapping[int, tuple[str | bytes, int, int]]) -> ChunkTable:
    """Return the rows of chunks, each given by its pack, its place in it and its checksum."""
    rows = [ChunkRow(n, p, at * SIZE, SIZE, bytes([c]) * CHECK_SIZE) for n, (p, at, c) in chunks.items()]
    return ChunkTable.from_rows(sorted(rows, key=attrgetter("number")))


def columns(pack: str, first: int, count: int, length: int = 4096, check: int = 0) -> ChunkTable:
    """Return the rows of consecutive chunks that are one after the other in a pack."""
    number = np.arange(first, first + count, dtype="<u8")
    checks = np.full((count, CHECK_SIZE), check, "u1")
    zeros = np.zeros(count, "<u4")
    return ChunkTable.from_columns((pack,), number, zeros, number * length, np.full(count, length, "<u8"), checks)


def node(path: str, tables: list[ChunkTable], meta: ArrayMeta = META) -> Node:
    return Node(path, Document(meta.document), tuple(tables))


CHUNKS = st.dictionaries(
    st.integers(0, 23), st.tuples(st.sampled_from(OTHERS), st.integers(0, 3), st.integers(0, 1)), max_size=12
)
NODES = st.dictionaries(st.sampled_from("abcdef"), st.lists(CHUNKS, min_size=1, max_size=4), max_size=6)


@given(
    NODES,
    st.dictionaries(st.sampled_from("abcdefg"), CHUNKS, max_size=7),
    st.integers(1, 7),
    st.sampled_from([0, 3, 16]),
)
def test_chunks_that_the_nodes_have_are_left_out(
    before: dict[str, Tables], written: dict[str, Mapping[int, tuple[str | bytes, int, int]]], step: int, few: int
) -> None:
    stored = Manifest.from_nodes([(p, META.document, True, [table(tables[0])]) for p, tables in before.items()])
    oldest = {path: part for path, _, _, (part,) in stored.nodes()}  # these share their columns
    nodes = {p: node(p, [oldest[p], *map(table, tables[1:])]) for p, tables in before.items()}
    manifest = Manifest.from_nodes([(p, META.document, False, [table(chunks)]) for p, chunks in written.items()])
    expected = set()
    for path, chunks in written.items():
        newest = {number: place for tables in before.get(path, []) for number, place in tables.items()}
        expected |= {place for number, place in chunks.items() if newest.get(number) != place}
    expected = {place for place in expected if place[0] == OTHERS[0]}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tstore.core.format.tree.added_chunks._STEP_ROWS", step)
        patch.setattr("tstore.core.format.tree.added_chunks._MIN_TOGETHER", few)
        try:
            for rows in added_chunks(Record("own", 1, 1.0), [manifest], nodes, {"txn/b/pack-0"}):
                found += [(row.pack, row.offset // SIZE, row.checks[0]) for row in rows.rows]
        except Corrupt:
            assert len({place[:2] for place in expected}) < len(expected)
        else:
            assert found == sorted(expected)


@pytest.mark.parametrize("few", [0, 16])
def test_only_the_newest_row_of_a_chunk_is_known(thresholds: Thresholds, few: int) -> None:
    thresholds(_MIN_TOGETHER=few)
    old, new = {0: (OTHERS[0], 0, 1)}, {0: (OTHERS[0], 1, 1)}
    nodes = {"w": node("w", [table(old), table(new)])}
    for written, added in ((old, [0]), (new, [])):
        manifest = Manifest.from_nodes([("w", META.document, False, [table(written)])])
        found = added_chunks(Record("own", 1, 1.0), [manifest], nodes, set())
        assert [row.offset // SIZE for rows in found for row in rows.rows] == added


def test_chunks_of_a_resized_array_are_known_at_their_new_numbers() -> None:
    chunks = {n: (OTHERS[0], n, 1) for n in range(24)}
    kept = {row * 6 + column: chunks[row * 4 + column] for row in range(4) for column in range(4)}
    for written, added in ((kept, []), (kept | {5: (OTHERS[0], 9, 0)}, [9])):
        manifest = Manifest.from_nodes([("w", WIDE.document, True, [table(written)])])
        nodes = {"w": node("w", [table(chunks)], NARROW)}
        found = added_chunks(Record("own", 1, 1.0), [manifest], nodes, set())
        assert [row.offset // SIZE for rows in found for row in rows.rows] == added


def test_packs_are_in_the_order_of_their_keys() -> None:
    chunks = {n: (f"txn/own/pack-{9 - n}", 0, 1) for n in range(9)}
    manifest = Manifest.from_nodes([("w", META.document, True, [table(chunks)])])
    [rows] = added_chunks(Record("own", 1, 1.0), [manifest], {}, set())
    assert [row.pack for row in rows.rows] == sorted(place[0] for place in chunks.values())


def test_the_work_depends_on_the_chunks_of_the_record_alone() -> None:
    """However many chunks the array has, and in steps that take no more than their rows."""
    many = 1_000_000
    nodes = {"w": node("w", [columns("txn/a/pack-0", 0, many), columns("txn/b/pack-0", 5, 1)])}
    for each in nodes["w"].tables:
        _ = each.blocks  # which the tree keeps
    for count, most in ((1, 100 << 10), (10_000, 7 << 20)):
        own = columns(OWN, many + 9, count)
        reused = columns("txn/a/pack-0", 3, count)
        manifest = Manifest.from_nodes([("w", META.document, False, [reused, own])])
        assert len(manifest.table) == 2 * count
        _ = manifest.table.blocks, nodes["w"].metadata.is_array
        added = added_chunks(Record("own", 1, 1.0), [manifest], nodes, set())
        tracemalloc.start()
        try:
            found = sum(map(len, added))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert found == count + (count > 2)  # chunk 5 has been written again since
        assert peak < most, (count, peak)


def test_a_long_table_is_taken_from_in_proportion_to_the_rows() -> None:
    whole = columns("txn/a/pack-0", 0, 1_000_000)
    _ = whole.blocks
    tracemalloc.start()
    try:
        taken = whole.part(7, 900_000).take(np.array([5, 3]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken.number.tolist() == [12, 10]
    assert peak < 20 << 10

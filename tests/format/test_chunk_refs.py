"""Chunk tables against lists of rows: parts, selections, lookups and overlays."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tstore.core.format.checksums import BLOCK, CHECK_SIZE
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow

PACKS: tuple[str | bytes, ...] = ("txn/a/pack-0", b"inline", "txn/b/pack-0")


def row_of(number: int, pack: str | bytes, offset: int, length: int, check: int) -> ChunkRow:
    return ChunkRow(number, pack, offset, length, bytes([check]) * CHECK_SIZE * max(1, -(-length // BLOCK)))


LENGTHS = st.sampled_from([0, 1, 100, BLOCK, BLOCK + 1, 3 * BLOCK])
ROWS = st.lists(
    st.builds(
        row_of, st.integers(0, 20), st.sampled_from(PACKS), st.integers(0, 1 << 40), LENGTHS, st.integers(0, 255)
    ),
    max_size=10,
)


@given(ROWS, st.integers(0, 10), st.integers(0, 10))
def test_a_part_is_a_slice_of_the_rows(rows: list[ChunkRow], a: int, b: int) -> None:
    start, stop = sorted((min(a, len(rows)), min(b, len(rows))))
    part = ChunkTable.from_rows(rows).part(start, stop)
    assert part.rows == rows[start:stop]
    assert len(part) == stop - start
    assert part.checks.tobytes() == b"".join(row.checks for row in rows[start:stop])
    assert part.blocks.tolist() == list(
        itertools.accumulate((len(row.checks) // CHECK_SIZE for row in rows[start:stop]), initial=0)
    )
    assert part.take(np.arange(stop - start)[::-1]).rows == rows[start:stop][::-1]
    assert part.equals(ChunkTable.from_rows(rows[start:stop]))
    assert part.with_used_packs().rows == rows[start:stop]
    assert set(part.with_used_packs().packs) == {row.pack for row in rows[start:stop]}


@given(ROWS, st.sets(st.integers(0, 25)))
def test_the_latest_rows_are_looked_up_by_number(rows: list[ChunkRow], numbers: set[int]) -> None:
    latest = {row.number: row for row in rows}
    table = ChunkTable.from_rows(rows).latest()
    assert table.rows == [latest[number] for number in sorted(latest)]
    assert [table.row(number) for number in numbers] == [latest.get(number) for number in numbers]
    assert table.select(np.array(list(numbers), np.int64)).rows == [latest[n] for n in numbers if n in latest]


@given(st.lists(ROWS, max_size=3))
def test_an_overlay_has_the_rows_of_the_last_table(lists: list[list[ChunkRow]]) -> None:
    latest = {row.number: row for rows in lists for row in rows}
    shared = ChunkTable.from_rows([row for rows in lists for row in rows])
    stops = list(itertools.accumulate(map(len, lists), initial=0))
    for tables in (
        [ChunkTable.from_rows(rows) for rows in lists],
        [shared.part(a, b) for a, b in itertools.pairwise(stops)],
    ):
        assert ChunkTable.overlay(tables).rows == [latest[number] for number in sorted(latest)]

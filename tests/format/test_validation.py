"""The checks of a record's chunks that read no pack: unused packs, the ends of packs, and inline chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from msgspec.structs import replace

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.checksums import BLOCK, CHECK_SIZE, block_checks
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import SHORT_COLUMN, ChunkRow
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.validation import check_chunks, run_steps
from tstore.errors import Corrupt

META = ArrayMeta.new((1 << 40,), "u1", (1,))
INLINE = bytes(range(100))


@dataclass(frozen=True)
class Place:
    """Where a chunk lies; inline chunks have the checksum of their bytes, others any."""

    pack: str | bytes
    offset: int
    length: int


def manifest(*places: Place) -> Manifest:
    rows = [ChunkRow(n, p.pack, p.offset, p.length, checks(p)) for n, p in enumerate(places)]
    return Manifest.from_nodes([("w", META.document, True, [ChunkTable.from_rows(rows)])])


def checks(place: Place) -> bytes:
    if isinstance(place.pack, bytes):
        return block_checks(memoryview(place.pack)[place.offset : place.offset + place.length])
    return b"c" * CHECK_SIZE * max(1, -(-place.length // BLOCK))


@pytest.mark.parametrize("count", [2, SHORT_COLUMN + 2])
def test_a_pack_must_reach_the_end_of_its_last_chunk_in_any_manifest(count: int) -> None:
    first = manifest(*[Place("txn/a/pack-0", 10 * n, 10) for n in range(count)], Place("txn/b/pack-0", 5, 2))
    second = manifest(Place("txn/b/pack-0", 50, 0), Place("txn/a/pack-0", 3, 1), Place(INLINE, 0, 100))
    assert run_steps(check_chunks([first, second])) == {"txn/a/pack-0": 10 * count, "txn/b/pack-0": 50}


@pytest.mark.parametrize("count", [1, SHORT_COLUMN + 1])
def test_a_pack_without_chunks_is_refused(count: int) -> None:
    valid = manifest(*[Place("txn/a/pack-0", n, 1) for n in range(count)])
    with pytest.raises(Corrupt, match="names a pack to which none of its chunks refers"):
        run_steps(check_chunks([replace(valid, packs=(*valid.packs, "txn/b/pack-0"))]))


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([Place(INLINE, 90, 20)], "ends beyond its inline pack of 100 bytes"),
        ([Place(INLINE, 0, 60), Place(INLINE, 40, 60)], "chunk 1 overlaps others in its inline pack"),
        ([Place(INLINE, 0, 60), Place(INLINE, 0, 60), Place(INLINE, 60, 40)], ""),
    ],
)
def test_inline_chunks_are_within_their_pack_and_apart(places: list[Place], reason: str) -> None:
    made = manifest(*places)
    if not reason:
        assert run_steps(check_chunks([made])) == {}
        return
    with pytest.raises(Corrupt, match=reason):
        run_steps(check_chunks([made]))


def test_an_inline_chunk_with_another_checksum_is_refused() -> None:
    made = manifest(Place(INLINE, 0, 100))
    wrong = np.frombuffer(made.checks, np.uint8) ^ 1
    with pytest.raises(Corrupt, match="inline chunk 0 does not match its checksum"):
        run_steps(check_chunks([replace(made, checks=wrong.tobytes())]))

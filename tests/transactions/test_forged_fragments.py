"""Hostile fragments that refer to segments: the group refuses them, or readers and `verify` notice the lie."""

from __future__ import annotations

import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.forging import sealed
from tests.support.thresholds import Thresholds
from tstore.core.format.layout import commit_key
from tstore.core.format.objects.compactions import CompactionEntry
from tstore.core.format.objects.encoding import decode
from tstore.core.format.objects.records import Fragment
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.segments import SEGMENT_ROW
from tstore.errors import Corrupt, NotFound, TStoreError
from tstore.lab.simulation.scenario import override_constants

CHUNKS = 40
OF_HOST_0 = CHUNKS // 2
"""Host 0 writes this many chunks, and host 1 the others."""

Lie = Callable[[Manifest, Manifest], Manifest]
"""Changes the manifest of host 1, given one of another transaction."""


def of_segments(**columns: Callable[[Any], Any]) -> Lie:
    """Return a lie about the segments: functions of their columns."""

    def lie(manifest: Manifest, _: Manifest) -> Manifest:
        rows = np.frombuffer(manifest.segments, SEGMENT_ROW).copy()
        for name, change in columns.items():
            rows[name] = change(rows[name])
        return msgspec.structs.replace(manifest, segments=rows.tobytes())

    return lie


def with_compaction(numbers: list[int], replaced: bytes = b"", count: int = 1) -> Lie:
    """Return a lie that makes the first segments a compaction of earlier references, which hosts never add."""
    entry = CompactionEntry(0, count, replaced, np.array(numbers, "<u8").tobytes())
    return lambda manifest, _: msgspec.structs.replace(manifest, compactions=(entry,))


def of_another_transaction(manifest: Manifest, other: Manifest, above: int = 0) -> Manifest:
    """Refer to the segments of another transaction whose chunk numbers are above a number."""
    rows = np.frombuffer(other.segments, SEGMENT_ROW)
    packs = np.split(np.frombuffer(other.segment_packs, "<u4"), rows["packs"].cumsum()[:-1])
    chosen = np.flatnonzero(rows["first"] >= above)
    rows = rows[chosen].copy()
    rows["pack"] += len(manifest.packs)
    return msgspec.structs.replace(
        manifest,
        packs=(*manifest.packs, *other.packs),
        segments=rows.tobytes(),
        segment_packs=(np.concatenate([packs[at] for at in chosen]) + len(manifest.packs)).astype("<u4").tobytes(),
        segment_count=np.array([len(rows)], "<u4").tobytes(),
    )


LIES: dict[str, Lie] = {
    "a range into another host's chunks": of_segments(first=lambda first: first - 15),
    "the range of another host": of_segments(first=lambda v: v - 20, last=lambda v: v - 20),
    "one range for all segments": of_segments(first=lambda v: v * 0 + 20, last=lambda v: v * 0 + 39),
    "a range beyond the grid": of_segments(last=lambda last: last + (1 << 40)),
    "2^60 rows": of_segments(rows=lambda v: v * 0 + (1 << 60), last=lambda v: v * 0 + (1 << 61)),
    "fewer rows": of_segments(rows=lambda v: v * 0 + 1),
    "no rows": of_segments(rows=lambda v: v * 0),
    "an offset outside of the pack": of_segments(offset=lambda v: v + (1 << 40)),
    "the offset of another segment": of_segments(offset=lambda v: v[::-1]),
    "a length outside of the pack": of_segments(length=lambda v: v + 5000),
    "another length": of_segments(length=lambda v: v - 1),
    "2^61 stored bytes": of_segments(stored_bytes=lambda v: v * 0 + (1 << 61)),
    "a wrong checksum": of_segments(check=lambda v: v[::-1]),
    "a pack that does not exist": lambda m, _: msgspec.structs.replace(
        m, packs=tuple(f"{pack[:-1]}9" if pack else "" for pack in m.packs)
    ),
    "the segments of another transaction": of_another_transaction,
    "a compaction that replaces the chunks of host 0": with_compaction(list(range(OF_HOST_0))),
    "a compaction with unknown checksums": with_compaction([], b"x" * 16),
    "a compaction of more segments than there are": with_compaction([], count=1000),
}


@pytest.fixture
def small(thresholds: Thresholds) -> Iterator[None]:
    """Make segments of eight rows."""
    thresholds(INLINE_BYTES=8)  # one chunk
    with override_constants(SEGMENT_ROWS=8, MIN_SEGMENTED=4, MIN_HOST_ROWS=4):
        yield


async def create() -> tstore.Store:
    """Create a store with an array `w` whose chunks are all -1."""
    store = await tstore.open(f"memory://{uuid.uuid4()}", "x")
    async with store.transaction() as tx:
        await (await tx.create_array("w", (CHUNKS,), "i8", (1,))).write(-1)
    return store


async def prepare(store: tstore.Store, lie: Lie) -> Any:
    """Let host 1 deliver a fragment, change it, and return host 0's transaction, which has written its chunks."""
    storage = store.log.storage
    parts = [store.transaction(name="t", host=host, hosts=2, attempt="a") for host in range(2)]
    for host, chunks in ((0, range(OF_HOST_0)), (1, range(OF_HOST_0, CHUNKS))):
        w = await parts[host].array("w")
        await w[chunks.start : chunks.stop].write(np.array(chunks))
    assert await parts[1].deliver() is None
    [key] = [key for key in await storage.list("txn/") if "/part-00001" in key]
    fragment = decode(await storage.get(key), Fragment)
    [other] = await store.log.reader.objects.manifests(1, await store.log.reader.record(1))
    assert isinstance(fragment.manifest, Manifest)
    assert fragment.manifest.segments
    forged = msgspec.structs.replace(fragment, manifest=lie(fragment.manifest, other))
    await storage.replace(key, sealed(b"F\4", msgspec.msgpack.encode(forged)))
    return parts[0]


async def test_an_honest_fragment_is_committed(small: None) -> None:
    store = await create()
    await (await prepare(store, lambda manifest, _: manifest)).commit(timeout=60)
    assert (await (await (await store.snapshot()).array("w")).read()).tolist() == list(range(CHUNKS))
    assert (await store.verify()).ok


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_lie_about_segments_is_refused_or_noticed(small: None, lie: Lie) -> None:
    """It costs little memory, and never gives wrong numbers unnoticed or harms the chunks of the other host."""
    store = await create()
    first = await prepare(store, lie)
    tracemalloc.start()
    try:
        committed = await first.commit(timeout=60)
    except TStoreError:
        committed = None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 16 << 20
    if committed is None:  # nothing was committed, and the store is as it was
        assert await store.log.storage.size(commit_key(2)) is None
        assert (await (await (await store.snapshot()).array("w")).read() == -1).all()
        async with store.transaction() as tx:
            await (await tx.array("w")).write(5)
        assert (await store.verify()).ok
        return
    w = await (await (await tstore.open(store.url, "r")).snapshot()).array("w")
    wrong = 0
    for chunk in range(CHUNKS):
        try:
            value = int(await w[chunk].read())
        except (Corrupt, NotFound):
            wrong += 1
            continue
        if chunk < OF_HOST_0:
            assert value == chunk
        wrong += value != chunk
    assert not wrong or not (await store.verify()).ok


async def test_segments_of_another_transaction_are_kept_by_gc(small: None) -> None:
    """They are chunks that the host reuses: the record lists their packs, though the host did not."""
    store = await create()
    first = await prepare(store, lambda mine, other: of_another_transaction(mine, other, OF_HOST_0))
    version = await first.commit(timeout=60)
    assert (await store.log.reader.record(version)).reused
    assert (await store.collect(tstore.Keep(last=1))).versions == [1]
    values = await (await (await (await tstore.open(store.url, "r")).snapshot()).array("w")).read()
    assert values[24:].tolist() == [-1] * 16
    assert values[:OF_HOST_0].tolist() == list(range(OF_HOST_0))
    assert (await store.verify()).ok

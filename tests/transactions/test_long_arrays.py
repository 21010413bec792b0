"""Arrays with many chunks, whose references are in segments, through the public names.

The fixture `short` makes segments of three rows, so that a few chunks need many of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec.structs import replace
from zarr.core.buffer import cpu, default_buffer_prototype

import tstore
from tests.support.thresholds import Thresholds
from tests.transactions.test_compactions import make_small
from tstore.core.data.pieces import ReadJob
from tstore.core.format.layout import root_key
from tstore.core.format.objects import segments
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.tables import segments_of
from tstore.core.log import pages as log_pages
from tstore.core.log.pages import SegmentReader
from tstore.core.storage.base import Storage
from tstore.core.transactions import encoded, patches, staged_array
from tstore.errors import Conflict, Corrupt, Inconsistent, Misuse
from tstore.lab.simulation.scenario import override_constants
from tstore.zarr import ZarrStore

T = TypeVar("T")

CHUNK = 8


@pytest.fixture(autouse=True)
def off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no segment be read in the thread of an event loop, which must not block."""
    original = SegmentReader.load

    def load(self: SegmentReader, wanted: Sequence[segments.Segment]) -> list[ChunkTable]:
        with contextlib.suppress(RuntimeError):  # there is no loop
            asyncio.get_running_loop()
            pytest.fail("a segment is read on the event loop")
        return original(self, wanted)

    monkeypatch.setattr(SegmentReader, "load", load)


@pytest.fixture
def short(thresholds: Thresholds) -> Iterator[None]:
    """Make segments of three rows, for arrays of more than four."""
    thresholds(_MIN_TABLES=1)
    thresholds(INLINE_BYTES=0)
    thresholds(SHORT_COLUMN=1)
    with override_constants(SEGMENT_ROWS=3, MIN_SEGMENTED=4, MIN_HOST_ROWS=2):
        yield


@pytest.fixture
def frequent_roots() -> Iterator[None]:
    with override_constants(ROOT_EVERY=16):
        yield


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[segments.Segment]:
    """The segments that are read from storage."""
    read: list[segments.Segment] = []
    original = SegmentReader._read

    def recorded(self: SegmentReader, segment: segments.Segment) -> object:
        read.append(segment)
        return original(self, segment)

    monkeypatch.setattr(SegmentReader, "_read", recorded)
    return read


async def create(store: tstore.Store, values: np.ndarray, path: str = "w") -> None:
    async with store.transaction() as tx:
        await (await tx.create_array(path, values.shape, values.dtype, (CHUNK,))).write(values)


async def values_of(store: tstore.Store, path: str = "w", at: int | None = None) -> np.ndarray:
    result: np.ndarray = await (await (await store.snapshot(at)).array(path))[:].read()
    return result


async def test_an_element_costs_one_segment(url: str, loaded: list[segments.Segment]) -> None:
    """With segments of the usual length: 100,000 chunks take seven."""
    values = np.arange(100_000 * CHUNK, dtype="i8")
    await create(await tstore.open(url), values)
    assert not loaded  # writing and committing reads none
    store = await tstore.open(url)
    array = await (await store.snapshot()).array("w")
    assert not loaded  # nor does opening
    assert (await array[50_000 * CHUNK].read()) == 50_000 * CHUNK
    [segment] = loaded
    assert segment.first <= 50_000 <= segment.last
    assert segment.length <= segments.SEGMENT_BYTES
    async with store.transaction() as tx:
        await (await tx.array("w"))[: 2 * CHUNK].write(-1)  # two whole chunks
    assert loaded == [segment]
    values[: 2 * CHUNK] = -1
    assert np.array_equal(await values_of(store), values)
    assert len(set(loaded)) == len(loaded) == 7


async def test_the_memory_of_a_write_does_not_grow_with_the_number_of_chunks(tmp_path: Path) -> None:
    """Segments of 1,024 rows are written as soon as there are enough references for some."""
    peaks = []
    with override_constants(SEGMENT_ROWS=1 << 10):
        for count in (50_000, 200_000):
            store, values = await tstore.open(tmp_path / str(count)), np.arange(count)
            async with store.transaction(durability="none") as tx:
                array = await tx.create_array("w", values.shape, values.dtype, (1,))
                tracemalloc.start()
                await array.write(values)
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
    assert peaks[1] < 4 << 20  # 20 bytes a chunk


@pytest.mark.usefixtures("short", "frequent_roots")
async def test_changes_over_segments_are_read_back(url: str) -> None:
    rng, values = np.random.default_rng(7), np.arange(100 * CHUNK, dtype="i8")
    store = await tstore.open(url)
    await create(store, values)
    for version in range(2, 20):  # past a root
        start, stop = sorted(rng.integers(0, len(values) + 1, 2).tolist())
        values[start:stop] = version
        async with store.transaction() as tx:
            await (await tx.array("w"))[start:stop].write(version)
            assert np.array_equal(await (await tx.array("w"))[:].read(), values)
    for reader in (store, await tstore.open(url)):
        assert np.array_equal(await values_of(reader), values)
    assert (await store.verify()).ok
    async with store.transaction() as tx:
        array = await tx.array("w")
        await array.resize((37 * CHUNK + 3,))
    assert np.array_equal(await values_of(await tstore.open(url)), values[: 37 * CHUNK + 3])


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize(
    ("url", "seed"),
    [("local", 0), ("memory", 1)]
    + [pytest.param(("local", "memory")[n % 2], n, marks=pytest.mark.deep) for n in range(2, 12)],
    indirect=["url"],
)
async def test_resizes_of_random_arrays(url: str, seed: int, dimensions: int, thresholds: Thresholds) -> None:
    """With a region grown in the transaction that shrank the array, before or after writes, over many runs."""
    make_small(thresholds)
    rng, states = np.random.default_rng(seed), dict[int, np.ndarray]()
    store = await tstore.open(url)
    values = rng.integers(0, 99, (20, 4)[:dimensions])
    async with store.transaction() as tx:
        array = await tx.create_array("w", values.shape, "i8", (2, 3)[:dimensions])
        await array.write(values)
    for _ in range(15):
        async with store.transaction() as tx:
            array = await tx.array("w")
            for kind in rng.choice(["write", "write", "resize", "first axis"], 2):
                if kind == "write":
                    region = tuple(slice(*sorted(rng.integers(0, n + 1, 2).tolist())) for n in values.shape)
                    values[region] = part = rng.integers(100, 999, values[region].shape)
                    await array[region].write(part)
                    continue
                former, values = values, rng.integers(1000, 2000, (int(rng.integers(0, 40)), 7)[:dimensions])
                if kind == "resize":
                    values = values[..., : int(rng.integers(0, 8))]
                elif dimensions == 2:
                    values = np.resize(values, (len(values), former.shape[1]))
                await array.resize(values.shape)
                common = tuple(slice(min(a, b)) for a, b in zip(former.shape, values.shape, strict=True))
                for axis, (a, b) in enumerate(zip(former.shape, values.shape, strict=True)):
                    if b > a:
                        grown = (slice(None),) * axis + (slice(a, b),)
                        await (await tx.array("w"))[grown].write(values[grown])
                values[common] = former[common]
                array = await tx.array("w")
            assert np.array_equal(await array.read(), values)
        assert tx.version is not None
        states[tx.version] = values.copy()
    store = await tstore.open(url)
    for version, expected in states.items():
        assert np.array_equal(await (await (await store.snapshot(version)).array("w")).read(), expected)
    assert (await store.verify()).ok
    await store.collect(tstore.Keep(last=1))
    store = await tstore.open(url)
    assert np.array_equal(await values_of(store), values)
    assert (await store.verify()).ok


@pytest.mark.parametrize("shape", [(19, 6), (20, 5), (17, 4), (9, 6)])
async def test_values_cut_off_do_not_come_back(url: str, shape: tuple[int, int], thresholds: Thresholds) -> None:
    make_small(thresholds)
    store, values = await tstore.open(url), np.arange(1, 121).reshape(20, 6)
    async with store.transaction() as tx:
        await (await tx.create_array("w", (20, 6), "i8", (2, 3))).write(values)
    async with store.transaction() as tx:
        await (await tx.array("w")).resize(shape)
    edge = tuple(-(-n // c) * c for n, c in zip(shape, (2, 3), strict=True))  # of the chunks that stay
    async with store.transaction() as tx:
        await (await tx.array("w")).resize(edge)
    expected = np.zeros(edge, np.int64)
    expected[: shape[0], : shape[1]] = values[: shape[0], : shape[1]]
    assert np.array_equal(await values_of(await tstore.open(url)), expected)


async def test_a_resize_along_the_first_axis_refers_to_segments_as_they_are(
    url: str, loaded: list[segments.Segment]
) -> None:
    store = await tstore.open(url)
    await create(store, np.arange(200_000, dtype="i8"))
    [before] = (await store.snapshot()).tree.nodes["w"].tables
    for length in (200_001, 199_999, 100_000):
        store = await tstore.open(url)
        loaded.clear()
        async with store.transaction() as tx:
            await (await tx.array("w")).resize((length,))
        assert len(set(loaded)) <= 1
        nodes = (await (await tstore.open(url)).snapshot()).tree.nodes
        kept = segments_of(nodes["w"].tables)
        written = min(length, 200_000) // CHUNK
        assert written - sum(segment.rows for segment in kept) <= segments.MIN_SEGMENTED
        assert len(set(kept) - set(before.segments)) <= 1  # a long part of the one that was cut


@pytest.mark.usefixtures("short")
async def test_a_shrink_within_a_chunk_reads_only_the_segment_at_the_new_end(
    url: str, loaded: list[segments.Segment]
) -> None:
    """Of the numbers of other chunks, only segments that lack some would have to be read."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        array = await tx.create_array("w", (120 * CHUNK,), "i8", (CHUNK,), sparse=True)
        for at in range(0, 120, 2):
            await array[at * CHUNK : (at + 1) * CHUNK].write(7)
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.array("w")).resize((60 * CHUNK + 3,))
        await (await tx.array("w")).resize((120 * CHUNK,))
    assert {segment.first <= 60 <= segment.last for segment in loaded} == {True}
    expected = np.zeros(120 * CHUNK)
    expected.reshape(120, CHUNK)[:60:2] = 7
    expected[60 * CHUNK :][:3] = 7
    assert np.array_equal(await values_of(await tstore.open(url)), expected)


@pytest.mark.usefixtures("short")
async def test_concurrent_writes_of_one_transaction(url: str) -> None:
    store = await tstore.open(url)
    arrays = {f"w{i}": np.arange(i, i + 60 * CHUNK, dtype="i8") for i in range(4)}
    async with store.transaction() as tx:
        handles = {path: await tx.create_array(path, v.shape, v.dtype, (CHUNK,)) for path, v in arrays.items()}
        parts = [slice(at, at + 12 * CHUNK) for at in range(0, 60 * CHUNK, 12 * CHUNK)]
        await asyncio.gather(*[handles[path][part].write(v[part]) for part in parts for path, v in arrays.items()])
    for path, expected in arrays.items():
        assert np.array_equal(await values_of(await tstore.open(url), path), expected)
    assert (await store.verify()).ok


@pytest.mark.usefixtures("short")
async def test_conflicts_are_those_of_chunks(url: str) -> None:
    store = await tstore.open(url)
    await create(store, np.zeros(50 * CHUNK, "i8"))
    first, other, third = store.transaction(), store.transaction(), store.transaction()
    await (await first.array("w"))[: 20 * CHUNK].write(1)
    await (await other.array("w"))[20 * CHUNK :].write(2)
    await (await third.array("w"))[19 * CHUNK : 40 * CHUNK].write(3)
    await first.commit()
    await other.commit()
    with pytest.raises(Conflict, match="w"):
        await third.commit()
    assert (await values_of(store)).tolist() == [1] * 20 * CHUNK + [2] * 30 * CHUNK


@pytest.mark.usefixtures("short")
async def test_unchanged_chunks_outlive_the_step_that_wrote_them(url: str) -> None:
    values = {"w": np.arange(64 * 1024, dtype="i4"), "b": np.zeros(4, "i4")}
    for step in range(3):
        values["b"] += 1
        part = [((slice(0, 64 * 1024),), values["w"])]
        shards = tstore.Shards(values["w"].shape, "i4", part, shard_shape=(1024,))
        await tstore.save(url, {"w": shards, "b": values["b"]}, step)
    store = await tstore.open(url)
    assert (await (await store.snapshot()).array("w")).chunks == (1024,)
    report = await store.collect(tstore.Keep(last=1))
    assert report.versions == [1, 2]
    assert (await store.verify()).ok
    restored = await tstore.restore(await tstore.open(url))
    assert np.array_equal(restored["w"], values["w"])
    assert restored["b"].tolist() == [3] * 4


@pytest.mark.usefixtures("short")
async def test_hosts_with_interleaved_chunks(url: str, loaded: list[segments.Segment]) -> None:
    values, hosts = np.arange(40 * CHUNK, dtype="i8"), 4

    async def host(number: int, chunks: list[int]) -> None:
        store = await tstore.open(url)
        tx = store.transaction(name="step/1", host=number, hosts=hosts, attempt="a")
        array = await tx.create_array("w", values.shape, "i8", (CHUNK,))
        for at in chunks:
            await array[at * CHUNK : (at + 1) * CHUNK].write(values[at * CHUNK : (at + 1) * CHUNK])
        await tx.commit(timeout=20)

    await asyncio.gather(*[host(n, list(range(n, 40, hosts))) for n in range(hosts)])
    assert np.array_equal(await values_of(await tstore.open(url)), values)
    assert (await (await tstore.open(url)).verify()).ok


@pytest.mark.usefixtures("short")
async def test_a_chunk_of_two_hosts_is_refused(url: str) -> None:
    async def host(number: int, first: int) -> None:
        tx = (await tstore.open(url)).transaction(name="step/1", host=number, hosts=2, attempt="a")
        array = await tx.create_array("w", (20 * CHUNK,), "i8", (CHUNK,), sparse=True)
        await array[first * CHUNK : (first + 10) * CHUNK].write(number)
        await tx.commit(timeout=20)

    results = await asyncio.gather(host(0, 0), host(1, 9), return_exceptions=True)
    assert any(isinstance(result, Inconsistent) for result in results), results
    assert not [c async for c in (await tstore.open(url)).history()]


@pytest.mark.usefixtures("short")
async def test_a_damaged_segment_is_named(tmp_path: Path, loaded: list[segments.Segment]) -> None:
    url = str(tmp_path / "store")
    await create(await tstore.open(url), np.arange(20 * CHUNK, dtype="i8"))
    await values_of(await tstore.open(url))
    segment = loaded[2]
    pack = Path(url, segment.pack)
    data = bytearray(pack.read_bytes())
    data[segment.offset + 5] ^= 1
    pack.write_bytes(data)
    store = await tstore.open(url)
    array = await (await store.snapshot()).array("w")
    assert (await array[0].read()) == 0  # other segments are intact
    with pytest.raises(Corrupt, match="references to chunks"):
        await array[segment.first * CHUNK].read()
    [fault] = (await store.verify()).faults
    assert "references to chunks" in fault
    assert "w" in fault


@pytest.mark.usefixtures("short", "frequent_roots")
@pytest.mark.parametrize("change", [{"offset": 1 << 40}, {"check": bytes(16)}, {"last": 1 << 20}])
async def test_a_root_whose_segments_can_not_be_read_is_reported(tmp_path: Path, change: dict[str, Any]) -> None:
    store = await tstore.open(tmp_path)
    await create(store, np.arange(40 * CHUNK, dtype="i8"))
    for value in range(15):
        async with store.transaction() as tx:
            await tx.create_group("x", {"value": value})
    assert (await store.verify()).ok
    root = await store.log.reader.objects.root(16)
    assert isinstance(root.manifest, Manifest)
    rows = np.frombuffer(root.manifest.segments, segments.SEGMENT_ROW).copy()
    for name, value in change.items():
        rows[name][-1] = value
    (tmp_path / root_key(16)).write_bytes(
        encode(replace(root, manifest=replace(root.manifest, segments=rows.tobytes())))
    )
    [fault] = (await (await tstore.open(tmp_path)).verify()).faults
    assert f"{root_key(16)} differs from the records up to version 16 in w" in fault


@pytest.mark.usefixtures("short")
async def test_copies_have_the_segments(url: str, tmp_path: Path) -> None:
    store = await tstore.open(url)
    values = np.arange(30 * CHUNK, dtype="i8")
    await create(store, values)
    async with store.transaction() as tx:
        await (await tx.array("w"))[5 * CHUNK : 7 * CHUNK].write(-1)
    values[5 * CHUNK : 7 * CHUNK] = -1
    await tstore.copy(store, tmp_path / "all")
    await tstore.copy(store, tmp_path / "one", at=2)
    for name in ("all", "one"):
        copied = await tstore.open(tmp_path / name)
        assert np.array_equal(await values_of(copied), values)
        assert (await copied.verify()).ok


async def test_a_living_version_needs_no_segments_of_an_expired_one(url: str) -> None:
    """The second version wrote segments over chunks of the first; the third replaced all of them."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        array = await tx.create_array("w", (20_000,), "i8", (1,), sparse=True)
        await array[:10].write(-1)
    async with store.transaction() as tx:
        await (await tx.array("w"))[5:19_000].write(-2)
    values = np.arange(20_000)
    async with store.transaction() as tx:
        await (await tx.array("w")).write(values)
    await store.collect(tstore.Keep(last=1))
    again = await tstore.open(url)
    assert np.array_equal(await values_of(again), values)
    assert (await again.verify()).ok


@pytest.mark.parametrize("written", [0, 1])
async def test_a_host_may_write_a_chunk_twice(url: str, short: None, written: int) -> None:
    values = np.arange(40 * CHUNK)

    async def host(number: int) -> int:
        store = await tstore.open(url)
        tx = store.transaction(name="n", host=number, hosts=2, attempt="a")
        array = await tx.create_array("w", values.shape, values.dtype, (CHUNK,))
        part = slice(number * 20 * CHUNK, (number + 1) * 20 * CHUNK - (number * (1 - written)) * 10 * CHUNK)
        await array[part].write(-1)
        await array[part].write(values[part])
        again = slice(part.start + 4 * CHUNK, part.start + 14 * CHUNK - number)  # the last chunk in part
        await array[again].write(values[again])
        return await tx.commit(timeout=10)

    if written:
        assert list(await asyncio.gather(host(0), host(1))) == [1, 1]
        assert np.array_equal(await values_of(await tstore.open(url)), values)
        return
    for error in await asyncio.gather(host(0), host(1), return_exceptions=True):
        assert isinstance(error, Inconsistent)
        assert "w: 6 of 40 chunks" in str(error)


async def test_reads_look_up_many_chunks_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded chunks are pieces of their own, but their references are not looked up one by one."""
    values, store = np.arange(6_000), await tstore.open(url)
    async with store.transaction() as tx:
        array = await tx.create_array("w", values.shape, values.dtype, (1,), codecs="lossless")
        await array.write(values)
    for _ in range(2):
        async with store.transaction() as tx:
            await (await tx.array("w"))[::5].write(values[::5])
    lookups = 0
    original = segments.SortedRun.select

    def select(self: segments.SortedRun, numbers: np.ndarray) -> ChunkTable:
        nonlocal lookups
        lookups += 1
        return original(self, numbers)

    monkeypatch.setattr(segments.SortedRun, "select", select)
    monkeypatch.setattr(segments.SortedRun, "row", lambda self, number: pytest.fail("one row is looked up"))
    assert np.array_equal(await values_of(store), values)
    assert lookups <= 8  # two for each table


@pytest.mark.usefixtures("short")
async def test_parts_of_many_chunks_become_segments(url: str) -> None:
    """Also if another commit wrote some of these chunks first, so that they are patched once more."""
    store, other = await tstore.open(url), await tstore.open(url)
    values = np.arange(40 * CHUNK)
    await create(store, values)
    tx = store.transaction()
    array = await tx.array("w")
    await array[1::CHUNK].write(-1)
    await array[30 * CHUNK : 34 * CHUNK].write(-3)
    async with other.transaction() as concurrent:
        await (await concurrent.array("w"))[2 : 20 * CHUNK : CHUNK].write(-2)
    await tx.commit()
    values[1::CHUNK] = -1
    values[2 : 20 * CHUNK : CHUNK], values[30 * CHUNK : 34 * CHUNK] = -2, -3
    assert any("in part" in retry.reason for retry in tx.retries)
    for reader in (store, await tstore.open(url)):
        assert np.array_equal(await values_of(reader), values)
        node = (await reader.snapshot()).tree.nodes["w"]
        assert sum(len(table) for table in node.tables if isinstance(table, ChunkTable)) <= 4
    assert (await store.verify()).ok
    diff = await store.diff(1, 3)
    assert diff.arrays[0].chunks == 40


async def test_patched_chunks_are_read_and_written_some_at_a_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_array, "_ROUND_BYTES", 5 * 8 * CHUNK)
    values, read_chunks = np.arange(23 * CHUNK), patches.read_chunks
    store, rounds = await tstore.open(url), list[int]()
    await create(store, values)

    async def counted(storage: Storage, jobs: list[ReadJob]) -> None:
        rounds.append(len(jobs))
        await read_chunks(storage, jobs)

    monkeypatch.setattr(patches, "read_chunks", counted)
    async with store.transaction() as tx:
        await (await tx.array("w"))[3::CHUNK].write(-1)
    values[3::CHUNK] = -1
    assert np.array_equal(await values_of(store), values)
    assert rounds == [5, 5, 5, 5, 3]


def held_back(original: Callable[..., T]) -> tuple[asyncio.Event, threading.Event, Callable[..., T]]:
    """Return an event for the begin of a call in a thread, one that lets it go on, and what to call."""
    reading, done, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def once_done(*arguments: Any) -> T:
        loop.call_soon_threadsafe(reading.set)
        assert done.wait(60)
        return original(*arguments)

    return reading, done, once_done


@pytest.mark.usefixtures("short")
async def test_a_resize_while_the_segments_of_a_write_are_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the chunks written are those of the former grid."""
    reading, resized, numbers_once_resized = held_back(staged_array.numbers_of)
    store = await tstore.open(url)
    async with store.transaction() as tx:
        array = await tx.create_array("w", (4, 2 * CHUNK), "i8", (1, CHUNK), sparse=True)
        await array[0, 0].write(1)  # a patch
        monkeypatch.setattr(staged_array, "numbers_of", numbers_once_resized)
        writing = asyncio.create_task(array[:].write(2))
        await reading.wait()
        await (await tx.array("w")).resize((4, 3 * CHUNK))
        resized.set()
        with pytest.raises(Misuse, match="resized while"):
            await writing
    assert (await values_of(store)).sum() == 1


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("count", [3, 6])  # references that stay in the manifest, and that become segments
@pytest.mark.parametrize("size", [1, CHUNK])
async def test_chunks_in_segments_replace_what_was_written_before(count: int, size: int, url: str) -> None:
    store = await tstore.open(url)
    await create(store, np.zeros(20 * CHUNK, "i8"))
    async with store.transaction() as tx:
        array = await tx.array("w")
        for chunk in range(count):
            await array[chunk * CHUNK : chunk * CHUNK + size].write(1)
        await array[: 10 * CHUNK].write(2)
    expected = np.repeat([2, 0], 10 * CHUNK)
    assert np.array_equal(await values_of(store), expected)


@pytest.mark.usefixtures("short")
async def test_chunks_written_in_any_order_conflict_with_those_in_segments(url: str) -> None:
    store = await tstore.open(url)
    await create(store, np.zeros(20 * CHUNK, "i8"))
    tx = store.transaction()
    array = await tx.array("w")
    for chunk in (15, 1):
        await array[chunk * CHUNK : (chunk + 1) * CHUNK].write(1)
    async with store.transaction() as other:
        await (await other.array("w"))[: 9 * CHUNK].write(2)
    with pytest.raises(Conflict) as caught:
        await tx.commit()
    assert caught.value.paths == ["w, chunk (1,)"]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("beside", ["a chunk", "a part of a chunk", "an array anew", "an array of another dtype"])
async def test_what_happens_while_zarr_sets_metadata_is_not_lost(
    beside: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, done, resized_once_done = held_back(encoded.resized)
    store, values = await tstore.open(url), np.arange(20 * CHUNK)
    await create(store, values)
    async with store.transaction() as tx:
        array, view = await tx.array("w"), ZarrStore(tx)
        buffer = await view.get("w/zarr.json", default_buffer_prototype())
        assert buffer is not None
        document = json.loads(buffer.to_bytes()) | {"attributes": {"unit": "m"}}
        monkeypatch.setattr(encoded, "resized", resized_once_done)
        setting = asyncio.create_task(
            view.set("w/zarr.json", cpu.Buffer.from_bytes(json.dumps(document).encode()))
        )
        await reading.wait()
        match beside:
            case "a chunk":
                await array[:CHUNK].write(-1)
                values[:CHUNK] = -1
            case "a part of a chunk":
                await array[3].write(-1)
                values[3] = -1
            case _:
                await tx.delete("w")
                values = np.ones(20 * CHUNK, "i8" if beside == "an array anew" else "f8")
                await (await tx.create_array("w", values.shape, values.dtype, (CHUNK,))).write(values)
        done.set()
        with pytest.raises(Misuse) if values.dtype == "f8" else contextlib.nullcontext():
            await setting
    assert np.array_equal(await values_of(store), values)
    assert (await store.snapshot()).attributes("w") == ({} if values.dtype == "f8" else {"unit": "m"})


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("beside", ["a chunk", "a part of a chunk", "a resize"])
async def test_what_is_written_while_a_resize_reads_segments_is_not_lost(
    beside: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = staged_array.resized
    reading, done, resized_once_done = held_back(original)
    store, values = await tstore.open(url), np.arange(20 * CHUNK)
    await create(store, values)
    async with store.transaction() as tx:
        array, other = await tx.array("w"), await tx.array("w")
        monkeypatch.setattr(staged_array, "resized", resized_once_done)
        resizing = asyncio.create_task(array.resize((10 * CHUNK,)))
        await reading.wait()
        match beside:
            case "a chunk":
                await other[:CHUNK].write(-1)
                await other[0].read()
                values[:CHUNK] = -1
            case "a part of a chunk":
                await other[3].write(-1)
                values[3] = -1
            case _:
                monkeypatch.setattr(staged_array, "resized", original)
                await other.resize((15 * CHUNK,))
        done.set()
        with pytest.raises(Misuse) if beside == "a resize" else contextlib.nullcontext():
            await resizing
    assert np.array_equal(await values_of(store), values[: (15 if beside == "a resize" else 10) * CHUNK])


@pytest.mark.usefixtures("short")
async def test_a_part_of_a_chunk_that_the_transaction_wrote_whole(url: str) -> None:
    store = await tstore.open(url)
    await create(store, np.zeros(20 * CHUNK, "i8"))
    async with store.transaction() as tx:
        array = await tx.array("w")
        await array[: 2 * CHUNK].write(1)
        await array[CHUNK].write(2)
    assert (await values_of(store))[: 2 * CHUNK].tolist() == [1] * CHUNK + [2] + [1] * (CHUNK - 1)


@pytest.mark.usefixtures("short")
async def test_a_conflict_check_reads_only_segments_whose_ranges_meet(
    url: str, loaded: list[segments.Segment]
) -> None:
    """The other commit wrote every second chunk up to 100, so its segments lack numbers."""
    store, other = await tstore.open(url), await tstore.open(url)
    async with store.transaction() as tx:
        await tx.create_array("w", (200,), "i8", (1,), sparse=True)

    async def race(*writes: tuple[slice, int], newer_value: int = 1) -> None:
        """Commit writes on top of a base before the commit of the other store."""
        tx = store.transaction()
        for chunks, value in writes:
            await (await tx.array("w"))[chunks].write(value)
        async with other.transaction() as newer:
            await (await newer.array("w"))[:100:2].write(newer_value)
        loaded.clear()
        await tx.commit()

    await race((slice(150, 151), 2))
    assert loaded == []
    await race((slice(101, 199, 2), 3))  # in segments too
    assert loaded == []
    await race((slice(51, 52), 4))
    assert [segment.first for segment in loaded] == [48]
    await race((slice(1, 5, 2), 5), (slice(151, 152), 5))
    assert [segment.first for segment in loaded] == [0]
    with pytest.raises(Conflict, match=r"w, chunk \(50,\)"):
        await race((slice(49, 52), 6), newer_value=9)
    values = await (await (await store.snapshot()).array("w"))[:].read()
    expected = np.zeros(200)
    expected[101:199:2], expected[:100:2], expected[[150, 51, 1, 3, 151]] = 3, 9, [2, 4, 5, 5, 5]
    assert values.tolist() == expected.tolist()


@pytest.mark.usefixtures("short")
async def test_segments_in_memory_have_a_bound(
    url: str, loaded: list[segments.Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_pages, "_CACHED_BYTES", 500)
    await create(await tstore.open(url), np.arange(60 * CHUNK))
    array = await (await (await tstore.open(url)).snapshot()).array("w")
    for _ in range(2):
        for at in range(0, 60 * CHUNK, 3 * CHUNK):
            assert await array[at].read() == at
    assert len(loaded) == 40  # each twice
    assert max(segment.length for segment in loaded) > 100


@pytest.mark.usefixtures("short")
async def test_hosts_with_ranges_of_their_own_are_joined_without_reading_segments(
    url: str, loaded: list[segments.Segment]
) -> None:
    values, hosts, part = np.arange(48 * CHUNK), 4, 12 * CHUNK

    async def host(number: int) -> None:
        tx = (await tstore.open(url)).transaction(name="step/1", host=number, hosts=hosts, attempt="a")
        array = await tx.create_array("w", values.shape, values.dtype, (CHUNK,))
        own = slice(number * part, (number + 1) * part)
        await array[own].write(values[own])
        await tx.commit(timeout=20)

    await asyncio.gather(*map(host, range(hosts)))
    store = await tstore.open(url)
    tables = (await store.snapshot()).tree.nodes["w"].tables
    assert [type(table) for table in tables] == [segments.SortedRun]
    assert loaded == []
    assert {segment.pack.split("/")[1] for segment in tables[0].segments} == {
        commit.transaction async for commit in store.history()
    }
    assert np.array_equal(await values_of(store), values)
    assert len(loaded) == 16


@pytest.mark.usefixtures("short")
async def test_collections_and_sizes_read_no_segments(url: str, loaded: list[segments.Segment]) -> None:
    store, values = await tstore.open(url), np.arange(60 * CHUNK)
    await create(store, values)
    for first in (0, 24, 36):
        part = slice(first * CHUNK, (first + 9) * CHUNK)
        values[part] *= -1
        async with store.transaction() as tx:
            await (await tx.array("w"))[part].write(values[part])
    store = await tstore.open(url)
    node = (await store.snapshot()).tree.nodes["w"]
    assert (node.chunk_count, node.stored_bytes) == (60, values.nbytes)
    assert loaded == []
    assert (await store.collect(tstore.Keep(last=1))).versions == [1, 2, 3]
    assert loaded == []
    assert np.array_equal(await values_of(await tstore.open(url)), values)


@pytest.mark.usefixtures("short")
async def test_a_save_looks_up_only_segments_of_arrays_with_the_same_grid(
    url: str, loaded: list[segments.Segment]
) -> None:
    def tree(dtype: str, chunk: int) -> dict[str, tstore.Shards]:
        values = np.arange(480, dtype=dtype)
        parts = [(slice(at, at + chunk), values[at : at + chunk]) for at in range(0, 480, chunk)]
        return {"w": tstore.Shards(values.shape, dtype, parts)}

    await tstore.save(url, tree("i8", 8), 1)
    for step, (dtype, chunk) in enumerate([("f8", 8), ("i8", 4)], 2):
        loaded.clear()
        await tstore.save(url, tree(dtype, chunk), step)
        assert loaded == []
    await tstore.save(url, tree("i8", 4), 4)
    assert loaded != []

"""Compactions: random commits compared with a dict, bounded runs, concurrent commits, and lies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.http_server import ADMIN, WRITE, everybody
from tests.support.thresholds import Thresholds
from tstore.core.format.objects import compactions
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.segments import SortedRun
from tstore.core.runtime import world
from tstore.errors import Conflict, InvalidArgument, SnapshotExpired
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Server

CHUNKS = 60


@pytest.fixture
def small(thresholds: Thresholds) -> None:
    """Make segments of three rows, and compact more than four rows, or two runs."""
    make_small(thresholds)


def make_small(thresholds: Thresholds, work: int = 4) -> None:
    thresholds(SEGMENT_ROWS=3, MIN_SEGMENTED=4, MIN_SEGMENTS=work, MAX_ROWS=4, MAX_RUNS=2, SHORT_COLUMN=1)
    thresholds(_MIN_TABLES=1, INLINE_BYTES=40)  # a few chunks are inline


async def compactions_of(store: tstore.Store) -> list[int]:
    """Return the versions whose commits have compactions."""
    log = store.log.reader
    found = []
    for version in range(1, await log.newest() + 1):
        record = await log.record(version)
        found += [version for m in await log.objects.manifests(version, record) if m.compactions]
    return found


async def chunks_of(store: tstore.Store, at: int | None = None) -> dict[int, int]:
    """Return the values of the written chunks of `w`, one value each."""
    snapshot = await store.snapshot(at)
    if "w" not in snapshot.paths():
        return {}
    values = await (await snapshot.array("w"))[:].read()
    return {number: value for number, value in enumerate(values.tolist()) if value}


async def write(store: tstore.Store, start: int, value: int, stop: int | None = None, step: int = 1) -> int:
    """Commit chunks of `w`, one or those of a slice; return the version."""
    tx = store.transaction()
    await (await tx.array("w"))[start : start + 1 if stop is None else stop : step].write(value)
    return await tx.commit()


async def write_interleaved(store: tstore.Store, expected: dict[int, int], count: int, stop: int) -> None:
    """Make `count` commits, each of every third chunk up to `stop`, from one chunk later on than the last."""
    for start in range(count):
        await write(store, start, start + 1, stop=stop, step=3)
        expected |= dict.fromkeys(range(start, stop, 3), start + 1)


async def create(url: str) -> tuple[tstore.Store, dict[int, int]]:
    """Create a store with an array `w` whose chunks are written, and return it with their values."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("w", (CHUNKS,), "i8", (1,), sparse=True)).write(-1)
    return store, dict.fromkeys(range(CHUNKS), -1)


async def create_with_rows(url: str) -> tuple[tstore.Store, dict[int, int]]:
    """Do what `create` does; then write five chunks, a commit each, for the next commit to compact."""
    store, expected = await create(url)
    for number in range(5):
        await write(store, number, number + 1)
        expected[number] = number + 1
    return store, expected


async def runs_of(store: tstore.Store) -> tuple[int, int]:
    """Return the number of runs and of rows of `w` in the newest version."""
    tables = (await store.snapshot()).tree.nodes["w"].tables
    runs = [table for table in tables if isinstance(table, SortedRun)]
    return len(runs), sum(len(table) for table in tables if isinstance(table, ChunkTable))


async def check(store: tstore.Store, url: str, expected: dict[int, int]) -> None:
    """Compare `w` with its expected chunks, through the records and from the newest root."""
    for reader in (store, await tstore.open(url)):
        assert await chunks_of(reader) == expected
    assert (await store.verify()).ok


async def create_long(url: str) -> tstore.Store:
    """Create a store with an array `w` of 20,000 chunks, of one value each, none of which is written."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await tx.create_array("w", (20_000,), "u1", (1,), sparse=True)
    return store


async def test_more_than_2048_rows_are_compacted_and_fewer_than_1024_are_not(url: str) -> None:
    """With the usual bounds; in between, it is left to chance."""
    store = await create_long(url)
    await write(store, 0, 1, stop=6000)  # so many references are in a segment
    expected = dict.fromkeys(range(6000), 1)
    for value, start, stop in ((2, 0, 1000), (3, 7000, 7001), (4, 2000, 3100)):
        await write(store, start, value, stop=stop)
        expected |= dict.fromkeys(range(start, stop), value)
    assert await compactions_of(store) == []
    assert await runs_of(store) == (1, 1000 + 1 + 1100)
    assert await compactions_of(store) != [await write(store, 7001, 5)] == await compactions_of(store)
    assert await runs_of(store) == (2, 1)
    await check(store, url, expected | {7001: 5})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("drawn", "is_compacted"), [(0.9, True), (1.1, False)])
async def test_one_commit_in_eight_compacts_rows_at_the_bound(
    url: str, drawn: float, is_compacted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all commits under way would compact the same rows."""
    store, _ = await create_with_rows(url)
    ranges: list[float] = []

    def uniform(low: float, high: float) -> float:
        ranges.append(high - low)
        return drawn

    monkeypatch.setattr(world, "uniform", uniform)
    version = await write(store, 50, 50)
    assert await compactions_of(store) == [version] * is_compacted
    assert 8 in ranges


async def write_nine_runs(url: str) -> tuple[tstore.Store, dict[int, int]]:
    """Make nine commits, each of which overlaps with the one before it."""
    store, expected = await create_long(url), dict[int, int]()
    for value in range(1, 10):
        start, stop = 1000 * value, 1000 * value + 5000
        await write(store, start, value, stop=stop)
        expected |= dict.fromkeys(range(start, stop), value)
    assert await compactions_of(store) == []
    assert await runs_of(store) == (9, 0)
    return store, expected


async def test_more_than_eight_runs_of_segments_are_compacted(url: str) -> None:
    """With the usual bounds."""
    store, expected = await write_nine_runs(url)
    version = await write(store, 0, 10)
    assert await compactions_of(store) == [version]
    assert await runs_of(store) == (1, 1)
    await check(store, url, expected | {0: 10})


async def test_a_resize_restates_more_than_eight_runs(url: str) -> None:
    store, expected = await write_nine_runs(url)
    async with store.transaction() as tx:
        await (await tx.array("w")).resize((13_000,))
    assert await runs_of(store) == (1, 0)
    await check(store, url, {number: value for number, value in expected.items() if number < 13_000})


@pytest.fixture
def rows_only(small: None, thresholds: Thresholds) -> None:
    """Let all commits compact more than four rows, and no runs."""
    thresholds(MAX_RUNS=1000, _COMMITS=1)


@pytest.mark.usefixtures("rows_only")
async def test_a_row_written_since_the_base_stays_above_the_compaction(url: str) -> None:
    store, expected = await create_with_rows(url)
    tx = store.transaction()
    await (await tx.array("w"))[50].write(50)
    await write(await tstore.open(url), 3, 99)  # replaces one of the rows that both compact
    await tx.commit()
    await write(store, 51, 51)
    await check(store, url, expected | {3: 99, 50: 50, 51: 51})
    # the first of them has a compaction, so that of the other is dropped
    assert await compactions_of(store) == [7]


@pytest.mark.usefixtures("rows_only")
async def test_a_pack_of_which_only_a_segment_is_needed_is_kept(
    url: str, tmp_path: Path, thresholds: Thresholds
) -> None:
    """The compacted rows refer to packs of others, and the chunk of the compacting commit is in its record."""
    thresholds(INLINE_BYTES=0)
    store, expected = await create_with_rows(url)
    thresholds(INLINE_BYTES=8)
    version = await write(store, 50, 50)
    assert await compactions_of(store) == [version]
    await write(store, 51, 51)
    assert version in (await store.collect(tstore.Keep(last=1))).versions
    await check(store, url, expected | {50: 50, 51: 51})
    await tstore.copy(await tstore.open(url), tmp_path / "copy")
    await check(await tstore.open(tmp_path / "copy"), str(tmp_path / "copy"), expected | {50: 50, 51: 51})


@pytest.mark.usefixtures("rows_only")
async def test_a_compaction_replaces_all_rows_but_those_written_meanwhile(
    url: str, thresholds: Thresholds
) -> None:
    store, expected = await create_with_rows(url)
    tx = store.transaction()
    await (await tx.array("w"))[50].write(50)
    thresholds(MAX_ROWS=1000)
    for number in (3, 1):
        await write(await tstore.open(url), number, 99)  # without a compaction
    thresholds(MAX_ROWS=4)
    assert await compactions_of(store) == []
    version = await tx.commit()
    assert await compactions_of(store) == [version]
    assert (await runs_of(store))[1] == 5  # 3 and 1 as before and as written since, and 50
    await check(store, url, expected | {1: 99, 3: 99, 50: 50})
    assert (await store.diff(version - 1, version)).arrays[0].chunks == 1


@pytest.mark.usefixtures("rows_only")
async def test_compactions_of_two_arrays_leave_out_the_rows_written_meanwhile(
    url: str, thresholds: Thresholds
) -> None:
    store = await tstore.open(url)
    async with store.transaction() as tx:
        for path in ("v", "w"):
            await (await tx.create_array(path, (CHUNKS,), "i8", (1,), sparse=True)).write(-1)

    async def write_both(tx: tstore.Transaction, number: int, value: int) -> None:
        for path in ("v", "w"):
            await (await tx.array(path))[number].write(value)

    for number in range(5):
        async with store.transaction() as tx:
            await write_both(tx, number, number + 1)
    compacting = store.transaction()
    await write_both(compacting, 50, 50)
    thresholds(MAX_ROWS=1000)
    async with store.transaction() as tx:
        await write_both(tx, 3, 99)
    thresholds(MAX_ROWS=4)
    assert await compactions_of(store) == []
    version = await compacting.commit()
    assert await compactions_of(store) == [version]
    for path in ("v", "w"):
        values = await (await (await store.snapshot()).array(path)).read()
        assert values[:5].tolist() == [1, 2, 3, 99, 5]


@pytest.mark.usefixtures("rows_only")
async def test_segments_written_since_the_base_drop_the_compaction(url: str, thresholds: Thresholds) -> None:
    store, expected = await create(url)
    for number in range(5):
        await write(store, number, number + 1)
    tx = store.transaction()
    await (await tx.array("w"))[50].write(50)
    thresholds(MAX_ROWS=1000)
    await write(await tstore.open(url), 0, 99, stop=30, step=2)
    thresholds(MAX_ROWS=4)
    await tx.commit()
    assert await compactions_of(store) == []
    expected |= {1: 2, 3: 4} | dict.fromkeys(range(0, 30, 2), 99) | {50: 50}
    await check(store, url, expected)
    await write(store, 59, 59)
    assert await compactions_of(store) == [9]
    await check(store, url, expected | {59: 59})


@pytest.mark.usefixtures("rows_only")
async def test_a_row_below_newer_segments_is_not_restated(url: str) -> None:
    store, expected = await create(url)
    await write(store, 4, 1)
    await write(store, 0, 2, stop=30, step=2)
    expected |= dict.fromkeys(range(0, 30, 2), 2)
    for number in range(31, 36):
        await write(store, number, number)
        expected[number] = number
    assert await compactions_of(store) == [8]
    await check(store, url, expected)


@pytest.mark.usefixtures("rows_only")
async def test_a_collected_chunk_that_only_a_compaction_needs_does_not_fail_the_commit(
    url: str, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    """The transaction would restate a chunk that has been replaced since, and whose pack is condemned."""
    thresholds(INLINE_BYTES=0)
    store, expected = await create_with_rows(url)
    tx = store.transaction()
    await (await tx.array("w"))[50].write(50)
    thresholds(MAX_ROWS=1000)
    other = await tstore.open(url)
    await write(other, 0, 99, stop=30)
    thresholds(MAX_ROWS=4)
    sealed, commit_now = asyncio.Event(), asyncio.Event()
    staged = tx.staging
    seal = staged.seal

    async def seal_and_wait() -> ObjectRef | Manifest:
        manifest = await seal()
        sealed.set()
        await commit_now.wait()
        return manifest

    monkeypatch.setattr(staged, "seal", seal_and_wait)
    committing = asyncio.create_task(tx.commit())
    await sealed.wait()
    await other.collect(tstore.Keep(last=1))
    commit_now.set()
    await committing
    assert (await other.snapshot()).version == 9
    await check(await tstore.open(url), url, expected | dict.fromkeys(range(30), 99) | {50: 50})


@pytest.mark.usefixtures("rows_only")
async def test_a_compaction_restates_nothing_that_a_repair_voided_since_its_base(url: str) -> None:
    store, expected = await create(url)
    for number in range(5):
        await write(store, number, number + 1)
    tx = (await tstore.open(url)).transaction()
    await (await tx.array("w"))[50].write(50)
    await store.repair(void_intact=[4])  # which wrote chunk 2
    with pytest.raises(Conflict, match="voided version 4"):
        await tx.commit()
    store = await tstore.open(url)
    await check(store, url, expected | {0: 1, 1: 2, 3: 4, 4: 5})
    assert await compactions_of(store) == []


@pytest.mark.usefixtures("rows_only")
async def test_a_compaction_of_chunks_that_a_repair_voided_later_is_verified_and_copied(url: str) -> None:
    store, expected = await create_with_rows(url)
    assert await compactions_of(store) == []
    version = await write(store, 50, 50)
    assert await compactions_of(store) == [version]
    await (await tstore.open(url)).repair(void_intact=[4])  # the compaction has restated what it wrote
    await check(await tstore.open(url), url, expected | {50: 50})
    async with Server(f"{url}-copy", access=everybody()) as server:
        await tstore.copy(url, server.url, storage_options={"token": ADMIN})
        through = await tstore.open(server.url, storage_options={"token": WRITE})
        await check(through, f"{url}-copy", expected | {50: 50})


@pytest.mark.usefixtures("rows_only")
@pytest.mark.parametrize("kind", ["other chunks", "fewer chunks"])
async def test_a_compaction_that_changes_chunks_is_noticed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server refuses its commit; if it was written to the storage directly, `verify` names it."""

    def parts(plan: compactions.CompactionPlan, rows: ChunkTable) -> Iterator[ChunkTable]:
        yield rows.with_numbers(rows.number + 7) if kind == "other chunks" else rows.part(1, len(rows))

    store, _ = await create(str(tmp_path / "store"))
    for number in range(5):
        await write(store, number, number + 1)
    monkeypatch.setattr(compactions.CompactionPlan, "parts", parts)
    async with Server(store.url, access=everybody()) as server:
        through = await tstore.open(server.url, storage_options={"token": WRITE})
        with pytest.raises(InvalidArgument, match="its compaction of 'w' changes chunks"):
            await write(through, 50, 50)
    version = await write(store, 50, 50)
    [fault] = (await store.verify()).faults
    assert f"{version:020}: its compaction of 'w' changes chunks" in fault


async def test_a_server_accepts_compactions_and_their_roots(tmp_path: Path, small: None) -> None:
    store, expected = await create(str(tmp_path / "store"))
    with override_constants(ROOT_EVERY=32):
        async with Server(store.url, access=everybody()) as server:
            through = await tstore.open(server.url, storage_options={"token": WRITE})
            for turn in range(32):
                start, step = (turn % 9, 3) if turn % 4 == 0 else (turn % 11, CHUNKS)
                await write(through, start, turn + 1, stop=CHUNKS, step=step)
                expected |= dict.fromkeys(range(start, CHUNKS, step), turn + 1)
            assert len(await compactions_of(store)) > 2
        await check(store, store.url, expected)
        assert await store.log.storage.size("roots/00000000000000000032")


@pytest.mark.usefixtures("small")
async def test_a_server_accepts_compactions_in_pages(tmp_path: Path, thresholds: Thresholds) -> None:
    store, expected = await create(str(tmp_path / "store"))
    thresholds(PAGE_BYTES=500, SHORT_MANIFEST=500, INLINE_MANIFEST_BYTES=0)
    async with Server(store.url, access=everybody()) as server:
        through = await tstore.open(server.url, storage_options={"token": WRITE})
        for turn in range(6):
            async with through.transaction() as tx:
                for at in range(20):
                    await (await tx.create_array(f"g{turn}/a{at}", (1,), "i8")).write(1)
                await (await tx.array("w"))[turn % 3 :: 3].write(turn + 1)
            expected |= dict.fromkeys(range(turn % 3, CHUNKS, 3), turn + 1)
    compacting = await compactions_of(store)
    assert compacting
    assert (await store.log.reader.record(compacting[-1])).paged_manifest
    await check(store, store.url, expected)


STORAGE = ("local", "memory")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("url", "work", "most", "turns"),
    [("local", 4, 8, 15), ("memory", 1000, 3, 15)]
    + [pytest.param(at, *bound, 60, marks=pytest.mark.deep) for at in STORAGE for bound in ((4, 8), (1000, 3))],
    indirect=["url"],
)
async def test_runs_and_rows_stay_few(url: str, work: int, most: int, turns: int, thresholds: Thresholds) -> None:
    thresholds(MIN_SEGMENTS=work)
    store, expected = await create(url)
    for turn in range(turns):
        await write(store, turn % 3, turn + 1, stop=CHUNKS, step=3)
        await write(store, turn % 7, 1000 + turn)
        expected |= dict.fromkeys(range(turn % 3, CHUNKS, 3), turn + 1) | {turn % 7: 1000 + turn}
        runs, rows = await runs_of(store)
        assert runs <= most
        assert rows <= 9
    await check(store, url, expected)


Action = tuple[str, tuple[int, int, int]]

KINDS = ["write"] * 12 + ["one"] * 40 + ["resize", "delete", "collect", "reopen"]
HOT = 15  # chunks, which are written one by one


def random_batches(rng: np.random.Generator, count: int) -> list[list[Action]]:
    """Return batches of transactions, each of which begins before any other of its batch commits."""
    batches: list[list[Action]] = []
    for _ in range(count):
        batches.append([])
        for _ in range(rng.integers(2, 5)):
            start, hot, count, step = rng.integers([0, 0, 1, 1], [CHUNKS, HOT, CHUNKS, 4]).tolist()
            kind = str(rng.choice(KINDS))
            batches[-1].append((kind, (hot, 1, 1) if kind == "one" else (start, count, step)))
    return batches


async def play(url: str, batches: list[list[Action]]) -> int:
    """Run batches of concurrent transactions; compare each version with a dict; return how many compacted."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await tx.create_array("w", (CHUNKS,), "i8", (1,), sparse=True)
    model: dict[int, int] = {}
    expected = {1: dict(model)}
    size, value = CHUNKS, 0
    for batch in batches:
        opened: list[tuple[Any, Callable[[], None]]] = []
        for kind, (start, count, step) in batch:
            value += 1
            if kind == "collect":
                await store.collect(tstore.Keep(last=1))
                version = (await store.snapshot()).version
                expected = {version: dict(model)}
            elif kind == "reopen":
                store = await tstore.open(url)
            else:
                tx = store.transaction()
                array = await tx.array("w")
                if kind == "delete":
                    await tx.delete("w")
                    await tx.create_array("w", (size,), "i8", (1,), sparse=True)
                    opened.append((tx, model.clear))
                elif kind == "resize":
                    await array.resize((start + 1,))
                    opened.append((tx, lambda n=start + 1: cut(model, n)))
                else:
                    numbers = range(size)[start : start + count : step]
                    await array[start : start + count : step].write(value)
                    opened.append((tx, lambda n=numbers, v=value: model.update(dict.fromkeys(n, v))))
        for tx, apply in opened:  # all have one base, or older ones if a collection came in between
            try:
                version = await tx.commit()
            except (Conflict, SnapshotExpired):
                continue
            apply()
            expected[version] = dict(model)
            array = await (await store.snapshot()).array("w")
            size = array.shape[0]
        for reader in (store, await tstore.open(url)):
            assert await chunks_of(reader) == model
    for reader in (store, await tstore.open(url)):
        for version, state in expected.items():
            assert await chunks_of(reader, version) == state
    assert (await store.verify()).ok, (await store.verify()).faults
    for at in (None, max(expected)):
        copied = f"{url}-copy-{at}"
        await tstore.copy(url, copied, at=at)
        copy = await tstore.open(copied)
        assert await chunks_of(copy) == model
        assert (await copy.verify()).ok
    return len(await compactions_of(store))


def cut(model: dict[int, int], size: int) -> None:
    for number in [n for n in model if n >= size]:
        del model[number]


@pytest.mark.parametrize(
    ("url", "seed", "batches"),
    [
        ("local", 1, 16),
        ("memory", 5, 16),
        ("memory", 6, 16),
    ]  # each fault of compactions in `test_mutations` fails one
    + [pytest.param(at, seed, 40, marks=pytest.mark.deep) for at in STORAGE for seed in range(9)],
    indirect=["url"],
)
async def test_every_version_equals_a_dict(url: str, seed: int, batches: int, thresholds: Thresholds) -> None:
    make_small(thresholds, work=[1, 4, 1000][seed % 3])
    assert await play(url, random_batches(np.random.default_rng(seed), batches)) > 0


async def compacted_rows(store: tstore.Store) -> list[int]:
    """Return how many references each compaction restates."""
    log, found = store.log.reader, list[int]()
    for version in await compactions_of(store):
        manifests = await log.objects.manifests(version, await log.record(version))
        found += [len(m.compactions_by_path()["w"].run) for m in manifests if m.compactions]
    return found


@pytest.mark.usefixtures("small")
async def test_a_long_run_is_not_compacted_with_short_ones(url: str, thresholds: Thresholds) -> None:
    """So what compacts write follows what commits change, not the length of the array."""
    thresholds(MIN_SEGMENTS=1000, _COMMITS=1)
    store, expected = await create(url)
    await write_interleaved(store, expected, 6, 18)
    rows = await compacted_rows(store)
    assert len(rows) >= 3
    assert max(rows) < CHUNKS / 2
    await check(store, url, expected)


@pytest.mark.usefixtures("small")
async def test_a_small_commit_compacts_a_part_of_long_runs(url: str, thresholds: Thresholds) -> None:
    thresholds(MIN_SEGMENTS=1, _COMMITS=1)
    store, expected = await create(url)
    await write_interleaved(store, expected, 2, CHUNKS)
    for number in range(3):
        await write(store, number, 9)
        expected[number] = 9
    rows = await compacted_rows(store)
    assert rows
    assert max(rows) < CHUNKS / 2
    await check(store, url, expected)


@pytest.mark.usefixtures("small")
async def test_a_collection_keeps_the_segments_of_a_compaction(url: str, thresholds: Thresholds) -> None:
    """The commit that compacted has expired, and its pack has nothing but segments."""
    thresholds(MIN_SEGMENTS=1000, _COMMITS=1)
    store, expected = await create(url)
    await write_interleaved(store, expected, 2, 18)
    compacting_version = await write(store, 50, 8)
    assert await compactions_of(store) == [compacting_version]
    expected[50] = 9
    await write(store, 50, 9)
    assert compacting_version in (await store.collect(tstore.Keep(last=1))).versions
    await check(store, url, expected)

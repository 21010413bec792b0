"""Maintenance of arrays with many chunks, whose references are read range by range: memory, and reports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tests.support.thresholds import Thresholds
from tests.transactions.test_compactions import make_small
from tstore.core.copying.inventory import PackCheck
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.segments import Segment
from tstore.core.log.pages import SegmentReader
from tstore.errors import Corrupt

MANY = 400_000

PEAK = """
import asyncio, sys
import tstore
from tstore.core.maintenance.contents import detailed_listing

async def listed(store):
    return await detailed_listing(store.log.reader, await store.snapshot())

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) >> 10

async def main():
    store = await tstore.open(sys.argv[1])
    await store.snapshot()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    result = await eval(sys.argv[2], {**globals(), "store": store, "folder": sys.argv[1]})
    print(result)
    print(status("VmHWM") - before)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with an array of many chunks of eight bytes, of which version 3 wrote half again."""
    folder = tmp_path_factory.mktemp("many") / "store"
    values = np.arange(MANY)
    with blocking.open(folder) as store:
        with store.transaction() as tx:
            tx.create_array("w", (MANY,), "int64", chunks=(1,)).write(values)
        with store.transaction() as tx:
            tx.array("w")[:1].write(5)
        with store.transaction() as tx:
            tx.array("w")[MANY // 2 - 1 :].write(-values[MANY // 2 - 1 :])
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("work", "result", "limit"),
    [
        ("store.verify()", f"{MANY * 3 // 2 + 2:,} chunks", 80),
        ("store.diff(1, 3)", "1 array", 80),
        ("tstore.copy(store, folder + '.copy')", "version=3", 125),
        ("listed(store)", f"shared_bytes={(MANY // 2 - 2) * 8}", 50),
    ],
)
def test_memory_does_not_grow_with_the_chunks(many: Path, work: str, result: str, limit: int) -> None:
    """Objects for each chunk took 344 MiB, all references in memory 197, and those of a whole pack 160.

    The caches take 32 MiB, and the buffers of a copy 96.
    """
    command = [sys.executable, "-c", PEAK, str(many), work]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert result in lines[0]
    print("PEAK", work, lines[-1])
    assert int(lines[-1]) <= limit, lines


async def random_history(store: tstore.Store, seed: int) -> list[np.ndarray]:
    """Commit 12 versions of `w`, whose chunks have one value; return the values of each, 0 for absent chunks."""
    rng, values, states = np.random.default_rng(seed), np.zeros((8, 5), "i8"), []
    async with store.transaction() as tx:
        await tx.create_array("w", values.shape, "int64", (1, 1), sparse=True)
    states.append(values.copy())
    for version in range(2, 13):
        async with store.transaction() as tx:
            array = await tx.array("w")
            if rng.random() < 0.3:
                rows, columns = rng.integers(3, 11, 2).tolist()
                await array.resize((rows, columns))
                values = np.pad(values, 8)[8 : 8 + rows, 8 : 8 + columns]
            box = tuple(
                slice(*sorted(rng.integers(0, n + 1, 2).tolist()), rng.integers(1, 3)) for n in values.shape
            )
            values[box] = rng.choice([version, 7])
            await array[box].write(values[box])
        states.append(values.copy())
    return states


@pytest.mark.parametrize("seed", range(6))
async def test_differences_and_sizes_are_those_of_a_model(
    tmp_path: Path, thresholds: Thresholds, seed: int
) -> None:
    make_small(thresholds)
    store = await tstore.open(tmp_path)
    states = await random_history(store, seed)
    for version, values in enumerate(states, 1):
        node = (await store.snapshot(version)).tree.nodes["w"]
        count = np.count_nonzero(values)
        assert (node.chunk_count, node.stored_bytes) == (count, 8 * count)
    for a, old in enumerate(states, 1):
        for b, new in enumerate(states, 1):
            before, after = np.zeros((2, 10, 10), "i8")
            before[: old.shape[0], : old.shape[1]] = old
            after[: new.shape[0], : new.shape[1]] = new
            arrays = (await store.diff(a, b)).arrays
            assert sum(array.chunks for array in arrays) == np.count_nonzero(before != after)


@pytest.mark.parametrize("seed", range(4))
async def test_each_damaged_chunk_is_reported_once_by_its_first_version(
    tmp_path: Path, thresholds: Thresholds, seed: int
) -> None:
    """Merges and resizes restate references; a chunk counts once, and is named by its first version."""
    make_small(thresholds)
    thresholds(INLINE_BYTES=0)
    store = await tstore.open(tmp_path)
    states = await random_history(store, seed)
    labels: dict[tuple[str, int], str] = {}
    for version, values in enumerate(states, 1):
        for row in (await store.snapshot(version)).tree.nodes["w"].chunks.rows:
            place = tuple(map(int, np.unravel_index(row.number, values.shape)))
            labels.setdefault((str(row.pack), row.offset), f"version {version}: w, chunk {place}: ")
    report = await (await tstore.open(tmp_path)).verify()
    assert (report.faults, report.chunks, report.bytes) == ([], len(labels), 8 * len(labels))
    for pack, offset in labels:
        data = bytearray((tmp_path / pack).read_bytes())
        data[offset] ^= 1
        (tmp_path / pack).write_bytes(data)
    faults = (await (await tstore.open(tmp_path)).verify()).faults
    expected = sorted(
        f"{label}checksum mismatch in the 8 bytes at {offset} in {store.url}: {pack} "
        for (pack, offset), label in labels.items()
    )
    assert [fault.rpartition("(in the block")[0] for fault in faults] == expected


@pytest.mark.parametrize("ahead", [5, 1000])
async def test_a_copy_checks_chunks_in_any_order_and_reads_segments_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds, ahead: int
) -> None:
    """Each segment has chunks all over the pack, as if columns had been written one after the other."""
    make_small(thresholds)
    thresholds(INLINE_BYTES=0)
    monkeypatch.setattr("tstore.core.copying.inventory._STEP", 16)
    monkeypatch.setattr("tstore.core.copying.inventory._READ_AHEAD", ahead)
    loads: list[Segment] = []
    load = SegmentReader.load

    def counted(self: SegmentReader, wanted: Sequence[Segment]) -> list[ChunkTable]:
        loads.extend(wanted)
        return load(self, wanted)

    monkeypatch.setattr(SegmentReader, "load", counted)
    held, read_ahead = list[int](), PackCheck._read_ahead

    def recorded(self: PackCheck, start: int, stop: int) -> None:
        read_ahead(self, start, stop)
        held.append(len(self._ahead.starts))

    monkeypatch.setattr(PackCheck, "_read_ahead", recorded)
    store = await tstore.open(tmp_path / "store")
    async with store.transaction() as tx:
        array = await tx.create_array("w", (120,), "int64", (1,))
        for number in np.random.default_rng(0).permutation(120).tolist():
            await array[number].write(number)
    loads.clear()
    await tstore.copy(store, tmp_path / "copy")
    assert len(set(loads)) >= 40
    assert 2 <= max(held) <= 2 * ahead + 2  # blocks, of which two are in a step
    assert len(loads) <= (120 // ahead + 3) * len(set(loads))
    assert (
        await (await (await (await tstore.open(tmp_path / "copy")).snapshot()).array("w")).read()
    ).sum() == 7140
    rows = (await store.snapshot()).tree.nodes["w"].chunks.rows
    pack = tmp_path / "store" / str(rows[0].pack)
    good = pack.read_bytes()
    for row in rows[::20]:
        pack.write_bytes(good[: row.offset] + bytes([good[row.offset] ^ 1]) + good[row.offset + 1 :])
        with pytest.raises(Corrupt, match=rf"chunk \({row.number},\)"):
            await tstore.copy(tmp_path / "store", tmp_path / f"copy{row.number}")

"""What `verify` reads: every chunk as every version refers to it."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.forging import forged, placed_in
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.layout import commit_key, root_key
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.records import Record, StoredRecord
from tstore.core.format.objects.references import Manifest
from tstore.core.log.records import Records
from tstore.errors import Corrupt
from tstore.lab.conformance.faults import open_faulty
from tstore.lab.simulation.scenario import override_constants


@pytest.mark.parametrize(("length", "check"), [(32, b"\7" * 16), (160_000, b"\7" * 16), (32, None)])
async def test_another_reference_to_the_same_place_is_verified_too(
    tmp_path: Path, length: int, check: bytes | None
) -> None:
    """A commit may refer to the start of a chunk of another version, with a wrong length or checksum."""
    await tstore.save(tmp_path, {"w": np.random.default_rng(0).random(20_000)}, step=1)
    [pack] = (str(path.relative_to(tmp_path)) for path in tmp_path.rglob("pack-*"))
    if check is None:  # that of the whole chunk
        store = await tstore.open(tmp_path)
        [table] = (await store.snapshot()).tree.nodes["w"].tables
        check = next(iter(table.rows)).checks
    table = ChunkTable.from_rows([ChunkRow(0, pack, 0, length, check)])
    manifest = Manifest.from_nodes([("forged", ArrayMeta.new((8,), "f4", (8,)).document, True, [table])])
    record = Record("forged", 1, 1.0, manifests=(manifest,), reused=(pack,))
    (tmp_path / commit_key(2)).write_bytes(placed_in(tmp_path, 2, forged(record)))
    store = await tstore.open(tmp_path)
    with pytest.raises(Corrupt):
        await (await (await store.snapshot()).array("forged")).read()
    report = await store.verify()
    assert [("forged" in fault, "version 2" in fault) for fault in report.faults] == [(True, True)]
    assert report.chunks == 2


async def commits(url: str, count: int) -> tstore.Store:
    """Return a store in which version v has set an element of "w" to v; two void records follow."""
    store, faults = await open_faulty(url)
    async with store.transaction() as tx:
        await (await tx.create_array("w", (3,), "i8", (1,))).write(1)
    for version in range(2, count + 1):
        async with store.transaction(tag=f"t{version}") as tx:
            await (await tx.array("w"))[version % 3].write(version)
    faults.fail("create", "commits/*")
    faults.fail("create", "commits/*", nth=2)
    async with store.transaction():
        pass
    return await tstore.open(url)


@pytest.mark.parametrize(("copied", "over"), [(2, 6), (5, 6), (1, 5), (6, 9)])
async def test_a_record_copied_over_a_later_one_is_noticed(copied: int, over: int, tmp_path: Path) -> None:
    """Its changes are applied twice, those of the later one are lost, and no root shows this."""
    store = await commits(str(tmp_path), 6)
    voids = [(await store.log.reader.record(v)) for v in (7, 8)]
    assert [v.void for v in voids] == [True, True]
    assert voids[0].transaction == voids[1].transaction
    assert (await store.verify()).ok
    data = (tmp_path / commit_key(copied)).read_bytes()
    (tmp_path / commit_key(over)).unlink()
    (tmp_path / commit_key(over)).write_bytes(data)
    [fault] = (await (await tstore.open(tmp_path)).verify()).faults
    assert f"{commit_key(over)}: it equals {commit_key(copied)}" in fault


async def test_missing_records_do_not_multiply_the_reads_of_a_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with override_constants(ROOT_EVERY=4):
        store = await tstore.open(tmp_path)
        for value in range(200):
            async with store.transaction(durability="none") as tx:
                w = await (tx.array("w") if value else tx.create_array("w", (3,), "i8", (3,)))
                await w.write(value)
        for version in range(20, 120, 2):  # those of many roots among them
            (tmp_path / commit_key(version)).unlink()
        reads, original = 0, Records.stored

        def counted(self: Records, version: int) -> Coroutine[Any, Any, StoredRecord]:
            nonlocal reads
            reads += 1
            return original(self, version)

        monkeypatch.setattr(Records, "stored", counted)
        report = await (await tstore.open(tmp_path, mode="r")).verify()
        assert (len(report.faults), report.unchecked[0]) == (50, 21)
        assert reads < 10 * 200


async def test_a_root_is_not_at_fault_if_the_record_of_its_version_is_damaged(tmp_path: Path) -> None:
    with override_constants(ROOT_EVERY=4):
        await commits(str(tmp_path), 9)
        assert (tmp_path / root_key(4)).exists()
        for damage in (lambda path: path.write_bytes(b"garbage"), Path.unlink):
            damage(tmp_path / commit_key(4))
            [fault] = (await (await tstore.open(tmp_path)).verify()).faults
            assert commit_key(4) in fault
            assert root_key(4) not in fault

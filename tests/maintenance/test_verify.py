"""What `verify` reads: every chunk as every version refers to it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

import tstore
from tests.attacks.forgeries import Known, commit, framed, manifest, record
from tstore.errors import Corrupt


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
    forged = manifest(
        packs=[pack], inline=[], offset=struct.pack("<Q", 0), length=struct.pack("<Q", length), checks=check
    )
    body = record(Known(1, 0, {}, (), (), tmp_path), manifests=[forged], reused=[pack], bytes_added=0)
    (tmp_path / commit(2)).write_bytes(framed(b"R", body))
    store = await tstore.open(tmp_path)
    with pytest.raises(Corrupt):
        await (await (await store.snapshot()).array("forged")).read()
    report = await store.verify()
    assert [("forged" in fault, "version 2" in fault) for fault in report.faults] == [(True, True)]
    assert report.chunks == 2

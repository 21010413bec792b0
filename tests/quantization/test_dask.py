"""A real Dask cluster of worker processes quantizes a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exmy
import numpy as np
import pytest

import tstore
import tstore.quantization.work  # whose threshold is lowered
from tests.support.lazy import lazy
from tests.support.thresholds import Thresholds

distributed = lazy("distributed")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        with distributed.Client(cluster) as client:
            yield client


async def test_a_dask_cluster_quantizes_a_checkpoint(tmp_path: Path, client: Any, thresholds: Thresholds) -> None:
    thresholds(_MIN_TASK_BYTES=100_000)
    rng = np.random.default_rng(3)
    tree = {f"w{i}": rng.normal(size=(100, 90 + i)).astype("f4") for i in range(8)}
    await tstore.save(tmp_path, tree, 0)
    executor = client.get_executor()
    report = await tstore.quantize(tmp_path, bits=5.0, coding="packed", executor=executor, tag="q")
    assert 4.5 < report.bits_per_value <= 5
    packed = await tstore.restore(tmp_path, at="q", packed=True)
    for row in report.arrays:
        assert row.format
        block = 32 if tree[row.path].shape[1] == 96 else None
        assert packed[row.path].to_bytes() == exmy.quantize(tree[row.path], row.format, block=block).to_bytes()
    store = await tstore.open(tmp_path)
    assert (await store.verify()).ok
    packs = {key.rsplit("-", 1)[0] for key in await store.log.storage.list("txn/") if "pack-" in key}
    assert len(packs) == 4  # of the save, and of three tasks

"""Reference files: fsspec and zarr open a version in place, in processes that have no tstore."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore.sync as tstore
from tests.support.fileservers import aiohttp_files
from tests.support.http_server import WRITE, serving
from tstore import open
from tstore.convert.references import export_references
from tstore.errors import AlreadyExists, InvalidArgument, NotFound, UnsupportedFormat

VALUES = np.arange(60 * 70, dtype="f4").reshape(60, 70)
READ = """
import sys
import uuid
sys.modules["tstore"] = None  # an import fails
import json, fsspec, numpy as np, zarr
from zarr.storage import FsspecStore
out, protocol, options = sys.argv[1:4]
remote = {"asynchronous": True, **json.loads(options)} if protocol == "http" else {}
reference = {"fo": out, "remote_protocol": protocol, "remote_options": remote, "asynchronous": True}
store = FsspecStore.from_url("reference://", storage_options=reference, read_only=True)
root = zarr.open_group(store, mode="r", use_consolidated=False)
sums = {}
for path in sys.argv[4:]:
    array = root[path]
    values = array[:]
    sums[path] = [float(values.astype("f8").sum()), float(values.reshape(-1)[-1]), dict(array.attrs)]
print(json.dumps(sums))
"""


def read_elsewhere(out: Path, protocol: str, *paths: str, **options: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", READ, str(out), protocol, json.dumps(options), *paths]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    read: dict[str, Any] = json.loads(run.stdout)
    return read


def expected(values: np.ndarray[Any, Any], **attributes: Any) -> list[Any]:
    return [float(values.astype("f8").sum()), float(values.reshape(-1)[-1]), attributes]


@pytest.fixture
def url(tmp_path: Path) -> str:
    with tstore.open(tmp_path / "s") as store:
        with store.transaction() as transaction:
            transaction.create_array("g/raw", VALUES.shape, "f4", (16, 30), attributes={"unit": "m"}).write(VALUES)
            transaction.create_array("g/packed", VALUES.shape, "f4", (16, 70), "lossless").write(VALUES)
        with store.transaction() as transaction:  # small: its chunks are in the record
            transaction.create_array("few", (3,), "i4").write(np.array([1, 2, 7]))
            transaction.create_array("gaps", (40,), "i2", (10,), fill_value=5, sparse=True)[10:20].write(
                np.ones(10, "i2")
            )
    return str(tmp_path / "s")


GAPS = np.where(np.arange(40) // 10 == 1, 1, 5)
ALL = {
    "g/raw": expected(VALUES, unit="m"),
    "g/packed": expected(VALUES),
    "few": expected(np.array([1, 2, 7])),
    "gaps": expected(GAPS),
}


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
async def test_a_version_is_read_in_place_without_tstore(url: str, tmp_path: Path, suffix: str) -> None:
    report = await export_references(url, tmp_path / f"refs{suffix}")
    assert (report.version, report.tensors) == (2, 4)
    assert read_elsewhere(tmp_path / f"refs{suffix}", "file", *ALL) == ALL


async def test_a_version_is_read_from_a_file_server(url: str, tmp_path: Path) -> None:
    async with aiohttp_files(Path(url)) as served:
        await export_references(url, tmp_path / "refs.json", base_url=served)
        read = await asyncio.to_thread(read_elsewhere, tmp_path / "refs.json", "http", *ALL)
        assert read == ALL


async def test_a_version_is_read_from_a_server_of_tstore(url: str, tmp_path: Path) -> None:
    with serving(url) as server:
        store = await open(server.url, "r", storage_options={"token": WRITE})
        await export_references(store, tmp_path / "refs.json")
        assert WRITE not in (tmp_path / "refs.json").read_text()
        own = {"headers": {"Authorization": f"Bearer {WRITE}"}}
        assert read_elsewhere(tmp_path / "refs.json", "http", *ALL, client_kwargs=own) == ALL


async def test_what_can_not_be_referred_to_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "refs.json"
    store = tstore.open(tmp_path / "s")
    with store.transaction(tag="dense") as transaction:
        transaction.create_array("a", (40,), "i2", (10,))[:10].write(np.ones(10, "i2"))
    with pytest.raises(NotFound, match=r"chunk \(1,\) of a was never written"):
        await export_references(store.url, out)
    assert not out.exists()
    tstore.save(store, {"w": VALUES, "half": VALUES.astype("bfloat16")}, step=1)
    with pytest.raises(UnsupportedFormat, match=r"half: Zarr v2 has no dtype bfloat16; write references as .json"):
        await export_references(store.url, tmp_path / "refs.parquet")
    assert not (tmp_path / "refs.parquet").exists()
    tstore.quantize(store, {"w": "e4m3"}, tag="small")
    with pytest.raises(InvalidArgument, match=r"1 of its arrays are in eXmY formats, such as 'w'.*--keep-exmy"):
        await export_references(store.url, out, at="small")
    with pytest.raises(InvalidArgument, match=r"ends in \.json or \.parquet"):
        await export_references(store.url, tmp_path / "refs.txt")
    await export_references(store.url, out, at="small", keep_exmy=True)
    with pytest.raises(AlreadyExists, match="exists already"):
        await export_references(store.url, out, step=1)
    memory = tstore.open(f"memory://{uuid.uuid4()}")
    tstore.save(memory, {"w": VALUES}, step=1)
    with pytest.raises(InvalidArgument, match="only in this process"):
        await export_references(memory._wrapped, tmp_path / "other.json")

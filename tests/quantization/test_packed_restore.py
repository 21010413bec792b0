"""`restore(packed=True)`: the codes of arrays, of the parts of `Shards`, and what can't be returned packed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import exmy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
import tstore.sync as blocking
from tstore.errors import Corrupt, InvalidArgument, NotFound
from tstore.sharding import Mesh, P

RNG = np.random.default_rng(11)
SPREAD = np.exp2(RNG.integers(-5, 5, (96, 1)))
X = (RNG.standard_normal((96, 160)) * SPREAD).astype("f4")
CODECS: dict[str, Any] = {
    "tensor": {"format": "e3m2", "scale": "none"},
    "chunks": "e3m2",
    "scaled": {"format": "e3m2", "scale": "float"},
    "fixed": [{"name": "exmy", "configuration": {"format": "e3m4", "scale": 0.1}}, {"name": "zstd"}],
    "rows": {"format": "e2m3", "axis": 1},
    "columns": {"format": "e2m3", "axis": 0},
    "blocks": {"format": "e2m1", "block": 32},
    "fine": {"format": "e2m1", "block": 32, "scale": "e4m3"},
    "tall": {"format": "e2m1", "axis": 0, "block": 16},
}
"""Codecs by path; "chunks" and "scaled" have an offset or a scale for each chunk."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Arrays in all codecs, in chunks that the edge of the array cuts."""
    with blocking.open(tmp_path_factory.mktemp("packed") / "store") as store:
        with store.transaction() as tx:
            for path, codecs in CODECS.items():
                tx.create_array(path, X.shape, "f4", (64, 64), codecs).write(X)
            tx.create_array("plain", (3,), "f4").write(np.ones(3, "f4"))
        yield store


@given(st.data())
def test_the_codes_of_a_region_decode_to_its_values(store: Any, data: st.DataObject) -> None:
    path = data.draw(
        st.sampled_from(["tensor", "fixed", "chunks", "scaled", "rows", "columns", "blocks", "fine", "tall"])
    )
    unit = {"tensor": 1, "fixed": 1}.get(path, 16)  # offsets of blocks may be needed where chunks meet
    sides = []
    for length in X.shape:
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, length // unit)] * 2)))
        sides.append(slice(start * unit, stop * unit))
    region = tuple(sides)
    snapshot = store.snapshot()
    expected = snapshot.array(path)[region].read()
    # one offset for each row of a chunk can't be joined along the row
    axis = {"rows": 1, "columns": 0}.get(path)
    spans = axis is not None and expected.size and (region[axis].stop - 1) // 64 > region[axis].start // 64
    if spans:
        with pytest.raises(InvalidArgument, match=f"{path}: rows along axis {axis} span several chunks"):
            snapshot.read_packed(path, region)
        return
    codes = snapshot.read_packed(path, region)
    assert codes.shape == expected.shape
    assert codes.dequantize("f4").tobytes() == expected.tobytes()


def test_shards_get_the_codes_of_their_parts(tmp_path: Path) -> None:
    blocking.save(tmp_path, {"w": X, "b": X[0]}, 0)
    blocking.quantize(tmp_path, {"w": {"bits": 4.5, "coding": "packed"}}, tag="q")
    mesh = Mesh({"model": 4})
    whole = blocking.restore(tmp_path, at="q")
    for host in range(4):
        part = tstore.Shards.wanted(X.shape, "f4", mesh, P("model"), host)
        restored = blocking.restore(tmp_path, at="q", packed=True, target={"w": part, "b": X[0]})
        assert isinstance(restored["w"], tstore.PackedShards)
        assert (restored["w"].shape, restored["w"].dtype) == (X.shape, X.dtype)
        [(index, codes)] = restored["w"].parts
        assert index[0] == slice(host * 24, host * 24 + 24)
        assert isinstance(codes, exmy.Quantized)
        assert np.array_equal(codes.dequantize("f4"), whole["w"][index])
        assert np.array_equal(restored["b"], X[0])


def test_one_error_names_all_arrays_whose_codes_do_not_fit_together(store: Any) -> None:
    snapshot = store.snapshot()
    with pytest.raises(InvalidArgument) as caught:
        blocking.restore(store, at=snapshot.version, packed=True)
    assert re.fullmatch(
        r"the values of columns, rows can be read, but not their packed codes. columns: rows along axis 0 span "
        r"several chunks of shape \(64, 64\).*; rows: rows along axis 1 .*",
        str(caught.value),
    )
    with pytest.raises(InvalidArgument, match=r"blocks: 8:64 along axis 1 cuts blocks of 32.*multiples of 32"):
        snapshot.read_packed("blocks", (slice(0, 96), slice(8, 64)))
    with pytest.raises(InvalidArgument, match="plain: it is not stored in an eXmY format"):
        snapshot.read_packed("plain")
    with pytest.raises(InvalidArgument, match=r"blocks: region=.*: expected a tuple with a slice of step 1"):
        snapshot.read_packed("blocks", (slice(0, 96, 2), slice(None)))
    for region in (slice(0, 96), 3, (3, 4), (slice(0, 96), ...), (slice("a", 96), slice(None)), (slice(None),)):
        with pytest.raises(InvalidArgument, match="expected a tuple with a slice of step 1 for each of 2 axes"):
            snapshot.read_packed("blocks", region)
    with pytest.raises(NotFound):
        snapshot.read_packed("absent")


def test_sparse_arrays_have_codes_where_chunks_were_written(tmp_path: Path) -> None:
    with blocking.open(tmp_path) as store:
        with store.transaction() as tx:
            array = tx.create_array("w", X.shape, "f4", (16, 160), "e4m3", fill_value=1.0, sparse=True)
            array[:32].write(X[:32])
        assert np.array_equal(blocking.restore(store, at=store.snapshot().version)["w"][32:], np.ones((64, 160)))
        codes = store.snapshot().read_packed("w", (slice(0, 32), slice(0, 160)))
        assert np.array_equal(codes.dequantize(), store.snapshot().array("w")[:32].read())
        with pytest.raises(InvalidArgument, match=r"codes. w: it is sparse, and chunk \(2, 0\) was never written"):
            blocking.restore(store, at=store.snapshot().version, packed=True)


def test_joined_codes_whose_offsets_do_not_fit_bytes_are_refused_as_bytes(tmp_path: Path) -> None:
    x = np.full((16, 64), 1e-100)
    x[:, 32:] = 1e100
    with blocking.open(tmp_path) as store:
        with store.transaction() as tx:
            tx.create_array("w", x.shape, "f8", (16, 32), "e4m3").write(x)
        codes = store.snapshot().read_packed("w")
        assert np.allclose(codes.dequantize(), x, rtol=0.1)
        with pytest.raises(exmy.FormatError, match="differ by more than 255"):
            codes.to_bytes()


def test_a_region_reads_only_the_chunks_that_it_overlaps(tmp_path: Path) -> None:
    with blocking.open(tmp_path) as store:
        with store.transaction() as tx:
            tx.create_array("w", X.shape, "f4", (16, 80), "e4m3").write(X)
        for pack in tmp_path.rglob("pack-*"):
            data = bytearray(pack.read_bytes())
            data[-100:] = bytes(100)  # damages the last chunk
            pack.write_bytes(data)
        codes = store.snapshot().read_packed("w", (slice(16, 48), slice(0, 160)))
        assert codes.shape == (32, 160)
        with pytest.raises(Corrupt, match=r"w, chunk \(5, 1\)"):
            store.snapshot().read_packed("w")

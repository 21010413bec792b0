"""The abstract tree of a step: a target of `restore`, made without reading chunks."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest

import tstore.sync as tstore
from tests.support.weights import raw
from tstore.errors import NotFound

jax = pytest.importorskip("jax")
P = jax.sharding.PartitionSpec


class Moments(NamedTuple):
    """State of an optimizer."""

    mean: Any
    count: Any


@pytest.fixture
def store() -> str:
    url = f"memory://{uuid.uuid4()}"
    tree = {
        "params": {"w": jax.numpy.arange(8.0).reshape(2, 4), "b": jax.numpy.ones(4, "bfloat16")},
        "opt": (Moments(jax.numpy.ones(3), np.float32(2)), {}),
        "key": jax.random.split(jax.random.key(1, impl="rbg")),
        "bit": jax.numpy.ones(3, "int1"),
        "long": np.arange(3),
        "text": np.array(["a", "bc"]),
        "rows": np.zeros(2, [("x", "i4"), ("y", "f8")]),
        "data": tstore.PerHost({"next": 5}),
        "epoch": 2,
        "none": None,
    }
    tstore.jax.save(url, tree, step=7)
    return url


def test_each_kind_of_value_is_described_and_restored(store: str) -> None:
    struct = jax.ShapeDtypeStruct
    described = tstore.jax.metadata(store)
    assert described["params"] == {"w": struct((2, 4), "float32"), "b": struct((4,), "bfloat16")}
    assert described["opt"] == ({"mean": struct((3,), "float32"), "count": struct((), "float32")}, {})
    assert described["key"] == struct((2,), jax.random.key(1, impl="rbg").dtype)
    assert described["bit"] == struct((3,), "int1")
    assert (described["long"].dtype, described["long"].strides) == (np.int64, (0,))  # without jax_enable_x64
    assert (described["rows"].dtype.names, described["rows"].strides) == (("x", "y"), (0,))
    assert (described["epoch"], described["none"], described["data"].value) == (2, None, None)
    restored = tstore.jax.restore(store, target=described)
    plain = tstore.jax.restore(store)
    assert isinstance(restored["params"]["w"], jax.Array)
    assert raw(np.asarray(restored["params"]["b"])) == raw(plain["params"]["b"])
    assert (jax.random.key_data(restored["key"]) == jax.random.key_data(plain["key"])).all()
    assert (restored["long"].tolist(), restored["text"].tolist()) == ([0, 1, 2], ["a", "bc"])
    assert restored["data"].value == {"next": 5}


def test_shardings_by_path(store: str) -> None:
    mesh = jax.make_mesh((1,), ("x",))
    rows, whole = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("x"), P()))
    described = tstore.jax.metadata(store, 7, sharding=lambda path, leaf: rows if path == "params/w" else None)
    assert (described["params"]["w"].sharding, described["params"]["b"].sharding) == (rows, None)
    described = tstore.jax.metadata(store, 7, only=["params/**", "key"], sharding=whole)
    assert {leaf.sharding for leaf in jax.tree.leaves(described)} == {whole}
    restored = tstore.jax.restore(store, 7, target=described, only=["params/**", "key"])
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {whole}


def test_no_chunk_is_read(tmp_path: Any) -> None:
    tstore.jax.save(tmp_path, {"w": jax.numpy.ones((512, 512))}, step=1)
    for pack in tmp_path.glob("txn/*/pack-*"):
        pack.unlink()
    assert tstore.jax.metadata(tmp_path, at="step/1") == {"w": jax.ShapeDtypeStruct((512, 512), "float32")}
    with pytest.raises(NotFound, match="step 2"):
        tstore.jax.metadata(tmp_path, 2)
    with pytest.raises(NotFound, match="no array matches"):
        tstore.jax.metadata(tmp_path, only="v")

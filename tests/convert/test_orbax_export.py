"""Exports that Orbax restores: with its checkpointers, and as a step of its manager."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tstore
from tests.convert.test_orbax import bits
from tstore.cli import main
from tstore.convert.importing import import_checkpoint
from tstore.convert.orbax_export import export_orbax
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument

pytest.importorskip("jax")
if importlib.util.find_spec("orbax") is None:
    pytest.skip("orbax-checkpoint is not installed", allow_module_level=True)

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

X = np.arange(6, dtype=np.float32)
TREE: dict[str, Any] = {
    "params": {"w": X.reshape(2, 3), "bf16": X.astype(ml_dtypes.bfloat16), "i4": X.astype(ml_dtypes.int4)},
    "f8": X.astype(ml_dtypes.float8_e4m3fn),
    "layers": [(X, {"b": X + 1}), (X + 2, {})],
    "a.b": X > 2,
    "count": np.float32(3),
    "step": 7,
    "lr": 0.1,
    "nan": float("nan"),
    "resumed": True,
    "name": "läufe",
    "none": None,
    "empty": {},
    "no layers": (),
    "large": np.arange(1 << 20, dtype=np.float64).reshape(1 << 10, 1 << 10),
}


def typed(value: Any) -> Any:
    """Return what tells values of a tree apart, also 1 from True; NumPy scalars are numbers of Python to Orbax."""
    match value:
        case dict():
            return {key: typed(item) for key, item in value.items()}
        case list() | tuple():
            return [type(value).__name__, *map(typed, value)]
        case np.generic():
            return typed(value.item())
    return bits(value) if hasattr(value, "dtype") else (type(value).__name__, repr(value))


async def test_orbax_restores_every_kind_of_value_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    told: list[tuple[int, int]] = []
    await tstore.save(tmp_path / "store", TREE, 40, metrics={"loss": 0.5})
    async with await tstore.open(tmp_path / "store", "r") as store:
        report = await export_orbax(store, tmp_path / "runs" / "40", progress=lambda *at: told.append(at))
    assert (report.tensors, report.left_out, told[-1]) == (10, [], (report.bytes, report.bytes))
    expected = {**TREE, "layers": [list(TREE["layers"][0]), list(TREE["layers"][1])]}  # Orbax has no tuples
    with ocp.StandardCheckpointer() as checkpointer:
        assert typed(checkpointer.restore(tmp_path / "runs" / "40" / "default")) == typed(expected)
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert typed(checkpointer.restore(tmp_path / "runs" / "40" / "default")) == typed(expected)
    best = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path / "runs", options=best) as manager:
        assert (manager.all_steps(), manager.best_step()) == ([40], 40)
        assert typed(manager.restore(40, args=ocp.args.StandardRestore())) == typed(expected)
    await import_checkpoint(tmp_path / "runs" / "40", tmp_path / "again", 40)
    assert typed(await tstore.restore(tmp_path / "again")) == typed(expected)


def test_a_state_of_training_goes_to_orbax_and_back(tmp_path: Path) -> None:
    import tstore.sync as tstore

    (tmp_path / "runs").mkdir()
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    params = {"w": jnp.arange(8.0).reshape(2, 4), "b": jnp.ones(4, jnp.bfloat16)}
    state = {"params": params, "opt": optimizer.init(params), "rng": jax.random.key(3), "step": jnp.int32(9)}
    state["opt"] = jax.tree.map(lambda leaf: leaf + 1, state["opt"])
    tstore.jax.save(tmp_path / "store", state, 9)
    assert main(["export", str(tmp_path / "store"), str(tmp_path / "runs" / "9"), "--to", "orbax"]) == 0
    mesh = jax.make_mesh((1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    target = jax.eval_shape(lambda: state)
    target["params"]["w"] = jax.ShapeDtypeStruct((2, 4), "float32", sharding=sharding)
    with ocp.CheckpointManager(tmp_path / "runs") as manager:
        restored = manager.restore(9, args=ocp.args.StandardRestore(target))
    assert restored["params"]["w"].sharding == sharding
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), restored, state))
    assert main(["import", str(tmp_path / "runs" / "9"), str(tmp_path / "again"), "--step", "9"]) == 0
    again = tstore.jax.restore(tmp_path / "again", target=state)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), again, state))


async def test_what_orbax_lacks_is_refused_by_path_or_left_out(tmp_path: Path) -> None:
    odd = {
        "none": np.empty((0, 3), np.float32),
        "narrow": X.astype(ml_dtypes.float8_e3m4).astype(ml_dtypes.float6_e2m3fn),
        "bytes": b"\0",
        "complex": 1j,
        "long": 1 << 64,
        "a/b": "text",
        "x.y": X,
        "x": {"y": X},
        "z.k": X,
        "z": {"k": {"impl=threefry2x32": np.zeros(2, np.uint32)}},
        "keys": {1: X, "1": X},
        "rng": {"impl=unknown": np.zeros(2, np.uint32)},
    }
    await tstore.save(
        tmp_path / "store", {"w": X, "odd": odd, "rng": tstore.PerHost(5)}, 1, attributes={"by": "me"}
    )
    with pytest.raises(InvalidArgument) as refused:
        await export_orbax(tmp_path / "store", tmp_path / "out")
    told = str(refused.value)
    for fault in (
        "odd/none: an array of shape [0, 3], without elements",
        "odd/narrow: an array of float6_e2m3fn, which TensorStore does not write",
        "odd/bytes: a Python scalar of type bytes",
        "odd/complex: a Python scalar of type complex",
        "odd/long: an integer of more than 64 bits",
        "odd/a%2fb: text at a key with '/' or '~'",
        "odd/x/y: Orbax would store it under the name 'odd.x.y', as odd/x.y",
        "odd/z/k: Orbax would store it under the name 'odd.z.k', as odd/z.k",
        "odd/keys: several of the keys [1, '1'] are equal as text",
        "odd/rng: JAX does not know these PRNG keys",
    ):
        assert fault in told
    assert "--skip" in told
    told_bytes: list[tuple[int, int]] = []
    report = await export_orbax(
        tmp_path / "store", tmp_path / "out", skip=["odd"], progress=lambda *at: told_bytes.append(at)
    )
    assert (report.tensors, report.left_out) == (2, ["odd", "attributes of the root"])
    assert told_bytes[-1] == (report.bytes, report.bytes)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "out" / "default")
    assert (list(restored), list(restored["rng"])) == (["rng", "w"], ["%host=0"])
    with pytest.raises(InvalidArgument, match="matches no path"):
        await export_orbax(tmp_path / "store", tmp_path / "new", skip=["od"])
    with pytest.raises(AlreadyExists, match="out already exists"):
        await export_orbax(tmp_path / "store", tmp_path / "out", skip=["odd"])
    with pytest.raises(InvalidArgument, match="has no values"):
        await export_orbax(tmp_path / "store", tmp_path / "new", skip=["**"])
    assert sorted(os.listdir(tmp_path)) == ["out", "store"]


async def test_a_damaged_chunk_leaves_no_folder(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "store", {"x": np.ones(5000)}, 0)
    pack = next((tmp_path / "store").glob("txn/*/pack-*"))
    pack.write_bytes(pack.read_bytes()[:-8] + b"\1" * 8)
    with pytest.raises(Corrupt, match=r"x, chunk"):
        await export_orbax(tmp_path / "store", tmp_path / "out")
    assert os.listdir(tmp_path) == ["store"]


def test_options_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tstore.sync as tstore

    tstore.save(tmp_path / "store", {"w": X, "model": {"b": X, "c": X}, "note": b"x"}, 1)
    store, out = str(tmp_path / "store"), str(tmp_path / "out")
    assert main(["export", store, out, "--skip", "note"]) == 2
    assert "has no array at 'note', which skip names" in capsys.readouterr().err
    assert main(["export", store, out, "--to", "orbax", "--skip", "note"]) == 0
    assert "note" in capsys.readouterr().out
    assert main(["export", store, f"{out}2", "--to", "orbax", "--subtree", "model", "--skip", "model/c"]) == 0
    with ocp.StandardCheckpointer() as checkpointer:
        assert bits(checkpointer.restore(Path(f"{out}2", "default"))) == bits({"b": X})

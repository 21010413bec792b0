"""Jobs of processes forked from one that has imported JAX: `python -m tests.jax.job FOLDER CHECK:PROCESSES …`.

Each check is a function that all processes of a job call, which have 8 devices together. A failure in one of them
fails the job.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import tstore.sync as tstore
from tests.support import ports
from tests.support.held_saves import held_saves
from tstore.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Inconsistent,
    InvalidArgument,
    NotFound,
    StructureMismatch,
    Unavailable,
)

DEVICES = 8


def mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y")[: len(shape)])


def placed(values: Any, mesh: Mesh, *spec: Any) -> jax.Array:
    """Return a global array, of which each process has a part."""
    values = np.asarray(values)
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, P(*spec)), lambda index: values[index])


def abstract(tree: Any) -> Any:
    """Return the shapes, dtypes and shardings of the committed arrays, and other leaves as they are."""

    def form(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None)

    return jax.tree.map(form, tree)


def same(one: Any, other: Any) -> None:
    """Raise `AssertionError` unless two pytrees have the same types, shardings and values."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert type(a) is type(b), (path, a, b)
        if isinstance(a, jax.Array):
            assert (a.dtype, a.sharding, a.committed) == (b.dtype, b.sharding, b.committed), path
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                assert jax.random.key_impl(a) == jax.random.key_impl(b)
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
                np.testing.assert_array_equal(np.asarray(x.data), np.asarray(y.data), str(path))
        else:
            np.testing.assert_array_equal(a, b, str(path))


# ---- one process


def pytrees(_: Path) -> None:
    on = mesh(4, 2)
    w = placed(np.arange(64 * 32, dtype="f4").reshape(64, 32), on, "x", "y")
    tree = {
        "w": w,
        "opt": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init({"w": w}),
        "bf16": placed(np.ones(32, ml_dtypes.bfloat16), on),
        "f8": placed(np.ones((16, 8), ml_dtypes.float8_e4m3fn), on, None, ("y", "x")),
        "i4": placed(np.arange(64).astype(ml_dtypes.int4), on, "x"),
        "one": jax.device_put(jnp.ones(3), jax.devices()[5]),
        "key": jax.random.key(3),
        "keys": jax.device_put(jax.random.split(jax.random.key(0, impl="rbg"), 8), NamedSharding(on, P("x"))),
        "numbers": (3, 0.5, True, "x", np.arange(4.0), np.float32(3), None),
        "frozen": flax.core.freeze({"a": {"b": jnp.zeros(())}}),
    }
    url = "memory://pytrees"
    tstore.jax.save(url, tree, 1)
    same(tree, tstore.jax.restore(url, target=tree))
    same(tree, tstore.jax.restore(url, target=abstract(tree)))
    only = tstore.jax.restore(url, target=abstract(tree), only="opt/**")
    same(tree["opt"], only["opt"])
    assert isinstance(only["w"], jax.ShapeDtypeStruct)
    old = {**tree, "i4": jnp.zeros_like(tree["i4"]), "key": jax.random.key(0)}
    same(tree, tstore.jax.restore(url, target=old, only=["w", "i4", "key"]))
    assert list(tstore.jax.restore(url, only="i?")) == ["i4"]
    assert list(tstore.jax.explain(url, only=["i4"]).arrays) == ["i4"]

    arrays = tstore.jax.restore(url)
    assert arrays["i4"].dtype == ml_dtypes.int4
    assert arrays["opt"][1][0]["mu"]["w"].shape == (64, 32)
    assert arrays["frozen"]["a"]["b"] == 0
    assert jax.random.key_impl(arrays["keys"]) == "rbg"
    paths = tstore.open(url).snapshot().paths()
    assert {"opt/1/0/mu/w", "frozen/a/b", "i4", "key/impl=threefry2x32", "numbers/5"} <= set(paths)

    other = {**abstract(tree), "key": jax.random.key(3, impl="rbg")}
    with pytest.raises(
        StructureMismatch, match="key: stored typed PRNG keys of threefry2x32, target those of rbg"
    ):
        tstore.jax.restore(url, target=other)
    assert tstore.jax.restore(url, target={"v": w}, rename={"w": "v"}, only="v")["v"].sharding == w.sharding
    renamed = {"new": {"i4": jnp.zeros_like(tree["i4"]), "key": jax.random.key(0)}}
    names = {"i?": "new/i?", "key": "new/key"}
    renamed = tstore.jax.restore(url, target=renamed, rename=names, only="new/*")["new"]
    same({"i4": tree["i4"], "key": tree["key"]}, renamed)
    assert tstore.jax.restore(url, rename=names, only="new/*")["new"].keys() == renamed.keys()
    assert len(tstore.jax.explain(url, rename=names, only="new/*").arrays) == 2
    with pytest.raises(NotFound, match=r"no array matches only='kee'; "):
        tstore.jax.restore(url, only="kee")
    with pytest.raises(NotFound, match=r"'kee'.* matches nothing"):
        tstore.jax.restore(url, rename={"kee": "new"})
    f16 = jax.ShapeDtypeStruct(w.shape, jnp.float16, sharding=NamedSharding(on, P("y")))
    cast = tstore.jax.restore(url, target={"w": f16}, only="w", dtype="target")["w"]
    assert cast.dtype == jnp.float16
    assert cast.sharding == f16.sharding
    kept = tstore.jax.restore(url, target={"w": w, "ema": w}, only=["w", "ema"], missing="keep")
    assert kept["ema"] is w
    with pytest.raises(InvalidArgument, match=r"^ema: the checkpoint lacks it, and the target has no values"):
        tstore.jax.restore(url, target=abstract({"w": w, "ema": w}), only=["w", "ema"], missing="keep")
    with pytest.raises(InvalidArgument, match=r"^new: the checkpoint lacks it"):
        tstore.jax.restore(url, target=abstract({"new": tree["i4"]}), only=["new/**", "w?"], missing="keep")

    for step, (value, dtype) in enumerate([(1 << 40, "i4"), (2.7, "i4"), ("x", "f4"), (-1, "u4")], 3):
        tstore.jax.save(url, {"n": value, "f": 0.1}, step)
        with pytest.raises(InvalidArgument, match=r"^n: the checkpoint has"):
            tstore.jax.restore(url, target={"n": jnp.zeros((), dtype), "f": 0.0})
        assert tstore.jax.restore(url, target={"n": value, "f": jnp.zeros(())})["f"] == jnp.float32(0.1)

    no_keys = [np.ones(2, "f4"), np.ones(3, "u4"), np.ones((), "u4"), np.ones(2, "u8")]
    tstore.jax.save(url, [{"impl=threefry2x32": values} for values in no_keys], 2)
    for values, restored in zip(no_keys, tstore.jax.restore(url, 2), strict=True):
        np.testing.assert_array_equal(restored["impl=threefry2x32"], values)


def single_leaves(_: Path) -> None:
    """Trees that are one leaf, and numbers in place of arrays."""
    bits = np.array([-1, 0], ml_dtypes.int1)
    one_bit, no_bit = jax.device_put(bits), jax.device_put(bits[1])  # jnp.array can't make them
    for number, (leaf, target) in enumerate(
        [
            (jax.random.key(3), jax.random.key(0)),
            (jax.random.split(jax.random.key(3, impl="rbg")), jax.random.split(jax.random.key(0, impl="rbg"))),
            (one_bit, jax.device_put(bits[::-1])),
            (bits, bits[::-1].copy()),
            (jnp.ones(3), jnp.zeros(3)),
            (3, 0),
            ("x", "y"),
            (np.float32(3), np.float32(0)),
        ]
    ):
        url = f"memory://single{number}"
        tstore.jax.save(url, leaf, 1)
        same(leaf, tstore.jax.restore(url, target=target))
        if not isinstance(leaf, str | int):
            same(leaf, tstore.jax.restore(url, target=abstract(target)))
        with patch("tstore.checkpoint.reading.Reading.read", AsyncMock(return_value={})):
            if hasattr(leaf, "dtype"):
                with pytest.raises(StructureMismatch, match=r"1 missing"):
                    tstore.jax.restore(url, target=target)
    tstore.jax.save("memory://number", -1, 1)
    for target in (jnp.zeros((), "i4"), no_bit, np.zeros((), ml_dtypes.int1), 0):
        restored = tstore.jax.restore("memory://number", target=target)
        assert (int(restored), type(restored)) == (-1, type(target))
    tstore.jax.save("memory://number", jnp.int32(3), 2)
    assert tstore.jax.restore("memory://number", target=0) == 3
    tstore.jax.save("memory://numbers", {"a": -1, "b": {"dtype=int1": -1}}, 1)
    restored = tstore.jax.restore("memory://numbers", target={"a": no_bit}, only="a")
    same(restored, {"a": jax.device_put(bits[0])})
    with pytest.raises(StructureMismatch, match="b/dtype=int1: stored int, target an array"):
        tstore.jax.restore("memory://numbers", target={"a": -1, "b": no_bit})


def keys_in_another_form(_: Path) -> None:
    url, typed, raw = "memory://keys", jax.random.key(4), jax.random.PRNGKey(4)
    tstore.jax.save(url, {"raw": raw, "typed": typed, "other": np.ones(2)}, 1)
    tstore.jax.save(url, typed, 2)
    with pytest.raises(StructureMismatch) as mismatch:
        tstore.jax.restore(url, 1, target={"raw": typed, "typed": raw, "new": raw})
    assert (mismatch.value.missing, mismatch.value.unexpected) == (["new"], ["other"])
    assert mismatch.value.mismatched == [
        "raw: stored raw data, target typed PRNG keys of threefry2x32; pass jax.random.key_data(key) in the "
        "target, and the result to jax.random.wrap_key_data(…, impl='threefry2x32')",
        "typed: stored typed PRNG keys of threefry2x32, target raw data; pass such a key, as from "
        "jax.random.key(0, impl='threefry2x32'), and take jax.random.key_data of the result",
    ]
    with pytest.raises(StructureMismatch, match="value: stored typed PRNG keys of threefry2x32, target raw data"):
        tstore.jax.restore(url, target=raw)


def structures(_: Path) -> None:
    """Without a target, None, tuples and empty containers are as they were; of any other class, dicts."""
    one = jnp.ones(1)
    tree = {"none": None, "dict": {}, "tuple": (), "list": [], "in": [{}, None, (one, [one, None])], "one": one}
    for number, saved in enumerate([tree, None, (), {}, [None], one]):
        tstore.jax.save(f"memory://structures{number}", saved, 1)
        same(jax.tree.map(np.asarray, saved), tstore.jax.restore(f"memory://structures{number}"))
        same(saved, tstore.jax.restore(f"memory://structures{number}", target=saved))
    url, state = "memory://structures", optax.adam(0.1).init({"w": one})
    tstore.jax.save(url, {"opt": state, "frozen": flax.core.freeze({})}, 1)
    restored = tstore.jax.restore(url)
    assert (type(restored["opt"]), restored["opt"][1], restored["frozen"]) == (tuple, {}, {})
    assert list(restored["opt"][0]) == ["count", "mu", "nu"]
    same(tstore.jax.restore(url, target={"opt": state}, only="opt/**")["opt"], state)
    tstore.save(url, {"opt": [{"count": 0, "mu": {"w": np.ones(1)}}]}, 2)  # a list, as of older versions
    same(tstore.jax.restore(url, target={"opt": ({"count": 1, "mu": {"w": np.zeros(1)}}, ())})["opt"][1], ())


def unusual_targets(folder: Path) -> None:
    """Targets whose mesh has no devices, with weak types, layouts, and leaves that are no arrays."""
    explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    w, url = np.arange(64, dtype="f4").reshape(8, 8), folder / "unusual"
    tree = {
        "w": jax.device_put(w, NamedSharding(explicit, P("x", "y"))),
        "weak": jax.device_put(jnp.full(8, 2.0), NamedSharding(explicit, P("x"))),
        "rate": jnp.asarray(0.5),
    }
    assert tree["weak"].weak_type
    assert tree["rate"].weak_type
    tstore.jax.save(url, tree, 1)
    with jax.set_mesh(explicit), tstore.jax.Checkpointer(url) as saves:
        target = jax.eval_shape(lambda: tree)
        assert isinstance(target["w"].sharding.mesh, AbstractMesh)
        for restored in (
            tstore.jax.restore(url, target=target),
            saves.restore(1, target),
            saves.restore_latest(target),
        ):
            assert restored["w"].sharding == tree["w"].sharding
            np.testing.assert_array_equal(restored["w"], w)
            assert (restored["weak"].weak_type, restored["rate"].weak_type) == (True, True)
            assert (jnp.ones(2, "bfloat16") * restored["rate"]).dtype == "bfloat16"
        assert tstore.jax.explain(url, target=target).bytes_needed >= w.nbytes
    with pytest.raises(InvalidArgument, match=r"^w: .*no devices; call restore inside jax\.set_mesh\(mesh\)"):
        tstore.jax.restore(url, target=target)
    host = NamedSharding(target["w"].sharding.mesh, P("x"), memory_kind="pinned_host")
    with jax.set_mesh(explicit):
        pinned = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=host)}
        assert tstore.jax.restore(url, target=pinned, only="w")["w"].sharding.memory_kind == "pinned_host"
        odd = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(abstract_mesh("z"), P("z")))}
        with pytest.raises(InvalidArgument, match=r"^w: .* can't have the sharding of the target"):
            tstore.jax.restore(url, target=odd, only="w")
    same(tree, tstore.jax.restore(url, target=tree))

    tstore.save("memory://doubles", {"d": np.ones(2)}, 1)
    with pytest.raises(StructureMismatch, match=r"dtype='target', which casts floats.*\n.*d: stored float64\[2\]"):
        tstore.jax.restore("memory://doubles", target={"d": jnp.ones(2)})

    columns = Format(Layout(major_to_minor=(1, 0)), tree["w"].sharding)
    for form in (
        jax.device_put(w, columns),
        jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=columns),
    ):
        restored = tstore.jax.restore(url, target={"w": form}, only="w")["w"]
        assert restored.format.layout.major_to_minor == (1, 0)
        assert restored.sharding == tree["w"].sharding
        np.testing.assert_array_equal(restored, w)
    gone = {"w": jax.device_put(w, columns)}
    gone["w"].delete()
    np.testing.assert_array_equal(tstore.jax.restore(url, target=gone, only="w")["w"], w)

    float0 = np.zeros(3, jax.dtypes.float0)
    for odd, message in [
        (..., "^z: an object of type ellipsis in the target stands for no array; pass an array, its .*only=…"),
        (jnp.tanh, "^z: an object of type .* in the target .* eqx.filter"),
        (float0, "^z: a gradient of dtype float0"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            tstore.jax.restore(url, target={**tree, "z": odd})
        restored = tstore.jax.restore(url, target={"w": tree["w"], "z": odd}, only="w")
        assert restored["z"] is odd
        same(restored["w"], tree["w"])
        with pytest.raises(InvalidArgument, match=r"^z: "):
            tstore.jax.restore(url, target={"w": tree["w"], "z": odd}, only=["w", "z"], missing="keep")
    with pytest.raises(InvalidArgument, match=r"^g: a gradient of dtype float0, that of integers, has no values"):
        tstore.jax.save(url, {"g": float0}, 2)


def abstract_mesh(*names: str) -> AbstractMesh:
    return AbstractMesh((2,) * len(names), names)


def resharding(_: Path) -> None:
    w = np.random.default_rng(0).standard_normal((2048, 1024), "f4")
    url = "memory://resharding"
    tstore.jax.save(url, {"w": placed(w, mesh(8, 1), "x", "y")}, 1)
    for shape, spec in [((1, 8), ("x", "y")), ((2, 4), ("y", "x")), ((4, 2), ("y",)), ((8, 1), ())]:
        sharding = NamedSharding(mesh(*shape), P(*spec))
        target = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)}
        plan = tstore.jax.explain(url, target=target)
        assert plan.bytes_needed == plan.bytes_read == w.nbytes
        same(tstore.jax.restore(url, target=target), {"w": jax.device_put(w, sharding)})
    for leaf in (jax.ShapeDtypeStruct(w.shape, w.dtype), jnp.zeros(w.shape)):
        assert not tstore.jax.restore(url, target={"w": leaf})["w"].committed
    with jax.default_device(jax.devices()[3]):
        [device] = tstore.jax.restore(url, target={"w": jax.ShapeDtypeStruct(w.shape, w.dtype)})["w"].devices()
    assert device == jax.devices()[3]
    part = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=SingleDeviceSharding(jax.devices()[6]))}
    assert tstore.jax.restore(url, target=part)["w"].devices() == {jax.devices()[6]}


def small_shards(_: Path) -> None:
    """Devices in any order, some with the same region, and arrays of no elements."""
    url = "memory://small"
    leaves = {f"w{i}": np.arange(64, dtype="f4").reshape(8, 8) + i for i in range(20)}
    leaves["empty"] = np.zeros((0, 8), "f4")
    order = np.array(jax.devices())[[3, 1, 7, 0, 2, 6, 5, 4]]
    layouts = [
        NamedSharding(Mesh(order.reshape(shape), ("x", "y")), P(*spec))
        for shape, spec in [((8, 1), ("x", "y")), ((1, 8), (None, "y")), ((2, 4), ("y",)), ((4, 2), ("y", "x"))]
    ]
    for step, layout in enumerate(layouts):
        tree = jax.device_put(leaves, layout)
        tstore.jax.save(url, tree, step)
        for name, values in tstore.jax.restore(url, step).items():
            np.testing.assert_array_equal(values, leaves[name])
        for other in layouts:
            target = jax.tree.map(lambda x, s=other: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree)
            same(tstore.jax.restore(url, step, target=target), jax.device_put(tree, other))


def training(_: Path) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def create() -> TrainState:
        params = {"dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))

    fresh, url = create(), "memory://training"
    trained = jax.jit(lambda state: state.apply_gradients(grads=state.params))(fresh)
    assert (type(fresh.step), trained.step.shape) == (int, ())
    tstore.jax.save(url, fresh, 0)
    tstore.jax.save(url, trained, 1)
    form = jax.eval_shape(lambda: fresh).replace(tx=fresh.tx)
    for step, state in enumerate((fresh, trained)):  # whether the step is a number or an array
        assert tstore.jax.restore(url, step, target=fresh).step == step
        restored = tstore.jax.restore(url, step, target=form)
        assert restored.step.dtype == trained.step.dtype
        np.testing.assert_array_equal(
            restored.opt_state[0].mu["dense"]["kernel"], state.opt_state[0].mu["dense"]["kernel"]
        )

    net = Net(nnx.Rngs(1))
    definition, state = nnx.split(net)
    tstore.jax.save(url, {"net": state, "module": net}, 2)
    empty = nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    restored = tstore.jax.restore(url, target={"net": empty}, only="net/**")["net"]
    same(state, restored)
    np.testing.assert_array_equal(nnx.merge(definition, restored).layers[0].kernel[...], net.layers[0].kernel[...])
    same(
        state, nnx.state(tstore.jax.restore(url, target={"module": Net(nnx.Rngs(2))}, only="module/**")["module"])
    )


def background(folder: Path) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(placed(np.zeros((8, 65536), "f4"), mesh(8), "x"))
    numbers = np.ones(1000)
    save = tstore.jax.save_async(folder / "background", {"x": x, "numbers": numbers}, 1)
    y = step(x)
    numbers[:] = 2
    assert save.wait() == 1
    restored = tstore.jax.restore(folder / "background")
    assert (restored["x"] == 1).all()
    assert (restored["numbers"] == 1).all()
    tstore.jax.save_async(folder / "scalars", {"x": np.float32(2)}, 1).wait()
    assert type(tstore.jax.restore(folder / "scalars")["x"]) is np.float32
    tstore.jax.save(folder / "background", {"x": y}, 2)
    del restored, save
    step(y).block_until_ready()
    assert y.is_deleted()  # since no view of it is left
    restored = tstore.jax.restore(
        folder / "background", target={"x": jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=y.sharding)}
    )
    assert (np.asarray(step(restored["x"])) == 3).all()


def series(folder: Path) -> None:
    on, url = mesh(8), folder / f"series-{jax.process_count()}"
    with tstore.jax.Checkpointer(url, every=tstore.EverySteps(2) | tstore.EverySeconds(1e6), keep=2) as saves:
        assert saves.restore_latest({"x": placed(np.zeros(8), on)}) is None
        x = placed(np.zeros(8, "f4"), on, "x")
        for step in range(1, 7):
            x = x + 1
            if saves.should_save(step):
                saves.save(step, {"x": x}, metrics={"loss": -step})
        assert saves.latest() == saves.best("loss") == 6
        assert jax.process_index() > 0 or [step.step for step in saves.steps()] == [4, 6]  # since 0 collects
        same({"x": x}, saves.restore_latest({"x": placed(np.zeros(8, "f4"), on, "x")}))
        assert (np.asarray(saves.restore(4)["x"]) == 4).all()
        multihost_utils.sync_global_devices("restored")  # a process that is slower still reads step 6
        saves.rollback(4)
        assert saves.latest() == 4
        saves.save(6, {"x": x + 1})
        same({"x": x + 1}, saves.restore_latest({"x": placed(np.zeros(8, "f4"), on, "x")}))
        lost = AsyncMock(side_effect=Unavailable("no network"))
        steps = patch("tstore.checkpoint.job_store.steps", lost)
        with steps if jax.process_index() == 0 else nullcontext(), pytest.raises(Unavailable):
            saves.restore_latest({"x": x})  # raises in every process
    held = jax.process_index() == jax.process_count() - 1
    with held_saves(held) as release:
        with tstore.jax.Checkpointer(f"{url}-continuous", every=tstore.Continuous()) as saves:
            assert saves.should_save(1)
            save = saves.save(1, {"x": x})
            if not held:
                save.wait()
            assert not saves.should_save(2)  # in no process while one of them is not done
            release()
            save.wait()
            assert saves.should_save(3)
    local = folder / f"local-{jax.process_count()}-{jax.process_index()}"
    tiers = tstore.Tiers(local, folder / f"tiered-{jax.process_count()}", address="127.0.0.1")
    with suppress(KeyError), tstore.jax.Checkpointer(tiers) as saves:
        assert saves.restore_latest({"x": x}) is None
        saves.save(2, {"x": x})
        raise KeyError  # so that nothing is pushed to the durable store
    with tstore.jax.Checkpointer(tiers) as saves:
        same({"x": x}, saves.restore_latest({"x": placed(np.zeros(8, "f4"), on, "x")}))


def late(folder: Path) -> None:
    """Waits for the second process, which comes late, end with our deadline, in both, and name it."""
    url, tree, first = folder / "late", {"x": jnp.ones(3)}, jax.process_index() == 0
    with suppress(AlreadyExists):  # which the other process may do
        tstore.open(url, "x").close()
    with tstore.jax.Checkpointer(url, every=tstore.EverySeconds(1e6), timeout=0.2) as saves:
        if not first:
            multihost_utils.sync_global_devices("the first process has waited")
        for name, call in (
            ("restore_latest", saves.restore_latest),
            ("should_save", lambda: saves.should_save(1)),
            ("restore", lambda: tstore.jax.restore(url)),
        ):
            message = rf"^{name}: hosts \[1\] of 2 did not make this call within 0\.2 s"
            default = patch("tstore.core.format.arguments._DEFAULT_TIMEOUT", 0.2)
            with default, pytest.raises(DeadlineExceeded, match=message) as error:
                call()
            assert error.value.absent == [1]
        with pytest.raises(DeadlineExceeded, match=r"hosts \[1\]" if first else None):
            saves.save(1, tree).wait()  # the first process withdraws it
        if first:
            multihost_utils.sync_global_devices("the first process has waited")
    with tstore.jax.Checkpointer(url, every=tstore.EverySeconds(1e6), timeout=20) as saves:
        assert saves.restore_latest(tree) is None
        assert not saves.should_save(1)
        saves.save(1, tree).wait()
        same(tstore.jax.restore(url, target=tree), tree)
    lost = AsyncMock(side_effect=Unavailable("no network"))
    failing = patch("tstore.jax.processes.chosen_snapshot", lost) if first else nullcontext()
    with failing, pytest.raises(Unavailable, match="^no network" if first else r"^restore: host 0 .*: no network"):
        tstore.jax.restore(url)  # raises in every process


def invalid(folder: Path) -> None:
    url, one = folder / "invalid", jnp.ones(6)
    cycle: dict[str, Any] = {}
    cycle["again"] = [one, {"c": cycle}]
    deep: Any = one
    for _ in range(3000):
        deep = [deep]
    gone = jnp.ones(3)
    gone.delete()
    for tree, message in [
        (cycle, "^again/1/c: the tree contains itself"),
        (deep, "more than 200 levels"),
        ({"a": {1: one, "b": one}}, "sort"),
        ({"a": [one, len]}, "^a/1: an object of type builtin"),
        ({"a": one, "b": jax.ShapeDtypeStruct((2,), "f4")}, "^b: a jax.ShapeDtypeStruct has no values; pass"),
        ({"a": gone}, r"^a: the array has no values \(Array has been deleted"),
        ({"a": np.array([{}])}, "^a"),
        ({"a": jax.new_ref(one)}, r"^a: a jax\.Ref may change while it is saved; pass its values, ref\[\.\.\.\]"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            tstore.jax.save(url, tree, 1)
    with pytest.raises(InvalidArgument, match=r"^a: a value that JAX traces"):
        jax.jit(lambda x: tstore.jax.save(url, {"a": x}, 1))(one)
    state = TrainState.create(apply_fn=len, params={"w": one}, tx=optax.adam(1e-2))
    with pytest.raises(InvalidArgument, match=r"^apply_fn: .* save the tree with tstore\.jax\.save"):
        tstore.save(url, state, 1)
    assert not url.exists()
    tstore.jax.save(url, {"a": one, "b": np.ones(3)}, 1)
    with pytest.raises(AlreadyExists):
        tstore.jax.save(url, {"a": one, "b": np.ones(3)}, 1)

    def form(shape: Any, dtype: Any = "f4", *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(8), P(*spec)))

    for target, message in [
        ({"a": form((6,), "f4", "x"), "b": np.ones(3)}, r"^a: an array of shape \[6\] can't have the sharding"),
        ({"a": form((3,)), "b": np.ones(3)}, r"a: stored float32\[6\], target float32\[3\]"),
        ({"a": form((6,), jnp.bfloat16), "b": np.ones(3)}, "target bfloat16"),
        ({"a": one, "b": np.ones(3), "c": one}, "missing in the checkpoint: c"),
        ({"a": one}, "unexpected, not in the target: b"),
        (
            {"a": one, "b": jax.ShapeDtypeStruct((3,), np.float64)},
            "^b: an array of JAX has dtype float64 only with",
        ),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            tstore.jax.restore(url, target=target)


# ---- several processes


def own_values(folder: Path) -> None:
    """What each process has for itself is saved by each, and restored to the same process."""
    url, number = folder / "own", jax.process_index()
    w = placed(np.arange(16.0), mesh(8), "x")
    bits = np.array([0, -1], ml_dtypes.int1)
    value = {"rng": np.random.default_rng(number).bit_generator.state, "key": jax.random.key(number), "bits": bits}
    value |= {"local": jnp.arange(number + 2), "empty": (None, {}), "text": "a" * number}
    tree = {"w": w, "own": {"state": tstore.PerHost(value)}}
    assert jax.tree.map(lambda leaf: leaf, tree)["own"]["state"] is tree["own"]["state"]
    tstore.jax.save(url, tree, 1)
    restored = tstore.jax.restore(url, 1)["own"]["state"].value
    same(restored, {**value, "local": np.arange(number + 2, dtype="i4")})
    target = {"w": w, "own": {"state": tstore.PerHost({"local": jnp.zeros(()), "key": jax.random.key(9)})}}
    restored = tstore.jax.restore(url, 1, target=target)
    same(restored["w"], w)
    same(restored["own"]["state"].value, value)
    assert set(tstore.jax.explain(url, target=target).arrays) == {"w", f"own/state/%host={number}"}
    with tstore.jax.Checkpointer(url) as checkpoints:
        checkpoints.save(2, {"own": tstore.PerHost(number)})
        assert checkpoints.restore_latest({"own": tstore.PerHost(None)})["own"].value == number
        assert checkpoints.restore_latest(per_host="all")["own"] == [0, 1]
    with pytest.raises(InvalidArgument, match="own/data: other processes have parts"):
        tstore.jax.save(url, {"own": tstore.PerHost({"data": w})}, 3)
    for leaf in (
        jnp.full(3, number),
        np.full(2, number),
        np.float32(number),
        number,
        "ab"[number],
        jax.random.key(number),
        placed(np.full((3, 2), number), mesh(8)),
        placed(np.full(1 << 20, number), mesh(4, 2)),
    ):
        with pytest.raises(Inconsistent, match=r"rng/1.*: hosts \[1\] differ from host 0"):
            tstore.jax.save(url, {"rng": [0, leaf]}, 4)


def own_values_of_others(folder: Path) -> None:
    """Another number of processes is told how to go on, and does."""
    url = folder / "own"
    target = {"w": placed(np.zeros(16), mesh(8), "x"), "own": {"state": tstore.PerHost(jnp.ones(3))}}
    with pytest.raises(InvalidArgument, match=r"own/state: saved by 2 hosts; this is host . of 4"):
        tstore.jax.restore(url, 1, target=target)
    kept = tstore.jax.restore(url, 1, target=target, per_host="keep")
    assert kept["own"]["state"] is target["own"]["state"]
    values = tstore.jax.restore(url, 1, target=target, per_host="all")["own"]["state"]
    assert [(value["text"], jax.random.key_data(value["key"]).tolist()) for value in values] == [
        ("", [0, 0]),
        ("a", [0, 1]),
    ]
    for tree in (target, None):
        restored = tstore.jax.restore(url, 1, target=tree, per_host="all", only="own/**")
        with pytest.raises(InvalidArgument, match=r"own/state: a list of the values of 2 hosts.*PerHost\(value"):
            tstore.jax.save(url, restored, 9)
    part = tstore.jax.restore(url, 1, target=target, only="w")
    assert (part["w"] == np.arange(16)).all()
    assert part["own"]["state"] is target["own"]["state"]


def state(on: Mesh) -> Any:
    """Return a state whose arrays are divided over all processes, and parts of it over some of them."""
    rng = np.random.default_rng(0)
    return {
        "w": placed(rng.standard_normal((64, 32), "f4"), on, "x", "y"),
        "rows": placed(rng.standard_normal((64, 32), "f4"), on, "x"),
        "columns": placed(np.arange(64).astype(ml_dtypes.int4).reshape(8, 8), on, None, "y"),
        "large": placed(np.arange(3 << 20, dtype="i4").reshape(3, -1, 4), on),
        "scalar": placed(np.float32(5), on),
        "local": jnp.arange(5),
        "key": jax.random.key(7),
        "keys": jax.random.split(placed_key(on), 8),
        "count": 3,
    }


def placed_key(on: Mesh) -> jax.Array:
    data = placed(np.asarray(jax.random.key_data(jax.random.key(8))), on)
    return jax.random.wrap_key_data(data)


def save(folder: Path) -> None:
    processes = jax.process_count()
    url, tree = folder / f"from-{processes}", state(mesh(4, 2))
    with suppress(AlreadyExists):  # which the other process may do
        tstore.open(url, "x").close()
    with pytest.raises(NotFound):
        tstore.jax.restore(url)
    tstore.jax.save(url, tree, 1)
    with pytest.raises(AlreadyExists):
        tstore.jax.save(url, {**tree, "count": 4}, 1)
    tree["count"] = 4
    assert tstore.jax.save_async(url, tree, 2).wait() > 1
    same(tree, tstore.jax.restore(url, target=tree))
    if jax.process_index() == 0:
        packs = [pack for pack in url.glob("txn/*/pack-*") if pack.stat().st_size > 1 << 20]
        writers = {pack.name.split("-")[1] for pack in packs}  # of pieces of the large replicated array
        assert len(writers) == min(processes, 3), packs
        tstore.jax.save(url, {"alone": jnp.ones(3)}, 3, hosts=1)


def restore(folder: Path) -> None:
    """Restore what another number of processes saved, on another mesh."""
    [url] = (url for url in folder.glob("from-*") if url.name != f"from-{jax.process_count()}")
    tree = {**state(mesh(2, 4)), "count": 4}
    same(tree, tstore.jax.restore(url, 2, target=abstract(tree)))
    assert set(tstore.jax.restore(url)) == {"alone"}
    plan = tstore.jax.explain(url, 2, target=abstract(tree))
    assert plan.bytes_read <= 1.1 * plan.bytes_needed


CHECKS: dict[str, list[Callable[[Path], None]]] = {
    "one": [
        pytrees,
        single_leaves,
        keys_in_another_form,
        structures,
        unusual_targets,
        resharding,
        small_shards,
        training,
        background,
        series,
        invalid,
    ],
    "save": [save, own_values_of_others],
    "series": [save, series, own_values],
    "late": [late],
    "restore": [restore],
}


def run(check: str, folder: Path, process: int, processes: int, port: int) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    assert jax.device_count() == DEVICES
    for function in CHECKS[check]:
        function(folder)
    if processes > 1:
        jax.distributed.shutdown()  # waits for the others, which the end of the first process would kill


def main() -> int:
    folder = Path(sys.argv[1])
    for argument in sys.argv[2:]:
        check, _, count = argument.partition(":")
        port = ports.unused()
        children = []
        for process in range(int(count)):
            child = os.fork()
            if not child:
                code = 1
                try:
                    run(check, folder, process, int(count), port)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

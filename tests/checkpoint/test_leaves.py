"""Leaves that `save` accepts; all others are refused with their paths, before anything is written."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tstore import Shards
from tstore.errors import InvalidArgument, Misuse
from tstore.sharding import Mesh, P


def cycle() -> Any:
    tree: dict[str, Any] = {}
    tree["b"] = [tree]
    return tree


def nested(levels: int) -> Any:
    tree: Any = np.ones(2)
    for _ in range(levels):
        tree = {"a": tree}
    return tree


class Described:
    """An object with a shape and a dtype, but without values."""

    shape = (3,)
    dtype = "float32"


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "objects": (lambda: np.array([1, None]), "dtype object"),
    "text of any length": (lambda: np.array(["x"], "T"), "use a fixed length"),
    "records with gaps": (lambda: np.zeros(3, np.dtype([("x", "u1"), ("y", "f4")], align=True)), "repack_fields"),
    "records of arrays": (lambda: np.zeros(3, [("x", "f4", (2,))]), "dtype"),
    "long doubles": (lambda: np.zeros(2, np.longdouble), "use float64"),
    "one bit": (lambda: np.zeros(2, ml_dtypes.int1), "int1"),
    "a mask": (lambda: np.ma.masked_array([1, 2], [0, 1]), "mask"),
    "a set": (lambda: {1, 2}, "type set can't"),
    "a generator": (lambda: (i for i in range(3)), "type generator can't"),
    "a description": (Described, "Described; convert"),
    "a class": (lambda: np.float32, "no dtype for a builtins.type"),
    "a key of another type": (lambda: {np.int64(3): np.ones(1)}, "a dict key of type int64"),
    "a surrogate": (lambda: "\ud800", "surrogates"),
    "a surrogate in a key": (lambda: {"\ud800": np.ones(1)}, "surrogates"),
    "a huge number": (lambda: 10**5000, "4300 digits"),
    "a cycle": (cycle, "contains itself"),
    "too many levels": (lambda: nested(5000), "more than 200 levels deep"),
    "a path that is too long": (
        lambda: {"x" * 3000: {"y" * 3000: np.ones(1)}},
        "characters, more than 4,096",
    ),
    "no values in a shard": (lambda: Shards((4,), "f4", [((slice(0, 4),), None)]), "has no values"),
    "a gap at the end": (
        lambda: Shards((4,), "f4", [((slice(0, 2),), np.ones(2, "f4"))]),
        "covers [2:4] of shape [4]",
    ),
    "a gap in the middle": (
        lambda: Shards((6, 2), "f4", [(((a, a + 2), (0, 2)), np.ones((2, 2), "f4")) for a in (0, 4)]),
        "covers [2:4, 0:2] of shape [6, 2]",
    ),
    "no shards at all": (lambda: Shards((4,), "f4"), "covers [0:4] of shape [4]"),
    "shards that overlap": (
        lambda: Shards(
            (6,), "f4", [((slice(0, 4),), np.ones(4, "f4")), ((slice(2, 6),), np.zeros(4, "f4"))], shard_shape=(2,)
        ),
        "the shards at [0:4] and [2:6] overlap",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_leaf_that_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path: Path, name: str
) -> None:
    make, reason = REFUSED[name]
    tree = {"good": np.ones(3), "params": [np.ones(3), make()]}
    with pytest.raises(InvalidArgument, match=re.escape(reason)) as caught:
        await tstore.save(tmp_path / "s", tree, 0)
    assert str(caught.value).startswith("params/1")
    assert len(str(caught.value)) < 500
    assert not (tmp_path / "s").exists()


async def test_trees_of_the_maximum_depth_come_back() -> None:
    url = f"memory://{uuid.uuid4()}"
    await tstore.save(url, nested(200), 0)
    restored = await tstore.restore(url, target=nested(200))
    for _ in range(200):
        restored = restored["a"]
    assert restored.tolist() == [1, 1]


async def test_shards_of_one_host_of_a_group_may_not_overlap_either() -> None:
    parts = [((slice(0, 4),), np.ones(4, "f4")), ((slice(2, 4),), np.ones(2, "f4"))]
    with pytest.raises(InvalidArgument, match="overlap"):
        await tstore.save(
            f"memory://{uuid.uuid4()}", {"w": Shards((8,), "f4", parts, shard_shape=(2,))}, 0, hosts=2, attempt="a"
        )


async def test_shards_that_cover_an_array_of_any_shape_come_back() -> None:
    tree = {
        "uneven": Shards((5, 3), "f4", [((slice(0, 4), slice(0, 3)), np.ones((4, 3), "f4")),
                                        ((slice(4, 5), slice(0, 3)), np.zeros((1, 3), "f4"))]),
        "no axes": Shards((), "f4", [((), np.ones((), "f4"))]),
        "no values": Shards((0, 3), "f4"),
    }  # fmt: skip
    url = f"memory://{uuid.uuid4()}"
    await tstore.save(url, tree, 0)
    restored = await tstore.restore(url)
    assert restored["uneven"].sum() == 12
    assert restored["no axes"] == 1
    assert restored["no values"].shape == (0, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Shards((2,), "f4", [(3, np.ones(1, "f4"))]),
        lambda: Shards("ab", "f4"),  # type: ignore[arg-type]
        lambda: Shards((2,), "f4", shard_shape=("x",)),  # type: ignore[arg-type]
        lambda: Shards((2,), "f4", [((slice("a"),), np.ones(1, "f4"))]),
    ],
)
def test_shards_with_wrong_arguments_are_refused(make: Callable[[], Shards]) -> None:
    with pytest.raises(InvalidArgument):
        make()


@pytest.mark.parametrize("place", [{"w": np.ones(2)}, 7, b"/tmp/s", None])
async def test_a_url_of_a_wrong_type_is_named(place: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"{type(place).__name__} is not a store; .* save\(url, tree, step\)"
    ):
        await tstore.save(place, "memory://x", 3)
    with pytest.raises(InvalidArgument, match="is not a store"):
        await tstore.restore(place)


def test_numpy_reads_a_blocking_array_and_not_one_that_must_be_awaited(tmp_path: Path) -> None:
    with blocking.open(tmp_path / "s").transaction() as tx:
        tx.create_array("w", (4,), "f4", (2,)).write(np.arange(4))
        w = tx.array("w")
        assert np.asarray(w[1:]).tolist() == [1, 2, 3]
        assert np.array(w, dtype="i2").dtype == np.int16
        assert np.add(w, w).tolist() == [0, 2, 4, 6]
        with pytest.raises(ValueError, match="copy=False"):
            np.array(w, copy=False)
        with pytest.raises(Misuse, match=r"w: .* pass the values that array\.read\(\) returns"):
            np.asarray(w._wrapped)
    with pytest.raises(InvalidArgument, match=r"^a/w: .* a tstore.core.array.Array .* array.read\(\)"):
        blocking.save(tmp_path / "t", {"a": {"w": w._wrapped}}, 0)
    assert not (tmp_path / "t").exists()


TORCH: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bfloat16": (lambda torch: torch.ones(3, dtype=torch.bfloat16), "BFloat16"),
    "float8": (lambda torch: torch.ones(3).to(torch.float8_e4m3fn), "Float8_e4m3fn"),
    "conjugated": (lambda torch: torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
    "sparse": (lambda torch: torch.eye(3).to_sparse(), "to_dense"),
    "meta": (lambda torch: torch.ones(3, device="meta"), "meta"),
}


@pytest.mark.parametrize("name", TORCH)
def test_tensors_that_numpy_cannot_take(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    make, reason = TORCH[name]
    with pytest.raises(InvalidArgument, match=rf"^m/w: .*a torch.Tensor .*{reason}.*tstore.torch.save") as caught:
        blocking.save(tmp_path / "s", {"m": {"w": make(torch)}}, 0)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "s").exists()
    with pytest.raises(InvalidArgument, match="the part at"):
        Shards((3,), "f4", [((slice(0, 3),), make(torch))])


def test_objects_of_frameworks_that_are_no_arrays(tmp_path: Path) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")

    class Model(torch.nn.Module):  # type: ignore[name-defined,misc]
        """A module of a program."""

    class Weight(torch.Tensor):  # type: ignore[name-defined,misc]
        """A tensor of a program."""

    weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    for leaf, advice in (
        (Model(), r"pass its state_dict\(\), or save the tree with tstore\.torch\.save"),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), r"pass its state_dict\(\), .* tstore\.torch\.save"),
        (torch.nn.Parameter(weight), r"tstore\.torch\.save"),
        (weight.as_subclass(Weight), r"tstore\.torch\.save"),
        (jax.random.key(0), r"tstore\.jax\.save"),
        (torch.device("cpu"), "expected arrays"),
    ):
        with pytest.raises(InvalidArgument, match=rf"^a/0: .*{advice}"):
            blocking.save(tmp_path / "s", {"a": [leaf]}, 0)
    assert not (tmp_path / "s").exists()


def test_tensors_come_back_as_arrays_and_as_a_target_are_refused() -> None:
    torch = pytest.importorskip("torch")
    url = f"memory://{uuid.uuid4()}"
    model = torch.nn.Linear(2, 3)
    tree = {"parameters": dict(model.named_parameters()), "state": model.state_dict(), "counts": torch.arange(3)}
    blocking.save(url, tree, 0)
    restored = blocking.restore(url)
    assert restored["counts"].tolist() == [0, 1, 2]
    assert restored["parameters"]["weight"].tolist() == model.weight.tolist()
    assert list(restored["state"]) == ["weight", "bias"]
    with pytest.raises(
        InvalidArgument, match=r"^parameters/weight: the target is a torch.* of dtype .*tstore.torch.restore"
    ):
        blocking.restore(url, target=tree)


def test_a_distributed_tensor_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(InvalidArgument, match=r"^w: .* a torch.*DTensor.*tstore\.torch\.save"):
            blocking.save(tmp_path / "s", {"w": tensor}, 0)
    finally:
        torch.distributed.destroy_process_group()


def test_jax_arrays_are_saved_and_unsupported_ones_named(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    url = f"memory://{uuid.uuid4()}"
    blocking.save(url, {"w": jax.numpy.ones(3, "bfloat16"), "key": jax.random.PRNGKey(0)}, 0)
    assert blocking.restore(url)["w"].dtype == ml_dtypes.bfloat16
    described = {"w": jax.ShapeDtypeStruct((3,), "bfloat16"), "key": jax.ShapeDtypeStruct((2,), "uint32")}
    assert blocking.restore(url, target=described)["w"].tolist() == [1, 1, 1]
    with pytest.raises(InvalidArgument, match=r"^key: the target is a jax.* of dtype key<fry>"):
        blocking.restore(url, target={**described, "key": jax.random.key(0)})
    deleted = jax.numpy.ones(3)
    deleted.delete()
    for leaf, reason in (
        (jax.random.key(0), "jax.save"),
        (described["w"], "no dtype"),
        (deleted, "deleted"),
    ):
        with pytest.raises(InvalidArgument, match=f"^a/0: (.*a jax.*{reason}|.*{reason}.*a jax)"):
            blocking.save(tmp_path / "s", {"a": [leaf]}, 0)
    assert not (tmp_path / "s").exists()


def test_shards_of_a_list_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"^values is a builtins\.list; expected an array"):
        Shards.of([[1.0, 2.0]], Mesh({"x": 2}), P("x"), 0)

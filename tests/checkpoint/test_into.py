"""Restores into the caller's memory: all is checked before any is changed, and a failure says what is torn."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tstore
import tstore.sync
from tstore.errors import Corrupt, InvalidArgument, NotFound, SnapshotExpired, StructureMismatch
from tstore.lab.conformance.faults import open_faulty

rng = np.random.default_rng(0)

TREE = {
    "w": rng.random((300, 40)).astype("f4"),
    "layers": [{"b": rng.random(7), "n": 2}, {"b": rng.random(7), "n": 3}],
    "half": rng.random((5, 6)).astype(ml_dtypes.bfloat16),
    "scale": np.float32(0.5),
}


@pytest.fixture
async def saved(url: str) -> str:
    await tstore.save(url, TREE, 1)
    return url


def memory_like(tree: Any) -> Any:
    return {
        "w": np.zeros((600, 80), "f4")[::2, ::-2],
        "layers": [{"b": np.zeros((7, 2))[:, i], "n": 0} for i in range(2)],
        "half": np.zeros((6, 5), ml_dtypes.bfloat16).T,
        "scale": np.float32(0),
    }


async def test_values_land_in_arrays_of_any_strides(saved: str) -> None:
    into = memory_like(TREE)
    restored = await tstore.restore(saved, into=into)
    assert restored["w"] is into["w"]
    np.testing.assert_array_equal(into["w"], TREE["w"])
    np.testing.assert_array_equal(into["half"], TREE["half"])
    assert (into["w"].base[1::2] == 0).all()
    assert (into["w"].base[:, ::2] == 0).all()
    assert [layer["n"] for layer in restored["layers"]] == [2, 3]
    assert [layer["b"].tolist() for layer in into["layers"]] == [layer["b"].tolist() for layer in TREE["layers"]]
    assert restored["scale"] == np.float32(0.5)


async def test_columns_of_one_buffer_are_filled_together(url: str) -> None:
    parts = {name: rng.random((64, 9)) for name in "qkv"}
    await tstore.save(url, parts, 1)
    fused = np.zeros((64, 27))
    await tstore.restore(url, into={name: fused[:, 9 * i : 9 * i + 9] for i, name in enumerate("qkv")})
    np.testing.assert_array_equal(fused, np.concatenate([parts[name] for name in "qkv"], 1))


async def test_shared_and_mapped_memory_is_filled(saved: str, tmp_path: Path) -> None:
    block = shared_memory.SharedMemory(create=True, size=TREE["w"].nbytes)
    try:
        shared = np.ndarray(TREE["w"].shape, "f4", block.buf)
        await tstore.restore(saved, into={"w": shared}, only="w")
        np.testing.assert_array_equal(shared, TREE["w"])
        del shared
    finally:
        block.close()
        block.unlink()
    file = np.memmap(tmp_path / "w", "f4", "w+", shape=TREE["w"].shape)
    assert (await tstore.restore(saved, into={"w": file}, only="w"))["w"] is file
    file.flush()
    np.testing.assert_array_equal(np.fromfile(tmp_path / "w", "f4").reshape(300, 40), TREE["w"])


async def test_parts_of_shards_are_filled_and_floats_cast(saved: str) -> None:
    top, bottom = np.zeros((100, 40), "f8"), np.zeros((200, 40), "f8")
    regions = [((slice(0, 100), slice(0, 40)), top), ((slice(100, 300), slice(0, 40)), bottom)]
    into = {"w": tstore.Shards((300, 40), "f8", regions)}
    await tstore.restore(saved, into=into, only="w", dtype="target")
    np.testing.assert_array_equal(np.concatenate([top, bottom]), TREE["w"])


async def test_leaves_outside_of_a_selection_may_be_anything(saved: str) -> None:
    into = memory_like(TREE)
    into["w"].flags.writeable = False
    restored = await tstore.restore(saved, into=into, only="layers/**")
    assert restored["w"] is into["w"]
    assert not into["w"].any()
    np.testing.assert_array_equal(restored["layers"][1]["b"], TREE["layers"][1]["b"])


def read_only(tree: Any) -> None:
    tree["half"].flags.writeable = False


def swapped(tree: Any) -> None:
    tree["half"] = np.zeros((5, 6), ">f4")


def overlapping(tree: Any) -> None:
    tree["layers"][0]["b"] = tree["layers"][1]["b"][::-1]


def overlapping_itself(tree: Any) -> None:
    tree["layers"][0]["b"] = np.lib.stride_tricks.as_strided(np.zeros(4), (7,), (4,))


def not_an_array(tree: Any) -> None:
    tree["half"] = type("Tensor", (), {"shape": (5, 6), "dtype": "f4", "__module__": "torch"})()


def unfilled(tree: Any) -> None:
    tree["w"] = tstore.Shards((300, 40), "f4", [((slice(0, 300), slice(0, 40)), None)])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (read_only, "^half: the array is read-only"),
        (swapped, "^half: >f4 is not in the byte order"),
        (overlapping, "^layers/[01]/b: shares memory with layers/[01]/b"),
        (overlapping_itself, "^layers/0/b: elements of the target share memory"),
        (not_an_array, r"^half: into needs NumPy arrays.*tstore\.torch\.restore"),
        (unfilled, "^w: a part of the Shards has no values"),
        (lambda tree: tree.update(half=np.zeros((6, 5), ml_dtypes.bfloat16)), r"half: stored bfloat16\[5, 6\]"),
        (lambda tree: tree.update(half=np.zeros((5, 6), "f4")), "half: stored .* target float32"),
    ],
)
async def test_nothing_is_changed_unless_everything_can_be(
    saved: str, spoil: Callable[[Any], None], message: str
) -> None:
    into = memory_like(TREE)
    first, other = into["w"], into["layers"][1]["b"]
    spoil(into)
    with pytest.raises(InvalidArgument, match=message) as caught:
        await tstore.restore(saved, into=into)
    assert not first.any()
    assert not other.any()
    assert isinstance(caught.value, StructureMismatch) == ("stored" in message)


async def test_a_target_or_packed_codes_exclude_memory(saved: str) -> None:
    for options in ({"target": memory_like(TREE)}, {"packed": True}):
        with pytest.raises(InvalidArgument, match="takes the place of target"):
            await tstore.restore(saved, into=memory_like(TREE), **options)


def flip(folder: Path, values: bytes) -> None:
    """Change the first byte of these values in the pack that has them."""
    for pack in folder.glob("txn/*/pack-*"):
        data = bytearray(pack.read_bytes())
        if (at := data.find(values)) >= 0:
            data[at] ^= 1
            pack.write_bytes(data)
            return
    raise AssertionError


async def test_a_failed_read_says_which_arrays_are_no_longer_whole(tmp_path: Path) -> None:
    """Each array is 3 MiB, so that the one that is damaged has pieces before it and behind it."""
    tree = {f"a{i}": rng.random((3, 1 << 17)) for i in range(4)}
    await tstore.save(tmp_path, tree, 1)
    flip(tmp_path, tree["a2"][1].tobytes())
    into = {path: np.zeros_like(values) for path, values in tree.items()}
    with pytest.raises(Corrupt, match="a2") as caught:
        await tstore.restore(tmp_path, into=into)
    [note] = caught.value.__notes__
    torn = [path for path, values in into.items() if values.any() and not np.array_equal(values, tree[path])]
    listed = [line.strip() for line in note.splitlines()[1:]]
    assert "a2" in listed
    assert set(torn) <= set(listed)
    for path in tree.keys() - listed:
        assert not into[path].any() or np.array_equal(into[path], tree[path])


async def test_new_arrays_need_no_such_note(tmp_path: Path) -> None:
    tree = {"a": rng.random((3, 1 << 17))}
    await tstore.save(tmp_path, tree, 1)
    flip(tmp_path, tree["a"][1].tobytes())
    with pytest.raises(Corrupt) as caught:
        await tstore.restore(tmp_path)
    assert not hasattr(caught.value, "__notes__")


async def test_many_views_are_read_into_memory(saved: str, tmp_path: Path) -> None:
    snapshot = await (await tstore.open(saved)).snapshot()
    w, b = await snapshot.array("w"), await snapshot.array("layers/0/b")
    outs = [np.zeros((10, 40), "f8"), np.zeros(7)]
    values = await snapshot.read_many([w[10:20], b], out=outs)
    assert values[0] is outs[0]
    assert values[1] is outs[1]
    np.testing.assert_array_equal(outs[0], TREE["w"][10:20])
    shared = np.zeros((10, 40), "f4")
    for wrong, message in (
        ([np.zeros((10, 40), "f4")], "out has 1 arrays for 2 views"),
        ([np.zeros((9, 40), "f4"), np.zeros(7)], "^w: out must be a writable array"),
        ([shared, shared.reshape(-1)[:14].view("f8")], "shares memory with"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            await snapshot.read_many([w[10:20], b], out=wrong)
    assert not shared.any()


def test_blocking_reads_take_memory_too(tmp_path: Path) -> None:
    tstore.sync.save(tmp_path, {"a": np.arange(4.0)}, 1)
    snapshot = tstore.sync.open(tmp_path, "r").snapshot()
    out = np.zeros(4)
    snapshot.read_many([snapshot.array("a")], out=[out])
    assert out.tolist() == [0, 1, 2, 3]
    into = {"a": np.zeros(4)}
    assert tstore.sync.restore(tmp_path, into=into)["a"] is into["a"]


async def test_a_damaged_array_of_many_views_is_named(tmp_path: Path) -> None:
    values = rng.random((3, 1 << 17))
    await tstore.save(tmp_path, {"a": values}, 1)
    flip(tmp_path, values[1].tobytes())
    snapshot = await (await tstore.open(tmp_path)).snapshot()
    with pytest.raises(Corrupt) as caught:
        await snapshot.read_many([await snapshot.array("a")], out=[np.zeros_like(values)])
    assert caught.value.__notes__[0].endswith("\n  a")


@pytest.mark.parametrize("missing", ["error", "keep"])
@pytest.mark.parametrize("package", ["numpy", "torch"])
async def test_no_other_step_is_restored_over_values_to_keep(tmp_path: Path, package: str, missing: Any) -> None:
    await tstore.save(tmp_path, {"w": np.ones(3000)}, 1)
    store, faults = await open_faulty(tmp_path)

    def collected(message: str) -> NotFound:
        tstore.sync.save(tmp_path, {"w": np.full(3000, 2.0)}, 2)
        with tstore.sync.open(tmp_path) as other:
            other.collect(tstore.Keep(last=1))
        return NotFound(message)

    faults.fail("read_into", "txn/*", error=collected)
    restoring = tstore.restore(store, into={"w": np.zeros(3000)}, missing=missing)
    if package == "torch":
        restoring.close()
        target = {"w": pytest.importorskip("torch").from_numpy(np.zeros(3000))}
        restoring = tstore.torch.restore(store, target=target, missing=missing)
    if missing == "keep":
        with pytest.raises(SnapshotExpired):
            await restoring
    else:
        assert (await restoring)["w"][0] == 2

"""Import and export of safetensors files: names, order, metadata and every bit round-trip."""

from __future__ import annotations

import dataclasses
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tstore
from tests.support.thresholds import Thresholds
from tests.support.weights import example, raw, real_weights, write_file
from tstore.convert.exporting import export_safetensors
from tstore.convert.importing import import_checkpoint
from tstore.convert.safetensors import Writer, open_tensors
from tstore.convert.safetensors_header import DTYPES, sort_tensors
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotAStore, NotFound

# ---- round trips


async def test_a_real_file_round_trips_byte_for_byte(tmp_path: Path) -> None:
    source, out = real_weights(), tmp_path / "out.safetensors"
    assert (await import_checkpoint(source, tmp_path / "store", 0)).version == 1
    exported = await export_safetensors(tmp_path / "store", out)
    assert out.read_bytes() == source.read_bytes()
    theirs, original = safetensors.numpy.load_file(out), safetensors.numpy.load_file(source)
    assert exported == (1, len(original), sum(a.nbytes for a in original.values()), 1, [], [], [], None)
    assert {n: (a.dtype, a.shape, raw(a)) for n, a in theirs.items()} == {
        n: (a.dtype, a.shape, raw(a)) for n, a in original.items()
    }
    with safetensors.safe_open(out, "np") as file:
        assert file.metadata() == {"format": "pt"}


async def test_a_real_file_is_restored_as_a_flat_dict(tmp_path: Path) -> None:
    tensors, _ = open_tensors(real_weights())
    await import_checkpoint(real_weights(), tmp_path / "store", 7)
    assert await tstore.steps(tmp_path / "store") == [7]
    tree = await tstore.restore(tmp_path / "store")
    assert list(tree) == list(tensors)
    assert all(raw(tree[name]) == raw(tensors[name]) for name in tensors)


async def test_a_quantized_file_is_exported_decoded(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    async with await tstore.open(tmp_path / "store") as store:
        await import_checkpoint(real_weights(), store, 0, codecs="e4m3")
        exported = await export_safetensors(store, out)
    tensors, original = safetensors.numpy.load_file(out), safetensors.numpy.load_file(real_weights())
    assert exported.tensors == len(tensors) == len(original)
    for name, array in original.items():
        assert tensors[name].dtype == array.dtype
        if array.dtype == np.int64:
            assert raw(tensors[name]) == raw(array)
        elif array.size > 1000:
            noise = np.linalg.norm(tensors[name] - array) / np.linalg.norm(array)
            assert 0 < noise < 0.05
    async with await tstore.open(tmp_path / "store", "r") as store:
        assert (await store.snapshot()).attributes()["safetensors"] == {"format": "pt"}


async def test_every_dtype_and_odd_names(tmp_path: Path) -> None:
    names = ["", ".", "..", "a/b", "a.b", "a%2fb", "zarr.json", "\u00fc \U0001f600\n\x7f", "..a", "a/", "/a", "%"]
    arrays = {
        f"{names[i % len(names)]}{i if i >= len(names) else ''}": example(dtype, shape, i)
        for i, (dtype, shape) in enumerate(
            (d, s)
            for d in DTYPES.values()
            for s in [(), (0,), (3,), (2, 0, 5), (3, 5)]
            if not d.name.startswith(("float4", "float6"))
        )
    }
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    specs = sort_tensors({n: (a.dtype, a.shape) for n, a in arrays.items()})
    with Writer(source, specs, {"b": "\u2028", "a": ""}) as file:
        for name in specs:
            file.write(name, arrays[name])
    assert set(names) < set(arrays)
    await import_checkpoint(source, tmp_path / "store", 0)
    await export_safetensors(tmp_path / "store", out)
    assert out.read_bytes() == source.read_bytes()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.text(max_size=8), st.integers(0, 40), max_size=6),
    st.dictionaries(st.text(max_size=4), st.text(max_size=8), min_size=1, max_size=3),
)
def test_any_names_and_metadata(tmp_path: Path, sizes: dict[str, int], metadata: dict[str, str]) -> None:
    import tstore.sync as blocking
    from tstore.sync.facade import blocking as make_blocking  # for functions that tstore.sync does not have

    sizes.pop("__metadata__", None)
    folder = tmp_path / os.urandom(8).hex()
    folder.mkdir()
    arrays = {name: np.arange(n, dtype=np.float32) for name, n in sizes.items()}
    try:
        safetensors.numpy.save_file(arrays, folder / "in", metadata)
    except Exception:
        return  # a lone surrogate
    make_blocking(import_checkpoint)(folder / "in", folder / "store", 0)
    make_blocking(export_safetensors)(folder / "store", folder / "out")
    assert (folder / "out").read_bytes() == (folder / "in").read_bytes()
    assert {n: a.tolist() for n, a in blocking.restore(folder / "store").items()} == {
        n: a.tolist() for n, a in arrays.items()
    }


async def test_a_file_without_tensors(tmp_path: Path) -> None:
    safetensors.numpy.save_file({}, tmp_path / "in")
    await import_checkpoint(tmp_path / "in", tmp_path / "store", 0)
    assert await export_safetensors(tmp_path / "store", tmp_path / "out") == (1, 0, 0, 1, [], [], [], None)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()


async def test_the_next_step_costs_only_what_changed(tmp_path: Path) -> None:
    frozen, moved = example(np.dtype("f4"), (100, 100)), example(np.dtype("i4"), (100, 100))
    async with await tstore.open(tmp_path / "store") as store:
        for step in range(2):
            safetensors.numpy.save_file({"frozen": frozen, "moved": moved + step}, tmp_path / str(step))
            await import_checkpoint(tmp_path / str(step), store, step)
        added = [c.bytes_added async for c in store.history()]
    assert added == [moved.nbytes, frozen.nbytes + moved.nbytes]


# ---- the exported version


async def test_the_newest_step_a_step_a_version_or_a_tag_is_exported(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "store") as store:
        for step in (5, 3):
            await tstore.save(store, {"x": np.full(2000, step, np.float32)}, step)
        await tstore.quantize(store, "e4m3", at="step/3", tag="small")

        async def first(**which: Any) -> float:
            await export_safetensors(store, tmp_path / "out", **which)
            value = float(safetensors.numpy.load_file(tmp_path / "out")["x"][0])
            (tmp_path / "out").unlink()
            return value

        assert await first() == 5
        assert await first(step=3) == 3
        assert await first(at=1) == 5
        assert await first(at="small") == 3
        with pytest.raises(NotFound, match="no step 4"):
            await first(step=4)
        with pytest.raises(NotFound, match="no tag 'big'"):
            await first(at="big")
        with pytest.raises(InvalidArgument, match="pass one of them"):
            await first(step=3, at=1)
    assert sorted(os.listdir(tmp_path)) == ["store"]


# ---- checkpoints that were not imported


@dataclasses.dataclass
class Moments:
    mean: Any
    count: int


async def test_other_trees_get_joined_names(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32)
    tree = {
        "params": {"layers": {0: {"w": x}, 1: {"w": x + 1}}, "none": None},
        "opt": [Moments(x + 2, 9), (np.int64(4), {})],
        "half": x.astype(np.float16),
    }
    await tstore.save(tmp_path / "store", tree, 1)
    exported = await export_safetensors(tmp_path / "store", tmp_path / "out")
    tensors = safetensors.numpy.load_file(tmp_path / "out")
    assert {name: a.tolist() for name, a in tensors.items()} == {
        "params.layers.0.w": x.tolist(),
        "params.layers.1.w": (x + 1).tolist(),
        "opt.0.mean": (x + 2).tolist(),
        "opt.1.0": 4,
        "half": x.tolist(),
    }
    assert exported.left_out == ["params.none", "opt.0.count", "opt.1.1"]
    assert (tmp_path / "out").read_bytes() == safetensors.numpy.save(tensors)


async def test_a_lone_array_and_arrays_without_a_structure(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "a", np.arange(3), 0)
    await export_safetensors(tmp_path / "a", tmp_path / "a.out")
    assert list(safetensors.numpy.load_file(tmp_path / "a.out")) == ["value"]
    async with await tstore.open(tmp_path / "b") as store:
        async with store.transaction() as tx:
            await (await tx.create_array("group/x", shape=(3,), dtype="int32")).write([1, 2, 3])
        await export_safetensors(store, tmp_path / "b.out")
    assert safetensors.numpy.load_file(tmp_path / "b.out")["group.x"].tolist() == [1, 2, 3]


async def test_arrays_added_or_removed_since_the_save_are_exported_correctly(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "store", {"a": {"w": np.ones(3)}, "n": 5}, 1)
    store = await tstore.open(tmp_path / "store")
    async with store.transaction() as tx:
        await (await tx.create_array("a/new", (2,), "int8")).write([1, 2])
    async with store.transaction() as tx:
        await tx.delete("a/w")
    for version, names in ((1, ["a.w"]), (2, ["a.new", "a.w"]), (3, ["a.new"])):
        out = tmp_path / f"{version}.safetensors"
        await export_safetensors(store, out, at=version)
        assert sorted(safetensors.numpy.load_file(out)) == names


@pytest.mark.parametrize("stored", [5, [1], {"a": 1}, None])
async def test_invalid_metadata_attributes_do_not_prevent_an_export(tmp_path: Path, stored: Any) -> None:
    await tstore.save(tmp_path / "store", {"w": np.ones(3)}, 1, attributes={"safetensors": stored})
    await export_safetensors(tmp_path / "store", tmp_path / "out")
    assert list(safetensors.numpy.load_file(tmp_path / "out")) == ["w"]


async def test_colliding_names_are_named(tmp_path: Path) -> None:
    x = np.zeros(3)
    await tstore.save(tmp_path / "store", {"a": {"b": x, "c": x}, "a.b": x, "ok": {1: x, "1": x}}, 0)
    with pytest.raises(InvalidArgument) as error:
        await export_safetensors(tmp_path / "store", tmp_path / "out")
    assert "a/b and a.b would both be 'a.b'" in str(error.value)
    assert "ok/1 and ok/1% would both be 'ok.1'" in str(error.value)
    assert "a.c" not in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["store"]


async def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "store", {"x": np.zeros(3, np.complex128)}, 0)
    with pytest.raises(InvalidArgument, match="'x' is complex128"):
        await export_safetensors(tmp_path / "store", tmp_path / "out")


# ---- refusals


async def test_nothing_is_overwritten(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"x": np.zeros(3)}, tmp_path / "in")
    await import_checkpoint(tmp_path / "in", tmp_path / "store", 0)
    before = (tmp_path / "in").read_bytes()
    with pytest.raises(AlreadyExists, match="in already exists"):
        await export_safetensors(tmp_path / "store", tmp_path / "in")
    assert (tmp_path / "in").read_bytes() == before
    with pytest.raises(AlreadyExists, match="step 0 is already saved"):
        await import_checkpoint(tmp_path / "in", tmp_path / "store", 0)


async def test_bad_input_makes_no_store_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="missing"):
        await import_checkpoint(tmp_path / "missing", tmp_path / "store", 0)
    lying = write_file(tmp_path / "lying", {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234")
    with pytest.raises(Corrupt, match="'x'"):
        await import_checkpoint(lying, tmp_path / "store", 0)
    with pytest.raises(NotAStore):
        await export_safetensors(tmp_path / "store", tmp_path / "out")
    assert os.listdir(tmp_path) == ["lying"]


async def test_a_damaged_chunk_leaves_no_file(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "store", {"good": np.zeros(5000), "x": np.ones(5000)}, 0)
    pack = next((tmp_path / "store").glob("txn/*/pack-*"))
    data = bytearray(pack.read_bytes())
    data[-9] ^= 1
    pack.write_bytes(data)
    with pytest.raises(Corrupt, match=r"x, chunk"):
        await export_safetensors(tmp_path / "store", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["store"]


# ---- flat memory


@pytest.mark.parametrize("chunks", [(64, 128), (7, 1000), (1000, 10), (1, 1000)])
async def test_slabs_cover_the_array(tmp_path: Path, thresholds: Thresholds, chunks: tuple[int, int]) -> None:
    thresholds(_SLAB=50_000)
    x = np.random.default_rng(0).random((1000, 1000))
    async with await tstore.open(tmp_path / "store") as store:
        async with store.transaction() as tx:
            await (await tx.create_array("x", shape=x.shape, dtype="f8", chunks=chunks)).write(x)
        told: list[tuple[int, int]] = []
        await export_safetensors(store, tmp_path / "out", progress=lambda *at: told.append(at))
    assert raw(safetensors.numpy.load_file(tmp_path / "out")["x"]) == raw(x)
    assert len(told) >= 160
    assert told == sorted(told)
    assert told[-1] == (x.nbytes, x.nbytes)


async def test_export_holds_one_slab_at_a_time(tmp_path: Path, thresholds: Thresholds) -> None:
    thresholds(_SLAB=1 << 20)
    async with await tstore.open(tmp_path / "store") as store:
        await tstore.save(store, {str(i): np.full((4096, 1024), i, np.float32) for i in range(4)}, 0)
        tracemalloc.start()
        try:
            await export_safetensors(store, tmp_path / "out")
            assert tracemalloc.get_traced_memory()[1] < 24 << 20
        finally:
            tracemalloc.stop()


async def test_the_loop_goes_on_during_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    write = Writer.write

    def observed(self: Any, name: str, part: Any) -> None:
        threads.add(threading.current_thread())
        write(self, name, part)

    monkeypatch.setattr(Writer, "write", observed)
    await tstore.save(tmp_path / "store", {"x": np.zeros(3)}, 0)
    await export_safetensors(tmp_path / "store", tmp_path / "out")
    assert threads
    assert threading.main_thread() not in threads


async def test_a_row_beyond_the_memory_is_refused(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "s", "a") as store, store.transaction() as tx:
        await tx.create_array("w", (2, 1 << 55), "f8", chunks=(1, 1 << 20), fill_value=0)
    with pytest.raises(InvalidArgument, match="w does not fit in memory"):
        await export_safetensors(tmp_path / "s", tmp_path / "x.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]

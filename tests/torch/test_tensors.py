"""Tensors of all dtypes and forms, saved and restored bit for bit; what has no values is refused with its path."""

from __future__ import annotations

import sys
import uuid
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tstore.sync as tstore
from tests.support import processes
from tests.support.lazy import lazy
from tstore.errors import InvalidArgument, StructureMismatch

torch = lazy("torch")
tensors = lazy("tstore.torch.tensors")

WHOLE = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "float32", "float64", "bfloat16", "complex64", "complex128"]
SHORT = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


def url() -> str:
    return f"memory://{uuid.uuid4()}"


def patterns(dtype: Any, shape: tuple[int, ...] = (16, 32)) -> Any:
    """Return a tensor of random bits."""
    size = int(np.prod(shape)) * dtype.itemsize
    if dtype == torch.bool:
        return torch.from_numpy(np.random.default_rng(0).integers(0, 2, shape).astype(bool))
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, np.uint8)).view(dtype).reshape(shape)


def bits(tensor: Any) -> bytes:
    return bytes(
        tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


@pytest.mark.parametrize("name", [*WHOLE, *FLOATS, *SHORT])
def test_every_dtype_keeps_every_bit_without_a_copy(name: str) -> None:
    whole = patterns(getattr(torch, name))
    for tensor in (whole, whole.T, whole[3:7, ::5], whole[2, 3], whole[:0]):
        values = tensors.values_of("w", tensor)
        assert values.shape == tuple(tensor.shape)
        back = tensors.tensor_from_values("w", values)
        assert back.dtype == tensor.dtype
        assert bits(back) == bits(tensor)
        assert back.data_ptr() == tensor.data_ptr() or not tensor.numel()


def forms() -> dict[str, Any]:
    whole = patterns(torch.bfloat16)
    return {
        "transposed": whole.T,
        "every second": whole[::2],
        "one": whole[0, 0],
        "empty": whole[:, :0],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "with a graph": torch.randn(3, requires_grad=True) * 2,
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
        **{name: patterns(getattr(torch, name)) for name in [*WHOLE, *FLOATS, *SHORT]},
    }


def test_forms_of_tensors_round_trip() -> None:
    store, tree = url(), forms()
    tstore.torch.save(store, tree, 0)
    restored = tstore.torch.restore(store)
    assert list(restored) == list(tree)
    for name, tensor in tree.items():
        assert restored[name].dtype == tensor.dtype
        assert restored[name].shape == tensor.shape
        assert bits(restored[name]) == bits(tensor), name


def test_a_target_is_filled_in_place() -> None:
    store, tree = url(), forms()
    del tree["expanded"]
    tree = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tree.items()}
    tstore.torch.save(store, tree, 0)
    target = OrderedDict({name: torch.zeros_like(tensor) for name, tensor in tree.items()})
    target["every second"] = torch.zeros(16, 32, dtype=torch.bfloat16)[::2]
    target["parameter"] = torch.nn.Parameter(torch.zeros(3))
    result = tstore.torch.restore(store, target=target)
    assert type(result) is OrderedDict
    for name, tensor in tree.items():
        assert result[name] is target[name]
        assert bits(target[name]) == bits(tensor), name
    for shared in (torch.ones(1).expand(4), torch.ones(3).as_strided((2, 2), (1, 1))):
        with pytest.raises(InvalidArgument, match=r"^shared: elements of the tensor share memory"):
            tstore.torch.restore(store, target={**target, "shared": shared})
    for view in (torch.zeros(3, dtype=torch.complex64).conj(), torch.zeros(3, dtype=torch.complex64).conj().imag):
        name = "conjugated" if view.is_conj() else "negated"
        assert tstore.torch.restore(store, target={name: view}, only=name)[name] is view
        assert bits(view) == bits(tree[name])
    meta = {name: tensor.to("meta") for name, tensor in tree.items()}
    assert bits(tstore.torch.restore(store, target=meta)["bfloat16"]) == bits(tree["bfloat16"])


def test_a_target_that_does_not_fit_and_one_that_asks_for_less() -> None:
    store = url()
    tstore.torch.save(store, {"a": torch.ones(4), "b": torch.ones(2, 2, dtype=torch.bfloat16), "n": 3}, 0)
    with pytest.raises(StructureMismatch) as caught:
        tstore.torch.restore(store, target={"a": torch.ones(5), "c": torch.ones(2)})
    assert (caught.value.missing, caught.value.unexpected) == (["c"], ["b", "n"])
    assert caught.value.mismatched == ["a: stored float32[4], target float32[5]"]
    target = {"a": torch.zeros(4), "b": torch.zeros(2, 2), "n": 0}
    with pytest.raises(StructureMismatch, match="b: stored bfloat16"):
        tstore.torch.restore(store, target=target)
    cast = tstore.torch.restore(store, target=target, dtype={"b": torch.float32})
    assert (cast["b"].sum(), cast["n"]) == (4, 3)
    assert tstore.torch.restore(store, dtype="float32")["b"].dtype == torch.float32
    kept = {"a": torch.zeros(4), "new": torch.full((1,), 7.0)}
    assert tstore.torch.restore(store, target=kept, only=["a", "new"], missing="keep")["new"].item() == 7
    assert kept["a"].tolist() == [1] * 4
    renamed = tstore.torch.restore(store, rename={"a": "model/a"}, only="model/**")
    assert renamed["model"]["a"].tolist() == [1] * 4


def test_leaves_that_are_not_restored_stay_as_they_are() -> None:
    """Tensors on the meta device were replaced by uninitialized ones; others were refused as targets."""
    store = url()
    tstore.torch.save(store, {"a": torch.ones(3), "b": torch.ones(4)}, 0)
    target = {"a": torch.empty(3, device="meta"), "new": torch.empty(5, device="meta")}
    result = tstore.torch.restore(store, target=target, only=["a", "new"], missing="keep")
    assert (result["a"].tolist(), result["new"]) == ([1] * 3, target["new"])
    others = {"b": torch.empty(4, device="meta"), "e": torch.ones(1).expand(2), "s": torch.eye(2).to_sparse()}
    result = tstore.torch.restore(store, target={"a": torch.zeros(3), **others}, only="a")
    assert result["a"].tolist() == [1] * 3
    assert all(result[name] is tensor for name, tensor in others.items())


def test_a_target_of_tensors_that_overlap_in_memory() -> None:
    """The values of both were read into the same memory, at the same time."""
    store, whole = url(), torch.arange(1 << 16, dtype=torch.float32)
    views = {"whole": whole, "tail": whole[1 << 15 :], "columns": whole.view(256, 256)[:, ::2]}
    views |= {"apart": whole[: 1 << 14], "negative": torch._neg_view(whole)[3:5]}
    tstore.torch.save(store, views, 0)
    memory = torch.zeros(1 << 16)
    target = {"whole": memory, "tail": memory[1 << 15 :], "columns": memory.view(256, 256)[:, ::2]}
    target |= {"apart": torch.zeros(1 << 14), "negative": torch._neg_view(memory)[3:5]}
    tstore.torch.restore(store, target=target)
    assert torch.equal(memory, whole)
    tstore.torch.save(store, {**views, "tail": torch.zeros(1 << 15)}, 1)
    memory.zero_()
    with pytest.raises(InvalidArgument, match=r"^\w+: overlaps another tensor of the target in memory, "):
        tstore.torch.restore(store, target=target)
    tstore.torch.restore(store, target=target, only="tail")
    assert torch.equal(memory[1 << 15 :], torch.zeros(1 << 15))


def test_numpy_reads_what_torch_saved_and_the_reverse() -> None:
    store = url()
    tstore.torch.save(store, {"w": torch.ones(3, dtype=torch.bfloat16), "l": [1, 2.5, None, "x"]}, 0)
    restored = tstore.restore(store)
    assert restored["w"].dtype == ml_dtypes.bfloat16
    assert restored["l"] == [1, 2.5, None, "x"]
    tstore.save(store, {"w": np.arange(3.0), 5: (np.float32(2), b"y")}, 1)
    restored = tstore.torch.restore(store)
    assert restored["w"].tolist() == [0, 1, 2]
    assert restored[5] == (torch.tensor(2.0), b"y")
    tstore.save(store, {"w": np.zeros(2, ml_dtypes.float8_e3m4)}, 2)
    with pytest.raises(InvalidArgument, match=r"^w: torch has no dtype for float8_e3m4"):
        tstore.torch.restore(store)


def cycle() -> Any:
    tree: dict[str, Any] = {}
    tree["b"] = [tree]
    return tree


def two_cycles() -> Any:
    """Return a tree with 2^200 paths of 200 keys."""
    tree: dict[str, Any] = {}
    tree |= {"x": tree, "y": tree, "module": torch.nn.Linear(1, 1)}
    return tree


def freed() -> Any:
    """Return a tensor whose memory was freed, as FSDP frees that of gathered parameters."""
    tensor = torch.ones(1 << 20)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"a/0: a tensor of layout .*to_dense"),
    "meta": (lambda: torch.ones(3, device="meta"), "a/0: a tensor on the meta device"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "a/0: a tensor of torch.qint8 .*dequantize",
    ),
    "half of a byte": (
        lambda: torch.empty(2, dtype=torch.complex32),
        "a/0: a tensor of torch.complex32 .*view_as_real",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2)]),
        "a/0: a nested tensor can't be stored; pass tensor.unbind",
    ),
    "nested with offsets": (
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "a/0: a nested tensor can't be stored; pass tensor.unbind",
    ),
    "freed": (freed, "a/0: the memory of the tensor has been freed"),
    "a function": (lambda: print, "a/0: an object of type builtin_function"),
    "an open file": (lambda: sys.stdin, "a/0: an object of type"),
    "a device": (lambda: torch.device("cpu"), "a/0: an object of type device"),
    "a cycle": (cycle, "a/0/b/0: the tree contains itself"),
    "two cycles": (two_cycles, "a/0/x: the tree contains itself"),
}


@pytest.mark.filterwarnings("ignore")  # of PyTorch: some of these are prototypes, deprecated or left open
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_values_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        tstore.torch.save(tmp_path / "s", {"a": [make()]}, 0)
    assert not (tmp_path / "s").exists()


def test_tstore_imports_torch_only_when_it_is_used() -> None:
    processes.fresh_python("import sys, tstore, tstore.sync, tstore.cli; assert 'torch' not in sys.modules")
    assert tstore.torch.save.__module__ == "tstore.sync.torch"


def test_arguments_in_the_order_of_torch_save(tmp_path: Path) -> None:
    for save in (tstore.torch.save, tstore.torch.save_async):
        with pytest.raises(InvalidArgument, match=r"the store comes first, as in save\(url, tree, step\)"):
            save({"w": torch.ones(2)}, tmp_path / "s", 0)
    with pytest.raises(InvalidArgument, match="step"):
        tstore.torch.save(tmp_path / "s", {"w": torch.ones(2)}, 10**30)
    assert not (tmp_path / "s").exists()
    with pytest.raises(InvalidArgument, match="hosts=2"):
        tstore.torch.restore(tmp_path / "s", hosts=2)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_arrays_are_created_with_dtypes_of_torch(name: str) -> None:
    with tstore.open(url()).transaction() as tx:
        array = tx.create_array("w", (3,), getattr(torch, name))
        assert array.dtype.name == name
        with pytest.raises(InvalidArgument, match="'qint8' is unknown"):
            tx.create_array("q", (3,), torch.qint8)


def test_a_tensor_of_an_array_itself_is_refused_with_advice() -> None:
    with tstore.open(url()).transaction() as tx:
        array = tx.create_array("w", (3,), "float32")
        array.write(1.0)
        with pytest.raises(TypeError, match=r"np\.asarray"):
            torch.as_tensor(array)
        assert torch.equal(torch.as_tensor(np.asarray(array)), torch.ones(3))

"""Tensors as NumPy arrays that share their memory (see `data.casting`), and the reverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tstore.checkpoint.replicated import sampled
from tstore.core.data.casting import TORCH_DTYPES, tensor_values
from tstore.core.format.arrays.grid import may_overlap
from tstore.errors import InvalidArgument

__all__ = [
    "check_not_nested",
    "checked_dtype",
    "empty_on_host",
    "host_values",
    "numpy_dtype",
    "overlapping",
    "same_bits",
    "samples_of",
    "shares_elements",
    "tensor_from_values",
    "torch_dtype",
    "values_of",
]

Values = npt.NDArray[Any]

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): dtype for name, dtype in TORCH_DTYPES.items() if hasattr(torch, name)
}
_TORCH = {viewed: dtype for dtype, viewed in _NUMPY.items()}
_BITS = {
    dtype: torch.uint8 if viewed.itemsize == 1 else torch.int16
    for dtype, viewed in _NUMPY.items()
    if viewed.type.__module__ != "numpy"
}
"""For each dtype that NumPy lacks, the integers of the same width."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # every device can index these


def numpy_dtype(path: str, dtype: torch.dtype) -> np.dtype[Any]:
    """Return the NumPy dtype of a tensor's dtype; raise `InvalidArgument`, naming the path, if there is none."""
    if dtype not in _NUMPY:
        name = str(dtype).removeprefix("torch.")
        if name == "float4_e2m1fn_x2":
            advice = "pass tensor.view(torch.uint8), which has the same bytes, with two values in each"
        elif name == "complex32":
            advice = "pass torch.view_as_real(tensor), which has its real and imaginary parts in float16"
        elif name.startswith("q"):
            advice = "pass tensor.dequantize() or tensor.int_repr()"
        else:
            advice = "pass its numbers in a dtype of whole bytes, or in a NumPy array of ml_dtypes, which has int4"
        raise InvalidArgument(f"{path}: a tensor of {dtype} can't be stored; {advice}")
    return _NUMPY[dtype]


def torch_dtype(path: str, dtype: np.dtype[Any]) -> torch.dtype:
    """Return the torch dtype of a NumPy dtype; raise `InvalidArgument`, naming the path, if there is none."""
    if dtype not in _TORCH:
        raise InvalidArgument(f"{path}: torch has no dtype for {dtype}; restore it with tstore.restore")
    return _TORCH[dtype]


def values_of(path: str, tensor: torch.Tensor) -> Values:
    """Return the values of a CPU tensor: a view of its memory, or a copy if it is lazily conjugated or negated."""
    return _checked_values(path, tensor, checked_dtype(path, tensor))


def _checked_values(path: str, tensor: torch.Tensor, dtype: np.dtype[Any]) -> Values:
    try:
        return tensor_values(tensor, dtype)
    except (RuntimeError, TypeError, NotImplementedError) as error:  # a subclass without memory of its own
        raise _without_memory(path, tensor, error) from error


def tensor_from_values(path: str, values: Values) -> torch.Tensor:
    """Return a tensor that shares the memory of an array."""
    dtype = torch_dtype(path, values.dtype)
    if dtype in _BITS:
        return torch.from_numpy(values.view(_NUMPY[_BITS[dtype]])).view(dtype)
    return torch.from_numpy(values)


def host_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, Values]:
    """Return the values of tensors by path: those on the CPU in their own memory, others copied to the host."""
    dtypes = {path: checked_dtype(path, tensor) for path, tensor in tensors.items()}
    return {path: _checked_values(path, tensor, dtypes[path]) for path, tensor in _on_host(tensors).items()}


def empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor on the host of the same shape and dtype, pinned if the tensor is on CUDA."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors on the CPU by path: those of other devices as copies."""
    results = {path: t if t.device.type == "cpu" else t.detach() for path, t in tensors.items()}
    for device in {t.device for t in tensors.values()} - {torch.device("cpu")}:
        on_device = {path: t for path, t in results.items() if t.device == device}
        results |= _copied_from_cuda(device, on_device) if device.type == "cuda" else _copied(on_device)
    return results


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {path: tensor.cpu() for path, tensor in tensors.items()}


def _copied_from_cuda(device: torch.device, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors of a GPU into pinned memory, in a stream separate from the computation."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # for the kernels that still write the tensors
    copies: dict[str, torch.Tensor] = {}
    copy_of: dict[Any, torch.Tensor] = {}  # by memory, because weights may be tied
    with torch.cuda.stream(stream):
        for path, tensor in tensors.items():
            flags = (tensor.is_conj(), tensor.is_neg())
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), *flags)
            if memory not in copy_of:
                # resolved on the device: `copy_` would negate or conjugate on the host before the bytes arrive
                resolved = tensor.resolve_conj().resolve_neg()
                copy_of[memory] = empty_on_host(resolved).copy_(resolved, non_blocking=True)
            copies[path] = copy_of[memory]
    stream.synchronize()  # so the caller may change or free the tensors from here on
    return copies


def shares_elements(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory, as after `expand` or `as_strided`; it can't be written."""
    return may_overlap(tensor.shape, tensor.stride())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of the same dtype and shape have the same bits."""
    tensors = (tensor.resolve_conj().resolve_neg().contiguous() for tensor in (one, other))
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in tensors))


def overlapping(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the tensors that may have elements in the memory of another one."""
    spans = [
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _extent(tensor) * tensor.itemsize, name)
        for name, tensor in tensors.items()
        if tensor.numel()
    ]
    names: set[str] = set()
    last: tuple[str, int, str] | None = None  # the device, end and name of the span that reaches farthest so far
    for device, start, stop, name in sorted(spans):
        if last is not None and last[0] == device and start < last[1]:
            names |= {last[2], name}
        if last is None or (last[0], last[1]) < (device, stop):
            last = device, stop, name
    return names


def _extent(tensor: torch.Tensor) -> int:
    """Return the span of a tensor in memory: the number of elements from the first to the last, inclusive."""
    if tensor.is_contiguous():  # the usual case
        return tensor.numel()
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def checked_dtype(path: str, tensor: torch.Tensor) -> np.dtype[Any]:
    """Return the NumPy dtype of a tensor.

    Raise `InvalidArgument`, naming the path, if there is none, or if the tensor has no strided memory.
    """
    dtype = numpy_dtype(path, tensor.dtype)
    check_not_nested(path, tensor)
    if tensor.layout != torch.strided:
        raise InvalidArgument(
            f"{path}: a tensor of layout {tensor.layout} can't be stored; pass tensor.to_dense(), or its indices "
            "and values as two tensors"
        )
    if tensor.device.type == "meta":
        raise InvalidArgument(
            f"{path}: a tensor on the meta device has no values; materialize the module, for example with "
            "to_empty(device=…)"
        )
    try:
        stored_bytes = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError) as error:
        raise _without_memory(path, tensor, error) from error
    if tensor.numel() and stored_bytes < (tensor.storage_offset() + _extent(tensor)) * tensor.itemsize:
        raise InvalidArgument(
            f"{path}: the memory of the tensor has been freed, as FSDP frees that of gathered parameters; pass "
            "the state_dict() of the module, or tensors that have their values"
        )
    return dtype


def samples_of(tensor: torch.Tensor, *whole: int) -> torch.Tensor:
    """Return a tensor, or samples of a long one in one dimension, on its device; `whole` as for `sampled`."""
    samples = sampled(tensor.numel(), tensor.itemsize, *whole)
    if samples is None or tensor.itemsize not in _INTEGERS or tensor.layout != torch.strided:
        return tensor
    count, starts = samples
    values = tensor.resolve_conj().resolve_neg().view(_INTEGERS[tensor.itemsize])
    if values.is_contiguous():
        flat = values.view(-1)
        return torch.cat([flat[start : start + count] for start in starts])
    numbers = torch.cat([torch.arange(start, start + count, device=tensor.device) for start in starts])
    return values[torch.unravel_index(numbers, tensor.shape)]


def check_not_nested(path: str, tensor: torch.Tensor) -> None:
    """Raise `InvalidArgument`, naming the path, for a nested tensor."""
    if tensor.is_nested:
        raise InvalidArgument(f"{path}: a nested tensor can't be stored; pass tensor.unbind() or a padded tensor")


def _without_memory(path: str, tensor: torch.Tensor, error: Exception) -> InvalidArgument:
    """Return the error for a tensor of a subclass without memory of its own."""
    return InvalidArgument(
        f"{path}: a {type(tensor).__name__} has no memory that NumPy can use ({str(error).splitlines()[0]}); pass "
        "ordinary tensors, such as its inner ones; tstore.torch.save does so in a tree and in the states of "
        "modules and optimizers, but not in a DTensor or the state_dict of another object"
    )

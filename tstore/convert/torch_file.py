"""Files of `torch.save` (`.pt`, `.pth`, `.bin`, `.ckpt`), which are pickles.

A file of tensors, plain containers and numbers is read as data, without torch and without running anything (see
`torch_archive`). Any other is loaded by torch, which runs any code that the pickle names. Import only files whose
origin you trust.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.convert.files import map_file
from tstore.convert.pickled import Unreadable
from tstore.convert.skipping import pruned
from tstore.convert.torch_archive import read_archive
from tstore.core.data.casting import TORCH_DTYPES, tensor_values
from tstore.core.format.tree_document import MAX_LEVELS, SCALARS
from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat, name_list

__all__ = ["open_state_dict", "open_trusted"]

_ZIP = b"PK\x03\x04"
_MAX_EXPANSION = 1 << 10  # a model may use the weights of one layer in each of its layers


def open_trusted(path: str, skip: Sequence[str]) -> Any:
    """Return the object in a file of `torch.save`, with tensors as NumPy arrays; this may run code in the file.

    No code runs if all objects that are not plain values are at paths in `skip`. An object with a `state_dict`
    method, such as a module, is replaced by its state dict, and any other becomes an `Unreadable`. Raise
    `Corrupt`, `UnsupportedFormat` (it needs PyTorch, which is not installed), `InvalidArgument` (a tensor that
    is not dense).
    """
    data = map_file(path)
    if data[: len(_ZIP)].tobytes() == _ZIP:
        try:
            tree = read_archive(data, path, max_expansion=_MAX_EXPANSION)
        except UnsupportedFormat as error:
            reason = str(error)
        else:
            objects = pruned(tree, skip).unreadable
            if not objects:
                return tree
            shown = name_list("objects", [f"{at} ({what})" for at, what in objects.items()])
            reason = f"{path} has {len(objects)} objects of other classes, which may be left out by skip=; {shown}"
    else:
        reason = f"{path} is in the format that PyTorch wrote before version 1.6"
    return _as_tree("", _load(path, reason), 0)


def open_state_dict(path: str, skip: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the state dict in a file of `torch.save`, and no metadata; raise the errors of `open_trusted`."""
    tree = open_trusted(path, skip)
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise InvalidArgument(f"{path} has a {type(tree).__name__}, not a dict of names; import it by itself")
    return tree, {}


def _load(path: str, reason: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedFormat(f"{reason}; to load it with PyTorch, run pip install torch") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # the code in the pickle may raise any exception
        raise Corrupt(
            f"{path} can't be loaded by torch.load ({type(error).__name__}: {str(error)[:300]}); check the file, "
            f"and that the packages whose classes it names are installed ({reason})"
        ) from error


def _as_tree(path: str, value: Any, level: int) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return _array_of(path or "the tensor", value)
    if level > MAX_LEVELS:
        raise InvalidArgument(
            f"{path[:200]}: the file has more than {MAX_LEVELS} levels; save a flatter tree with torch.save"
        )
    if callable(getattr(value, "state_dict", None)):
        value = value.state_dict()
    if isinstance(value, Mapping):
        return {key: _as_tree(f"{path}/{key}", item, level + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_as_tree(f"{path}/{i}", item, level + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or type(value) in SCALARS or isinstance(value, (np.ndarray, np.generic)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return value
    return Unreadable(f"{type(value).__module__}.{type(value).__qualname__}")


def _array_of(path: str, tensor: Any) -> npt.NDArray[Any]:
    """Return an array with the values of a dense tensor, in the same memory if it is contiguous on the CPU."""
    import torch

    dtype = TORCH_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if tensor.device.type == "meta":
        raise InvalidArgument(
            f"{path} is a tensor on the meta device, which has no values; save the file again without it, or with "
            "its values"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or dtype is None:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise InvalidArgument(
            f"{path} is a tensor of layout {layout} and dtype {tensor.dtype}; convert it to a dense tensor "
            f"of {', '.join(TORCH_DTYPES)}"
        )
    return tensor_values(tensor.cpu().contiguous(), dtype)

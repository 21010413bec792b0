"""Memory to read a stored state into: the tensors of the object's own state, or new ones like them."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from tstore.errors import InvalidArgument
from tstore.torch.forms import has_form, stored_form
from tstore.torch.tensors import numpy_dtype

__all__ = ["Stored", "child_at", "with_memory"]


class Stored(NamedTuple):
    """The shape and dtype of an array in a checkpoint, and whether it is an object that DCP has pickled."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_pickle: bool = False

    @property
    def is_bytes(self) -> bool:
        """Whether the array may be the bytes of a `BytesIO`."""
        return len(self.shape) == 1 and self.dtype == torch.uint8


def child_at(tree: Any, key: Any) -> Any:
    """Return the value at a key, None if there is none."""
    try:
        return tree[key]
    except (LookupError, TypeError):
        return None


def with_memory(value: Any, parameter: torch.Tensor | None, own: Any, used: list[torch.Tensor]) -> Any:
    """Return a stored state with a tensor to read into in place of each `Stored`.

    The tensor is the one at the same place in `own`, the object's state, or one like the parameter. Where the
    object's state has a NumPy array, a NumPy array is returned in place of a tensor. A tensor among those
    `used` is copied, because the checkpoint may have other values: schedulers share the tensor of a learning rate.
    """
    if isinstance(own, io.BytesIO) and isinstance(value, Stored) and value.is_pickle:
        raise InvalidArgument(
            "the target has a BytesIO where the checkpoint has an object that DCP has pickled; load it with "
            "dcp.load and tstore.torch.Reader, or restore the others with only=…"
        )
    if has_form(own) and not (isinstance(own, io.BytesIO) and isinstance(value, Stored) and value.is_bytes):
        return stored_form(own)
    if isinstance(value, Mapping):
        items = {key: with_memory(item, parameter, child_at(own, key), used) for key, item in value.items()}
        if not isinstance(own, dict) or type(own) is dict:
            return items
        typed = copy.copy(own)  # a Counter, for example the milestones of MultiStepLR
        typed.clear()
        for key, item in items.items():
            typed[key] = item
        return typed
    if not isinstance(value, Stored):
        if isinstance(value, list | tuple):
            return type(value)(with_memory(v, parameter, child_at(own, i), used) for i, v in enumerate(value))
        return value
    if isinstance(own, torch.Tensor) and tuple(own.shape) == value.shape and own.dtype == value.dtype:
        used.append(own)
        return own.clone() if any(own is tensor for tensor in used[:-1]) else own
    if isinstance(own, np.ndarray):
        return np.empty(value.shape, numpy_dtype("the state", value.dtype))
    if parameter is not None and tuple(parameter.shape) == value.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    try:
        return torch.empty(value.shape, dtype=value.dtype)
    except RuntimeError as error:
        raise InvalidArgument(
            f"the checkpoint has a {value.dtype} tensor of shape {list(value.shape)} in the state of an object, "
            "which does not fit in memory; restore the other objects with only=…"
        ) from error

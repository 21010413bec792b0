"""Leaves that are stored in another form: tensor subclasses as their inner tensors, `BytesIO` as bytes."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from typing import Any

import torch

from tstore.torch.dtensors import is_dtensor

__all__ = ["has_form", "original_form", "original_forms", "stored_form"]


def has_form(value: Any) -> bool:
    """Return whether a value is a `BytesIO`, or a tensor of a subclass that consists of inner tensors."""
    return _kind_has_form(type(value)) and not is_dtensor(value)  # type: ignore[arg-type]  # types are hashable


@functools.cache
def _kind_has_form(kind: type) -> bool:
    is_wrapper = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return issubclass(kind, io.BytesIO) or (issubclass(kind, torch.Tensor) and is_wrapper)


def stored_form(value: Any) -> Any:
    """Return a new tensor with the bytes, or a dict of the inner tensors, which are not copied."""
    if isinstance(value, io.BytesIO):
        return torch.tensor(bytearray(value.getvalue()), dtype=torch.uint8)
    inner = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
    return {name: stored_form(tensor) if has_form(tensor) else tensor for name, tensor in inner.items()}


def original_form(value: Any, form: Any) -> Any:
    """Return the value that a form represents, like `value`: the value itself if its memory has the values."""
    if isinstance(value, io.BytesIO):
        return io.BytesIO(form.numpy().tobytes())
    names, context = value.__tensor_flatten__()
    inner = {name: getattr(value, name) for name in names}
    restored = {n: original_form(tensor, form[n]) if has_form(tensor) else form[n] for n, tensor in inner.items()}
    if all(restored[name] is tensor for name, tensor in inner.items()):
        return value
    return type(value).__tensor_unflatten__(restored, context, value.shape, value.stride())


def original_forms(state: Any, own: Any) -> Any:
    """Replace the forms in a state by values like those at the same places in `own`."""
    if has_form(own):
        return original_form(own, state)
    if type(state) is not dict or not isinstance(own, Mapping):
        return state
    return {key: original_forms(value, own.get(key)) for key, value in state.items()}

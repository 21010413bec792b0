"""Leaves of a tree as NumPy arrays, from NumPy, PyTorch, JAX and others; pure, no I/O."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.errors import InvalidArgument

__all__ = ["as_values", "dtype_of"]

_ADVICE = {
    "torch": "tensor.detach().cpu().float().numpy(), or full_tensor() first if it is distributed",
    "jax": "jax.random.key_data(key) for a key; for an array across processes, the Shards of each one",
    "jaxlib": "jax.random.key_data(key) for a key; for an array across processes, the Shards of each one",
    "tstore": "array.read()",
}
_LONGEST_REASON = 200


def as_values(path: str, leaf: Any) -> npt.NDArray[Any]:
    """Return a leaf as an array, without a copy if NumPy needs none; `path` names it in errors.

    A PyTorch tensor loses its gradient. Raises `InvalidArgument` if NumPy can't take the values.
    """
    if type(leaf) is np.ndarray:
        return leaf
    try:
        values = np.asarray(leaf.detach() if getattr(leaf, "requires_grad", False) is True else leaf)
    except MemoryError:
        raise
    except Exception as error:  # each library has its own
        reason = (str(error) or repr(error)).splitlines()[0][:_LONGEST_REASON].rstrip(" .")
        raise InvalidArgument(
            f"{path}: a {_type_name(leaf)} can't be taken as a NumPy array ({reason}); {_advice(leaf)}"
        ) from error
    if values.dtype == object and not isinstance(leaf, np.ndarray):
        raise InvalidArgument(f"{path}: a {_type_name(leaf)} has no values that NumPy can take; {_advice(leaf)}")
    return values


def dtype_of(path: str, leaf: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of a leaf of a target; raise `InvalidArgument` if it has none."""
    try:
        dtype: np.dtype[Any] = np.dtype(leaf.dtype).newbyteorder("=")
    except TypeError:
        raise InvalidArgument(
            f"{path}: the target is a {_type_name(leaf)} of dtype {leaf.dtype}, which is not a NumPy dtype; leave "
            "out target, or pass NumPy arrays in it, and convert the restored arrays, for example with "
            "torch.from_numpy"
        ) from None
    return dtype


def _type_name(leaf: Any) -> str:
    kind = type(leaf)
    return f"{kind.__module__}.{kind.__qualname__}"


def _advice(leaf: Any) -> str:
    form = _ADVICE.get(type(leaf).__module__.partition(".")[0])
    return "convert it to one first" + (f", with {form}" if form else "")

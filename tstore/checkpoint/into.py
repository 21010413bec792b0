"""The arrays of a tree, as memory to restore a checkpoint into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tstore.checkpoint.leaves import NO_LEAF, Destination, Shards
from tstore.checkpoint.structure import flatten, unflatten_like
from tstore.core.data.destinations import check_distinct
from tstore.errors import InvalidArgument

__all__ = ["Into"]

_ADVICE = {
    "torch": "tstore.torch.restore(url, target=…) restores into tensors",
    "jax": "a jax.Array can't be changed: tstore.jax.restore(url, target=…) returns new ones",
    "jaxlib": "a jax.Array can't be changed: tstore.jax.restore(url, target=…) returns new ones",
}


class Into(NamedTuple):
    """A tree to restore into: its arrays and `Shards` with values, by path, in `target` as `Destination`s."""

    tree: Any
    leaves: Mapping[str, Any]
    target: Any

    @staticmethod
    def of(tree: Any, selects: Callable[[str], bool]) -> Into:
        """Return the destinations of the selected leaves.

        Raise `InvalidArgument`, naming the path, for a leaf that is not a NumPy array in the machine's byte order,
        for one that can't be written, and for two that share memory.
        """
        _, all_leaves = flatten(tree, refusal=NO_LEAF)
        leaves = {path: leaf for path, leaf in all_leaves.items() if hasattr(leaf, "shape") and selects(path)}
        destinations = {path: _destination(path, leaf) for path, leaf in leaves.items()}
        check_distinct((path, values) for path, leaf in destinations.items() for _, values in leaf.parts)
        return Into(tree, leaves, unflatten_like(tree, destinations, {}))


def _destination(path: str, leaf: Any) -> Destination:
    if isinstance(leaf, Shards):
        parts = [(index, values) for index, values in leaf.parts if values is not None]
        if len(parts) < len(leaf.values):
            raise InvalidArgument(f"{path}: a part of the Shards has no values; pass memory for each, or target=…")
    elif isinstance(leaf, np.ndarray):
        whole = tuple(slice(0, n) for n in leaf.shape)
        parts = [(whole, np.asarray(leaf))]  # a subclass may index differently
    else:
        library = type(leaf).__module__.partition(".")[0]
        advice = _ADVICE.get(library, "pass target=…, for a new array")
        raise InvalidArgument(f"{path}: into needs NumPy arrays, not a {library}.{type(leaf).__name__}; {advice}")
    for _, values in parts:
        if not values.flags.writeable:
            raise InvalidArgument(
                f"{path}: the array is read-only; pass a writable one, or leave it out with only=…"
            )
        if not values.dtype.isnative:
            raise InvalidArgument(
                f"{path}: {values.dtype} is not in the byte order of this machine; pass an array of "
                f"{values.dtype.newbyteorder('=')}"
            )
    return Destination(tuple(leaf.shape), parts[0][1].dtype if parts else leaf.dtype, parts)

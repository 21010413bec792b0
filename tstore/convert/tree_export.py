"""The tree of a checkpoint for writers of other libraries, which request its arrays one at a time in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.checkpoint.structure import unflatten
from tstore.convert.exporting import ProgressCallback
from tstore.convert.names import attributes_in, below, subtree_of, values_beside
from tstore.core.array import Array
from tstore.core.format.tree_document import host_places
from tstore.core.snapshot import Snapshot
from tstore.errors import InvalidArgument, parsing

__all__ = ["ArrayLeaf", "ArrayReader", "NumberLeaf", "tree_to_export"]


class ArrayLeaf:
    """A placeholder for an array of the checkpoint in the tree."""

    def __init__(self, path: str, array: Array) -> None:
        self.path, self.array = path, array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its values, decoded."""
        return self.array.dtype

    def __getitem__(self, key: tuple[()]) -> NumberLeaf:  # `unflatten` indexes the array of a NumPy scalar with ()
        return NumberLeaf(self.path, self.array)


class NumberLeaf(ArrayLeaf):
    """A NumPy scalar, which is stored as an array without axes."""


async def tree_to_export(snapshot: Snapshot, subtree: str) -> tuple[Any, dict[str, Array], list[str]]:
    """Return the tree at or below a path with `ArrayLeaf` for each array, these arrays by path, and what it lacks.

    It lacks attributes and, if arrays were added to the checkpoint, its values that are not arrays. A `PerHost`
    value becomes a dict of the bytes of each host. Raise `InvalidArgument` if there is no array, or if the tree is
    not a dict.
    """
    document, paths = subtree_of(snapshot, subtree)
    arrays = {path: await snapshot.array(path) for path in paths}
    leaves: dict[str, Any] = {path: ArrayLeaf(path, array) for path, array in arrays.items()}
    left_out = attributes_in(snapshot, subtree)
    if document is None:
        tree = {below(path, subtree): leaf for path, leaf in leaves.items()}
        return tree, arrays, values_beside(snapshot, subtree) + left_out
    for path, place in host_places(leaves).items():
        leaves.setdefault(place, {})[path.rpartition("/")[2]] = leaves[path]
    with parsing(f"version {snapshot.version}: its structure"):
        tree = unflatten(document, leaves, selects=lambda path: True)  # also if arrays are skipped
    if not isinstance(tree, dict):
        what = "one array" if isinstance(tree, ArrayLeaf) else f"a {type(tree).__name__}"
        raise InvalidArgument(
            f"version {snapshot.version} is {what}, but the other format has dicts of values; save it in a dict"
        )
    return tree, arrays, left_out


class ArrayReader:
    """Reads arrays for a writer in another thread, and reports the bytes read so far and the total."""

    def __init__(self, arrays: Mapping[str, Array], progress: ProgressCallback | None) -> None:
        self.total = sum(array.nbytes for array in arrays.values())
        self._done = 0
        self._progress = progress
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()

    def read(self, leaf: ArrayLeaf) -> npt.NDArray[Any]:
        """Return the values of an array, in C order; raise `CancelledError` if the export was cancelled."""
        if self._task is not None and self._task.cancelling():  # the cancelled task waits for this call to end
            raise asyncio.CancelledError
        work: Coroutine[Any, Any, npt.NDArray[Any]] = leaf.array.read()
        values = np.ascontiguousarray(asyncio.run_coroutine_threadsafe(work, self._loop).result())
        self._done += values.nbytes
        if self._progress is not None:
            self._loop.call_soon_threadsafe(self._progress, self._done, self.total)
        return values.reshape(leaf.shape)

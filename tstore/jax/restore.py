"""Restoring pytrees onto the devices of a job, in any sharding."""

from __future__ import annotations

import math
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from tstore.checkpoint import restore as core
from tstore.checkpoint.reading import Allocate, Reading, RestorePlan, unallocated
from tstore.checkpoint.request import Cast, Missing, Request
from tstore.checkpoint.source import Source
from tstore.data.reader import new_values
from tstore.errors import InvalidArgument
from tstore.jax.arrays import decoded, stored_patterns, stored_renames
from tstore.jax.processes import agreed_snapshot
from tstore.jax.pytree import Pytree
from tstore.jax.targets import target_leaf
from tstore.runtime import pool
from tstore.saved_steps import check_one_version, chosen_snapshot
from tstore.store import Store, opened

__all__ = ["explain", "restore"]

_ALIGNMENT = 64
"""On the CPU, XLA uses memory at a multiple of this many bytes in place, and copies other memory."""

_BYTE = np.dtype(np.uint8)


def restore(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast = None,
    missing: Missing = "error",
) -> Coroutine[Any, Any, Any]:
    """Return the checkpoint of a step (by default the newest), or of a version or tag (`at`), as a pytree.

    With neither a step nor `at`, every process of the job makes this call, and all restore the same step.
    Otherwise each process restores by itself.

    Parameters
    ----------
    target
        The pytree to return, with arrays, or with what `jax.eval_shape` returns. An array gets the sharding of its
        leaf, and each process reads what its devices need, once. Without a sharding it is whole on the default
        device; NumPy arrays are restored as such. The target must fit: one `StructureMismatch` lists every path
        that is missing or unexpected, or has another shape or dtype. Without a target the result consists of
        nested dicts and lists of NumPy arrays; only typed PRNG keys are arrays of JAX.
    only, rename, dtype, missing
        As in `tstore.restore`.

    Raises
    ------
    As `tstore.restore`, and `InvalidArgument`, with the path, for a sharding that does not fit its array.
    """
    device = jax.config.jax_default_device  # type: ignore[attr-defined]  # of the calling thread
    only, rename = stored_patterns(only), stored_renames(rename)

    async def run() -> Any:
        check_one_version(step, at)
        request = Request(only, rename, dtype, missing)
        async with opened(store, "r") as opened_store:
            snapshot = await agreed_snapshot(opened_store, step, at)
            if target is None:
                arrays = await core.restore(
                    opened_store, at=snapshot.version, only=only, rename=rename, dtype=dtype, missing=missing
                )
                return decoded(arrays)
            tree = _TargetTree(await Source.read(snapshot, request), target, request)
            arrays = await tree.reading(_aligned_values).read()
            return await pool.run(tree.finish, arrays, device)

    return run()


async def explain(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast = None,
    missing: Missing = "error",
) -> RestorePlan:
    """Return what `restore` with the same arguments would read in this process, without reading any chunk.

    Raise what `restore` raises, except `Corrupt` for damaged chunks.
    """
    only, rename = stored_patterns(only), stored_renames(rename)
    if target is None:
        return await core.explain(store, step, at=at, only=only, rename=rename, dtype=dtype, missing=missing)
    check_one_version(step, at)
    request = Request(only, rename, dtype, missing)
    async with opened(store, "r") as opened_store:
        snapshot = await chosen_snapshot(opened_store, step, at)
        tree = _TargetTree(await Source.read(snapshot, request), target, request)
        return await pool.run(tree.reading(unallocated).plan)


class _TargetTree:
    """The target of a restore: its leaves, and what a snapshot has for each."""

    def __init__(self, source: Source, target: Any, request: Request) -> None:
        self._source = source
        self._request = request
        self._pytree = Pytree(target)
        self._leaves = {path: target_leaf(path, leaf, self._source) for path, leaf in self._pytree.leaves.items()}

    def reading(self, allocate: Allocate) -> Reading:
        """Return the reads; raise `StructureMismatch` or `InvalidArgument` if the target does not fit."""
        if self._request.keeps_missing:
            self._check_kept()
        reading = Reading(self._source, self._request, allocate)
        core_target = self._pytree.nested({path: leaf.core_leaf for path, leaf in self._leaves.items()})
        for path, leaf in self._source.leaves(core_target, self._request).items():
            reading.add(path, leaf)
        return reading

    def _check_kept(self) -> None:
        """Raise `InvalidArgument` for a leaf that the checkpoint lacks and for which the target has no values."""
        for path, leaf in self._pytree.leaves.items():
            stored_path = self._leaves[path].path
            lacking = stored_path not in self._source.stored and stored_path not in self._source.scalars
            if lacking and isinstance(leaf, jax.ShapeDtypeStruct) and self._request.matches(stored_path):
                raise InvalidArgument(
                    f"{path}: the checkpoint lacks it, and the target has no values to keep, only a shape and "
                    "dtype; pass an array there"
                )

    def finish(self, arrays: dict[str, Any], device: Any) -> Any:
        """Move the values of `arrays` into the pytree and return it; those without a sharding go to `device`."""
        results = dict(self._pytree.leaves)
        with jax.default_device(device):
            for path, leaf in self._leaves.items():
                if leaf.path in arrays:
                    results[path] = leaf.finish(arrays.pop(leaf.path))
                elif leaf.path in self._source.scalars:
                    results[path] = leaf.finish(self._source.scalars[leaf.path])
        return self._pytree.with_leaves(results)


def _aligned_values(path: str, shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an uninitialized array in memory that XLA can use."""
    size = math.prod(shape) * dtype.itemsize
    memory = new_values(path, (size + _ALIGNMENT,), _BYTE)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(tuple(shape))

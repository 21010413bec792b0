"""Restore pytrees onto the devices of a job, in any sharding."""

from __future__ import annotations

import math
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from tstore.checkpoint.leaves import PerHost
from tstore.checkpoint.reading import Allocate, Reading, RestorePlan, unallocated
from tstore.checkpoint.request import Cast, Missing, PerHostRule, Request
from tstore.checkpoint.source import Source
from tstore.core.data.reader import new_values
from tstore.core.hints import hinting
from tstore.core.runtime import pool
from tstore.core.steps import check_one_version, chosen_snapshot
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument, StructureMismatch
from tstore.jax.arrays import FORMS, decoded, is_value, split_impl
from tstore.jax.processes import agreed_snapshot
from tstore.jax.pytree import Pytree
from tstore.jax.targets import target_leaf

__all__ = ["PlacedTarget", "explain", "restore"]

_ALIGNMENT = 64
"""On the CPU, XLA uses memory at a multiple of this many bytes in place, and copies other memory."""

_BYTE = np.dtype(np.uint8)


@hinting
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
    per_host: PerHostRule = "same",
) -> Coroutine[Any, Any, Any]:
    """Return the checkpoint of a step (by default the newest), or of a version or tag (`at`), as a pytree.

    With neither a step nor `at`, every process of the job makes this call, and all restore the same step.
    Otherwise each process restores by itself.

    Parameters
    ----------
    target
        The pytree to return, with arrays, or with what `jax.eval_shape` returns. An array gets the sharding,
        layout and weak type of its leaf, and each process reads what its devices need, once. Without a sharding it
        is whole on the default device; one over a mesh without devices, as `jax.eval_shape` returns, is over that
        of `jax.set_mesh`. NumPy arrays are restored as such, and the iterator of Grain in a `tstore.PerHost` in
        place. The target must fit: one `StructureMismatch` lists every path that is missing or unexpected, or has
        another shape or dtype. Without a target the result consists of NumPy arrays in nested dicts, lists and
        tuples, and only typed PRNG keys are arrays of JAX; named tuples and other classes become dicts.
    only, rename, dtype, missing, per_host
        As in `tstore.restore`.

    Raises
    ------
    As `tstore.restore`, and `InvalidArgument`, with the path, for a sharding that does not fit its array.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> import jax
    >>> _ = tstore.jax.save("memory://of-jax-restore", {"w": jax.numpy.arange(4.0)}, step=7)
    >>> target = {"w": jax.ShapeDtypeStruct((4,), "float32")}
    >>> tstore.jax.restore("memory://of-jax-restore", target=target)
    {'w': Array([0., 1., 2., 3.], dtype=float32)}
    """
    here, processes = PlacedTarget.here(target), (jax.process_index(), jax.process_count())

    async def run() -> Any:
        check_one_version(step, at)
        request = Request(only, rename, dtype, missing, per_host, *processes, FORMS)
        async with agreed_snapshot(store, step, at) as (_, snapshot):
            source = await Source.read(snapshot, request)
            if here.tree is None:
                arrays = await _whole(source, request, new_values).read()
                return decoded(await source.tree(arrays))
            tree = _TargetTree(source, here, request)
            arrays = await tree.reading(_aligned_values).read()
            return await pool.run(tree.finish, arrays)

    return run()


@hinting
def explain(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast = None,
    missing: Missing = "error",
    per_host: PerHostRule = "same",
) -> Coroutine[Any, Any, RestorePlan]:
    """Return what `restore` with the same arguments would read in this process, without reading any chunk.

    Raise what `restore` raises, except `Corrupt` for damaged chunks.
    """
    here, processes = PlacedTarget.here(target), (jax.process_index(), jax.process_count())

    async def run() -> RestorePlan:
        check_one_version(step, at)
        request = Request(only, rename, dtype, missing, per_host, *processes, FORMS)
        async with opened(store, "r") as opened_store:
            snapshot = await chosen_snapshot(opened_store, step, at)
            source = await Source.read(snapshot, request)
            if here.tree is None:
                return await pool.run(_whole(source, request, unallocated).plan)
            tree = _TargetTree(source, here, request)
            return await pool.run(tree.reading(unallocated).plan)

    return run()


def _whole(source: Source, request: Request, allocate: Allocate) -> Reading:
    """Return the reads of a restore without a target."""
    reading = Reading(source, request, allocate)
    for path in source.leaves(None, request):
        reading.add(path, None)
    return reading


class PlacedTarget(NamedTuple):
    """The target of a restore, and the default device and the mesh of the thread that passed it."""

    tree: Any
    device: Any
    mesh: Any

    @staticmethod
    def here(tree: Any) -> PlacedTarget:
        """Return a target with the device and the mesh of this thread; return a `PlacedTarget` unchanged."""
        if isinstance(tree, PlacedTarget):
            return tree
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        get_mesh = getattr(jax.sharding, "get_mesh", None)  # not in older versions of JAX
        return PlacedTarget(tree, device, get_mesh and get_mesh())


class _TargetTree:
    """The target of a restore: its leaves, and the matching entries of a snapshot."""

    def __init__(self, source: Source, target: PlacedTarget, request: Request) -> None:
        self._source = source
        self._request = request
        self._device = target.device
        self._pytree = Pytree(target.tree)
        self._leaves = {
            path: target_leaf(path, leaf, source, target.mesh)
            for path, leaf in self._pytree.leaves.items()
            if is_value(leaf) or request.matches(path)
        }

    def reading(self, allocate: Allocate) -> Reading:
        """Return the reads; raise `StructureMismatch` or `InvalidArgument` if the target does not fit."""
        if self._request.keeps_missing:
            self._check_kept()
        reading = Reading(self._source, self._request, allocate)
        core_leaves = {path: leaf.core_leaf for path, leaf in self._leaves.items()}
        core_target = self._pytree.nested(dict.fromkeys(self._pytree.leaves) | core_leaves)
        try:
            leaves = self._source.leaves(core_target, self._request)
        except StructureMismatch as error:
            raise _with_keys_compared(error, self._source.snapshot.location) from None
        for path, leaf in leaves.items():
            reading.add(path, leaf)
        return reading

    def _check_kept(self) -> None:
        """Raise `InvalidArgument` for a leaf that the checkpoint lacks and for which the target has no values."""
        for path, target in self._leaves.items():
            leaf, stored_path = self._pytree.leaves[path], target.path
            lacking = stored_path not in self._source.stored and stored_path not in self._source.scalars
            if lacking and isinstance(leaf, jax.ShapeDtypeStruct) and self._request.matches(stored_path):
                raise InvalidArgument(
                    f"{path}: the checkpoint lacks it, and the target has no values to keep, only a shape and "
                    "dtype; pass an array there"
                )

    def finish(self, arrays: dict[str, Any]) -> Any:
        """Move the values of `arrays` into the pytree and return it; those without a sharding go to the device."""
        results, unfilled, keeps = {}, [], self._request.keeps_missing
        with jax.default_device(self._device):
            for path, leaf in self._leaves.items():
                if leaf.path in arrays:
                    results[path] = leaf.finish(arrays.pop(leaf.path))
                elif leaf.path in self._source.scalars:
                    results[path] = leaf.finish(self._source.scalars[leaf.path])
                elif self._request.matches(leaf.path) and not keeps and not isinstance(leaf.core_leaf, PerHost):
                    unfilled.append(path)
        if unfilled:
            raise StructureMismatch(self._source.snapshot.location, unfilled, [], [])
        return self._pytree.with_leaves(results)


def _with_keys_compared(error: StructureMismatch, checkpoint: str) -> StructureMismatch:
    """Return the error with a message for each PRNG key whose stored form differs from the target's."""
    wanted, stored = dict(map(split_impl, error.missing)), dict(map(split_impl, error.unexpected))
    forms = [
        (path, stored[path], wanted[path]) for path in wanted if path in stored and stored[path] != wanted[path]
    ]
    if not forms:
        return error
    compared = {path for path, _, _ in forms}
    return StructureMismatch(
        checkpoint,
        [path for path in error.missing if split_impl(path)[0] not in compared],
        [path for path in error.unexpected if split_impl(path)[0] not in compared],
        error.mismatched + [f"{path}: {_advice_on_keys(old, new)}" for path, old, new in forms],
    )


def _advice_on_keys(stored: str | None, wanted: str | None) -> str:
    """Return advice for keys of the wrong implementation, or raw data (None) instead of keys."""
    if stored is None:
        return (
            f"stored raw data, target typed PRNG keys of {wanted}; pass jax.random.key_data(key) in the target, "
            f"and the result to jax.random.wrap_key_data(…, impl={wanted!r})"
        )
    advice = f"pass such a key, as from jax.random.key(0, impl={stored!r})"
    if wanted is None:
        advice += ", and take jax.random.key_data of the result"
    return f"stored typed PRNG keys of {stored}, target {f'those of {wanted}' if wanted else 'raw data'}; {advice}"


def _aligned_values(path: str, shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an uninitialized array in memory that XLA can use."""
    size = math.prod(shape) * dtype.itemsize
    memory = new_values(path, (size + _ALIGNMENT,), _BYTE)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(tuple(shape))

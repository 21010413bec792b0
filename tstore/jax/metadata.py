"""The abstract tree of a checkpoint, for building the target of a restore."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from tstore.checkpoint.leaves import PerHost
from tstore.checkpoint.request import Request
from tstore.checkpoint.source import Source
from tstore.checkpoint.structure import join, path_part
from tstore.core.steps import check_one_version
from tstore.core.store import Store
from tstore.jax.arrays import FORMS, decoded, is_key
from tstore.jax.processes import agreed_snapshot

__all__ = ["metadata"]


def metadata(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    only: str | list[str] | None = None,
    sharding: Callable[[str, Any], Any] | jax.sharding.Sharding | None = None,
) -> Coroutine[Any, Any, Any]:
    """Return the tree of a step (by default the newest), or of a version or tag (`at`), without reading any chunk.

    A `jax.ShapeDtypeStruct` stands for each array and each array of typed PRNG keys, so that the tree, or a tree
    made from it, is a target of `restore`. Python scalars are themselves, and the value of a `PerHost` is None. An
    array of a dtype that JAX has only with `jax_enable_x64` is a NumPy array of zeros, without memory. Named
    tuples and other classes are dicts.

    With neither a step nor `at`, every process of the job makes this call, and all get the same step.

    Parameters
    ----------
    only
        As in `tstore.restore`.
    sharding
        The sharding of all arrays, or a function that returns that of an array from its path, such as "params/w",
        and its `jax.ShapeDtypeStruct`.

    Raises
    ------
    `NotAStore`, `NotFound`, `SnapshotExpired` (garbage collection removed the version), `Corrupt`,
    `InvalidArgument`.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> import jax
    >>> _ = tstore.jax.save("memory://of-jax-metadata", {"w": jax.numpy.arange(4.0), "epoch": 2}, step=7)
    >>> tstore.jax.metadata("memory://of-jax-metadata")
    {'epoch': 2, 'w': ShapeDtypeStruct(shape=(4,), dtype=float32)}
    """
    processes = (jax.process_index(), jax.process_count())

    async def run() -> Any:
        check_one_version(step, at)
        request = Request(only, None, None, "error", "all", *processes, FORMS)
        async with agreed_snapshot(store, step, at) as (_, snapshot):
            source = await Source.read(snapshot, request)
            values: dict[str, Any] = {
                source.places.get(path, path): PerHost(None) if path in source.places else _zeros(source, path)
                for path in source.leaves(None, request)
            }
            return _abstract(decoded(await source.tree(values)), "", sharding)

    return run()


def _zeros(source: Source, path: str) -> npt.NDArray[Any]:
    """Return an array of zeros that stores a single zero in memory."""
    meta = source.node(path).meta
    return np.broadcast_to(np.zeros((), meta.dtype), meta.shape)


def _abstract(tree: Any, path: str, sharding: Callable[[str, Any], Any] | jax.sharding.Sharding | None) -> Any:
    """Return a restored tree with `jax.ShapeDtypeStruct` in place of arrays."""
    match tree:
        case dict():
            return {key: _abstract(value, join(path, path_part(key)), sharding) for key, value in tree.items()}
        case list() | tuple():
            return type(tree)(_abstract(value, join(path, str(i)), sharding) for i, value in enumerate(tree))
        case np.ndarray() | np.generic() | jax.Array() if is_key(tree) or _is_of_jax(tree.dtype):
            chosen = sharding
            if callable(sharding):
                chosen = sharding(path, jax.ShapeDtypeStruct(tree.shape, tree.dtype))  # type: ignore[no-untyped-call]
            return jax.ShapeDtypeStruct(tree.shape, tree.dtype, sharding=chosen)  # type: ignore[no-untyped-call]
    return tree


def _is_of_jax(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of JAX have a dtype, which may depend on `jax_enable_x64`."""
    is_numeric = dtype.kind == "b" or jax.numpy.issubdtype(dtype, np.number)
    return is_numeric and jax.dtypes.canonicalize_dtype(dtype) == dtype

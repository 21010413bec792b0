"""Save pytrees from all processes of a job, in the foreground or background."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping
from typing import Any, Unpack

import jax
import numpy as np

from tstore.checkpoint import background
from tstore.checkpoint import save as core
from tstore.checkpoint.background import BackgroundSave, InFlight
from tstore.checkpoint.leaves import Shards, as_values
from tstore.checkpoint.options import SharedOptions, complete
from tstore.checkpoint.save import checkpoint_to_save
from tstore.core.runtime import pool
from tstore.core.store import Store
from tstore.jax.arrays import begin_copy, checked_leaf
from tstore.jax.processes import Processes
from tstore.jax.pytree import Pytree

__all__ = ["save", "save_async", "unchanging_values"]


@complete(SharedOptions, checkpoint_to_save)
def save(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    host: int | None = None,
    hosts: int | None = None,
    attempt: str | None = None,
    **options: Unpack[SharedOptions],
) -> Coroutine[Any, Any, int]:
    """Save a pytree as one atomic commit and return its version. Durable on return.

    Every process of the job calls this, with the same pytree. Each writes what its devices hold. If several
    processes hold a region, each writes an equal piece of it, or one of them writes all of a small region.

    Parameters
    ----------
    tree
        Any pytree of arrays of JAX (in any sharding, of any dtype, typed PRNG keys too) and NumPy, and of Python
        scalars: states of optax, `TrainState`, states and modules of `flax.nnx`. An array that each process has on
        its own devices must be equal in all processes, and one of them writes it, unless it is in a
        `tstore.PerHost`: then each process saves its own. An iterator of Grain in a `PerHost` is saved by its
        state. Do not change the arrays of NumPy before this returns.
    host, hosts, attempt
        By default from `jax.distributed`, with a new attempt for each save. With `hosts=1` this process saves
        alone.
    options
        `codecs` and all others as in `tstore.save`.

    Raises
    ------
    As `tstore.save`, and `InvalidArgument`, with the path, for an array that was donated or is being traced.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> import jax.numpy as jnp
    >>> tstore.jax.save("memory://of-jax-save", {"w": jnp.arange(8.0)}, step=7)
    1
    """
    processes = Processes.saving(store, step, host, hosts, attempt)

    async def run() -> int:
        pytree = Pytree(tree)
        return await core.save(
            store,
            await pool.run(_values, pytree, pytree.leaves, processes.hosts),
            step,
            host=processes.host,
            hosts=processes.hosts,
            attempt=processes.attempt,
            **options,
        )

    return run()


@complete(SharedOptions, checkpoint_to_save)
def save_async(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    host: int | None = None,
    hosts: int | None = None,
    attempt: str | None = None,
    in_flight: InFlight = "queue",
    **options: Unpack[SharedOptions],
) -> Coroutine[Any, Any, BackgroundSave]:
    """Start a save in the background; return its `BackgroundSave` once the arrays may be donated.

    Arrays on the CPU are not copied: JAX never changes them. While the save has views of them, a function to which
    they are donated gets new memory for its results. Arrays on other devices are copied to the host first, and
    NumPy arrays are copied too.

    Parameters
    ----------
    in_flight
        As in `tstore.save_async`; everything else as `save` takes it.

    Raises
    ------
    As `tstore.save_async`, and `InvalidArgument` as `save`.
    """
    processes = Processes.saving(store, step, host, hosts, attempt)

    async def run() -> BackgroundSave:
        return await background.save_async(
            store,
            await unchanging_values(tree, processes.hosts),
            step,
            host=processes.host,
            hosts=processes.hosts,
            attempt=processes.attempt,
            staging="reference",
            in_flight=in_flight,
            **options,
        )

    return run()


async def unchanging_values(tree: Any, hosts: int) -> Any:
    """Return what one of `hosts` hosts saves of a pytree, in arrays that nothing changes."""
    pytree = Pytree(tree)
    leaves = {path: _unchanging(path or "value", leaf) for path, leaf in pytree.leaves.items()}
    return await pool.run(_values, pytree, leaves, hosts)


def _values(pytree: Pytree, leaves: Mapping[str, Any], hosts: int) -> Any:
    """Return what one of `hosts` hosts saves of a pytree with these leaves, as the core takes it."""
    copies = {path: begin_copy(path or "value", leaf, hosts) for path, leaf in leaves.items()}
    return pytree.nested({path: finish() for path, finish in copies.items()})


def _unchanging(path: str, leaf: Any) -> Any:
    """Return a leaf whose values do not change: a copy, unless it is an array of JAX or a scalar."""
    checked_leaf(path, leaf)
    if isinstance(leaf, jax.Array | np.generic) or not hasattr(leaf, "dtype"):
        return leaf
    if isinstance(leaf, Shards):
        return leaf.with_values([as_values(path, values).copy() for _, values in leaf.parts])
    return as_values(path, leaf).copy()

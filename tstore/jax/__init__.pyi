"""Types of the public names, written by tests/support/sync_stub.py from those in `tstore`."""

import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal

import tstore
from tstore import BackgroundSave, Keep, RestorePlan, Store
from tstore.checkpoint.background import InFlight
from tstore.checkpoint.job_store import Tiered
from tstore.checkpoint.policies import Policy
from tstore.checkpoint.request import Cast, Missing, PerHostRule
from tstore.checkpoint.series import OnError, OnSaved
from tstore.quantization.policy import QuantizeRules, Target

__all__ = ["Checkpointer", "explain", "metadata", "restore", "save", "save_async"]

class Checkpointer(tstore.Checkpointer):
    """A `tstore.Checkpointer` whose checkpoints are pytrees.

    Every process of the job makes the same calls. `save`, `restore` and `restore_latest` take pytrees as
    `tstore.jax.save_async` and `tstore.jax.restore` do. Policies may decide differently in different processes, so
    the processes share their decisions at each step, or with `EverySteps(10) & OnPreemption()` at every 10th. They
    do so through the coordination service of `jax.distributed`: if a process does not call `should_save` or
    `restore_latest` within `timeout` seconds of the others, all get a `DeadlineExceeded` that names it.

    Parameters
    ----------
    store, every, keep, codecs, timeout, in_flight, on_error, on_saved
        As `tstore.Checkpointer` takes them."""

    def __init__(
        self,
        store: str | os.PathLike[str] | Store | Tiered,
        *,
        every: int | Policy | None = None,
        keep: int | Keep | None = None,
        codecs: QuantizeRules | Target = None,
        timeout: float | None = None,
        in_flight: InFlight = "queue",
        on_error: OnError = "raise",
        on_saved: OnSaved | None = None,
    ) -> None: ...
    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        attributes: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        message: str = "",
        durability: Literal["fsync", "none"] = "fsync",
        timeout: float | None = None,
        overwrite: bool = False,
        priority: Literal["normal", "low"] | None = None,
    ) -> Coroutine[Any, Any, BackgroundSave]:
        """Start saving a pytree as a step, as `save_async` does, even if no policy asks for it.

        Raise what `save_async` raises, and the error of an earlier save once this one has begun."""

    def restore_latest(
        self, target: Any = None, *, fallback: bool = False, **options: Any
    ) -> Coroutine[Any, Any, Any]:
        """Restore the newest step as `restore` does, the same in all processes; return None if there is none.

        With `fallback` pass over damaged steps, as `tstore.Checkpointer.restore_latest` does."""

    def restore(self, step: int, target: Any = None, **options: Any) -> Coroutine[Any, Any, Any]:
        """Return a step as `tstore.jax.restore` does, with its options; wait for saves under way first.

        Raise what `tstore.jax.restore` raises, and the error of a save that failed."""

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

    Raise what `restore` raises, except `Corrupt` for damaged chunks."""

def metadata(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    only: str | list[str] | None = None,
    sharding: Callable[[str, Any], Any] | Any | None = None,
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
    {'epoch': 2, 'w': ShapeDtypeStruct(shape=(4,), dtype=float32)}"""

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
    {'w': Array([0., 1., 2., 3.], dtype=float32)}"""

def save(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    host: int | None = None,
    hosts: int | None = None,
    attempt: str | None = None,
    codecs: QuantizeRules | Target = None,
    metrics: Mapping[str, float] | None = None,
    attributes: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    message: str = "",
    durability: Literal["fsync", "none"] = "fsync",
    timeout: float | None = None,
    overwrite: bool = False,
    priority: Literal["normal", "low"] | None = None,
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
    1"""

def save_async(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    host: int | None = None,
    hosts: int | None = None,
    attempt: str | None = None,
    in_flight: InFlight = "queue",
    codecs: QuantizeRules | Target = None,
    metrics: Mapping[str, float] | None = None,
    attributes: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    message: str = "",
    durability: Literal["fsync", "none"] = "fsync",
    timeout: float | None = None,
    overwrite: bool = False,
    priority: Literal["normal", "low"] | None = None,
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
    As `tstore.save_async`, and `InvalidArgument` as `save`."""

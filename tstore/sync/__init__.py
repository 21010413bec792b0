"""The blocking API (`import tstore.sync as tstore`): the names of `tstore` without `await`.

One event loop in one daemon thread runs all calls of a process, so they also work from many threads and under a
running event loop, as in a notebook. A forked child gets a new loop. Ctrl-C cancels the call and waits until it
has ended, so that it writes nothing later; the append of a commit record is never interrupted. At exit the process
waits for the calls that its threads have started.

The types are in a stub, which `python -m tests.support.sync_stub` generates from the signatures of `tstore`:
Python's type system can't express "the same parameters, with a blocking store in place of an async one". `facade`
makes the blocking names. Names that are not defined here are made on first use: functions are blocking, types are
those of `tstore`, and so is `zarr`; `Checkpointer` is that of `checkpointer`; `jax` and `torch` are packages of
blocking names.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

import tstore as _async
from tstore import Commit, Retry
from tstore.core.data.casting import Casting
from tstore.core.format.arrays.indices import Index, Indexer
from tstore.core.hints import no_such_name
from tstore.core.runtime.event_loops import BACKGROUND
from tstore.core.runtime.pool import WORKERS
from tstore.core.store import Mode
from tstore.sync.facade import BLOCKING_TYPES, BlockingWrapper, blocking, iterated, unwrapped, wraps

__all__ = _async.__all__


class Array(BlockingWrapper):
    """A chunked array, or a view of one: indexing returns a view without I/O.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> with tstore.open("memory://of-array").transaction() as tx:
    ...     a = tx.create_array("a", shape=(4, 6), dtype="int32", chunks=(2, 3))
    ...     a.write(0)
    ...     a[1:3, ::2].write(7)
    ...     a[1].read()
    array([7, 0, 7, 0, 7, 0], dtype=int32)
    """

    @property
    def path(self) -> str:
        """The path of the array in its tree."""
        return self._wrapped.path

    shape = blocking(_async.Array.shape)
    ndim = blocking(_async.Array.ndim)
    size = blocking(_async.Array.size)
    nbytes = blocking(_async.Array.nbytes)
    dtype = blocking(_async.Array.dtype)
    chunks = blocking(_async.Array.chunks)
    chunksize = blocking(_async.Array.chunksize)
    attributes = blocking(_async.Array.attributes)
    attrs = blocking(_async.Array.attrs)
    dimension_names = blocking(_async.Array.dimension_names)
    fill_value = blocking(_async.Array.fill_value)
    sparse = blocking(_async.Array.sparse)
    codecs = blocking(_async.Array.codecs)

    @wraps(_async.Array.read)
    def read(self, out: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        array = self._wrapped
        source = array.parts.source
        values: np.ndarray[Any, Any] | None = None
        if isinstance(source, _async.Snapshot) and not BACKGROUND.is_running_here():
            values = source.read_in_this_thread(array, out, WORKERS)
        result: np.ndarray[Any, Any] = BACKGROUND.run(array.read(out)) if values is None else values
        return result

    map = blocking(_async.Array.map)
    explain = blocking(_async.Array.explain)

    @wraps(_async.Array.write)
    def write(self, values: Any, casting: Casting = "same_kind") -> None:
        BACKGROUND.run(self._wrapped.write(_read_if_array(values), casting))

    @wraps(_async.Array.append)
    def append(self, values: Any, axis: int = 0, casting: Casting = "same_kind") -> _async.Appended:
        appended: _async.Appended = BACKGROUND.run(self._wrapped.append(_read_if_array(values), axis, casting))
        return appended

    resize = blocking(_async.Array.resize)

    T = blocking(_async.Array.T)
    transpose = blocking(_async.Array.transpose)
    isel = blocking(_async.Array.isel)

    @property
    def oindex(self) -> Indexer[Array]:
        """Index each axis independently: `array.oindex[[0, 5], [1, 2, 7]]` has the shape (2, 3), as in Zarr."""
        return Indexer(lambda index: Array(self._wrapped.oindex[index]))

    @property
    def vindex(self) -> Indexer[Array]:
        """Index points: `array.vindex[[0, 5], [1, 2]]` has two values, as in Zarr.

        Arrays are broadcast together. Their axes come first, before those of slices, as in Dask.
        """
        return Indexer(lambda index: Array(self._wrapped.vindex[index]))

    __getitem__ = blocking(_async.Array.__getitem__)

    def __setitem__(self, index: Index, values: Any) -> None:
        """Write to the elements that an index selects, as `array[index].write(values)` does."""
        BACKGROUND.run(self._wrapped[index].write(_read_if_array(values)))

    __len__ = blocking(_async.Array.__len__)
    __bool__ = blocking(_async.Array.__bool__)
    __iter__ = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the values as `read` does, for `np.asarray(array)`."""
        if copy is False:
            raise ValueError(f"{self.path}: values are always read into new memory; omit copy=False")
        values: np.ndarray[Any, Any] = BACKGROUND.run(self._wrapped.read())
        return values if dtype is None else values.astype(dtype, copy=False)


def _read_if_array(values: Any) -> Any:
    """Return the values of a blocking array, which the array that it wraps can't convert; else the argument."""
    return values.read() if isinstance(values, Array) else values


class Snapshot(BlockingWrapper):
    """The tree of groups and arrays as of one version; it never changes."""

    version = blocking(_async.Snapshot.version)
    tags = blocking(_async.Snapshot.tags)

    paths = blocking(_async.Snapshot.paths)
    attributes = blocking(_async.Snapshot.attributes)
    array = blocking(_async.Snapshot.array)
    __getitem__ = blocking(_async.Snapshot.__getitem__)
    __contains__ = blocking(_async.Snapshot.__contains__)
    __iter__ = blocking(_async.Snapshot.__iter__)
    read_packed = blocking(_async.Snapshot.read_packed)
    patches = blocking(_async.Snapshot.patches)

    @wraps(_async.Snapshot.read_many)
    def read_many(
        self, views: Iterable[Array], out: Iterable[np.ndarray[Any, Any]] | None = None
    ) -> list[np.ndarray[Any, Any]]:
        values: list[np.ndarray[Any, Any]] = BACKGROUND.run(self._wrapped.read_many(map(unwrapped, views), out))
        return values


class Follower(BlockingWrapper):
    """The new versions of a store, from `Store.follow`: an iterator of snapshots that never ends."""

    @property
    def lock(self) -> threading.Lock:
        """Held by `update` while it changes arrays: a thread that reads them under it sees one version."""
        return self._wrapped.lock

    held = blocking(_async.Follower.held)
    update = blocking(_async.Follower.update)
    __next__ = blocking(_async.Follower.__anext__)

    def __iter__(self) -> Follower:
        return self


class Mapped(BlockingWrapper, Mapping[str, Any]):
    __doc__ = _async.Mapped.__doc__

    @property
    def copied(self) -> dict[str, str]:
        """The arrays that can't be mapped, and were read, with the reason by path."""
        return self._wrapped.copied

    __getitem__ = blocking(_async.Mapped.__getitem__)
    __iter__ = blocking(_async.Mapped.__iter__)
    __len__ = blocking(_async.Mapped.__len__)
    verified = blocking(_async.Mapped.verified)
    tree = blocking(_async.Mapped.tree)


class Transaction(BlockingWrapper):
    """Staged changes over a snapshot; `with` commits on exit and aborts on an exception."""

    @property
    def id(self) -> str:
        """The transaction's id in the log."""
        return self._wrapped.id

    @property
    def version(self) -> int | None:
        """The committed version, None before the commit."""
        return self._wrapped.version

    @property
    def retries(self) -> list[Retry]:
        """A `Retry` for each time that the commit was tried again."""
        return self._wrapped.retries

    @wraps(_async.Transaction.create_array)
    def create_array(self, *args: Any, data: Any = None, **kwargs: Any) -> Array:
        created = self._wrapped.create_array(*args, data=_read_if_array(data), **kwargs)
        return Array(BACKGROUND.run(created))

    copy_array = blocking(_async.Transaction.copy_array)
    create_group = blocking(_async.Transaction.create_group)
    array = blocking(_async.Transaction.array)
    __getitem__ = blocking(_async.Transaction.__getitem__)
    __iter__ = None
    paths = blocking(_async.Transaction.paths)
    delete = blocking(_async.Transaction.delete)
    commit = blocking(_async.Transaction.commit)
    deliver = blocking(_async.Transaction.deliver)
    abort = blocking(_async.Transaction.abort)

    def __enter__(self) -> Transaction:
        BACKGROUND.run(self._wrapped.__aenter__())
        return self

    __exit__ = blocking(_async.Transaction.__aexit__)


class Store(BlockingWrapper):
    """Everything under one URL. Readers never block; writers can conflict only when they commit."""

    @property
    def mode(self) -> Mode:
        """The mode in which the store was opened."""
        return self._wrapped.mode

    @property
    def uuid(self) -> str:
        """The identity of the store, chosen at random at its creation."""
        return self._wrapped.uuid

    url = blocking(_async.Store.url)
    traffic = blocking(_async.Store.traffic)

    transaction = blocking(_async.Store.transaction)
    snapshot = blocking(_async.Store.snapshot)
    tags = blocking(_async.Store.tags)
    outcome = blocking(_async.Store.outcome)
    pending = blocking(_async.Store.pending)
    finish = blocking(_async.Store.finish)
    diff = blocking(_async.Store.diff)
    verify = blocking(_async.Store.verify)
    repair = blocking(_async.Store.repair)
    collect = blocking(_async.Store.collect)
    follow = blocking(_async.Store.follow)
    close = blocking(_async.Store.close)

    @wraps(_async.Store.history)
    def history(self) -> Iterator[Commit]:
        yield from iterated(self._wrapped.history())

    def __enter__(self) -> Store:
        return self

    __exit__ = blocking(_async.Store.__aexit__)


BLOCKING_TYPES.update(
    {
        _async.Array: Array,
        _async.Follower: Follower,
        _async.Mapped: Mapped,
        _async.Snapshot: Snapshot,
        _async.Store: Store,
        _async.Transaction: Transaction,
    }
)


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        globals()[name] = importlib.import_module("tstore.sync.checkpointer").Checkpointer
        return globals()[name]
    if name in ("jax", "torch"):
        return importlib.import_module(f"{__name__}.{name}")
    if name != "zarr" and name not in __all__:
        raise no_such_name(__name__, name)
    awaited = getattr(_async, name)
    value = globals()[name] = blocking(awaited) if inspect.isroutine(awaited) else awaited
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "jax", "torch", "zarr"])

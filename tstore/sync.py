"""The blocking API: the names of `tstore` without `await`, by `import tstore.sync as tstore`.

One event loop in one daemon thread runs all calls of a process, so they also work from many threads and under a
running event loop, as in a notebook. A forked child gets a new loop. Ctrl-C cancels the call and waits until it
has ended, so that it writes nothing later; appending a record is never cut short. At exit the process waits for
calls that its threads have begun.

The types are in `sync.pyi`, which `python -m tests.support.sync_stub` generates from the signatures of `tstore`:
Python's type system can't express "the same parameters, with a blocking store in place of an async one".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np

import tstore as _async
from tstore import (
    ArrayDiff,
    Bits,
    Cache,
    CollectReport,
    Commit,
    CopyReport,
    Diff,
    Keep,
    MinSqnr,
    PendingTransaction,
    QuantizedArray,
    QuantizeReport,
    Retry,
    Shards,
    errors,
    sharding,
)
from tstore.runtime.event_loops import BackgroundLoop
from tstore.store import Mode

__all__ = [
    "Array",
    "ArrayDiff",
    "Bits",
    "Cache",
    "CollectReport",
    "Commit",
    "CopyReport",
    "Diff",
    "Keep",
    "MinSqnr",
    "PendingTransaction",
    "QuantizeReport",
    "QuantizedArray",
    "Retry",
    "Shards",
    "Snapshot",
    "Store",
    "Transaction",
    "copy",
    "errors",
    "open",
    "quantize",
    "quantize_report",
    "restore",
    "save",
    "sharding",
    "steps",
]

_loop = BackgroundLoop()

_iterations: set[AsyncIterator[Any]] = set()
"""Iterations under way, referenced here lest Python's cycle collector close one with its inner generators."""


class _Twin:
    """The blocking counterpart of an async object, to which all calls are delegated."""

    def __init__(self, wrapped: Any) -> None:
        self._async = wrapped

    def __repr__(self) -> str:
        return repr(self._async).replace("<tstore.", "<tstore.sync.", 1)


def _blocking(call: Any) -> Any:
    """Return the blocking version of a function, method or property, which takes and returns blocking objects."""
    if isinstance(call, property):
        return property(_blocking(call.fget))

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = call(*map(_unwrap, args), **{name: _unwrap(value) for name, value in kwargs.items()})
        if inspect.iscoroutine(result):
            result = _loop.run(result)
        twin = _TWINS.get(type(result))
        return result if twin is None else twin(result)

    wrapper.__module__ = __name__
    wrapper.__doc__ = call.__doc__ and call.__doc__.replace("`async with`", "`with`")
    return wrapper


def _unwrap(value: Any) -> Any:
    return value._async if isinstance(value, _Twin) else value


class Array(_Twin):
    """A chunked array, or a view of one: indexing returns a view without I/O."""

    @property
    def path(self) -> str:
        """The path of the array in its tree."""
        return self._async.path

    shape = _blocking(_async.Array.shape)
    ndim = _blocking(_async.Array.ndim)
    size = _blocking(_async.Array.size)
    nbytes = _blocking(_async.Array.nbytes)
    dtype = _blocking(_async.Array.dtype)
    chunks = _blocking(_async.Array.chunks)
    attributes = _blocking(_async.Array.attributes)
    dimension_names = _blocking(_async.Array.dimension_names)
    fill_value = _blocking(_async.Array.fill_value)
    codecs = _blocking(_async.Array.codecs)

    read = _blocking(_async.Array.read)
    write = _blocking(_async.Array.write)
    resize = _blocking(_async.Array.resize)

    __getitem__ = _blocking(_async.Array.__getitem__)
    __iter__ = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the values as `read` does, for `np.asarray(array)`."""
        if copy is False:
            raise ValueError(f"{self.path}: values are always read into new memory; omit copy=False")
        values: np.ndarray[Any, Any] = _loop.run(self._async.read())
        return values if dtype is None else values.astype(dtype, copy=False)


class Snapshot(_Twin):
    """The tree of groups and arrays as of one version; it never changes."""

    version = _blocking(_async.Snapshot.version)
    tags = _blocking(_async.Snapshot.tags)

    paths = _blocking(_async.Snapshot.paths)
    attributes = _blocking(_async.Snapshot.attributes)
    array = _blocking(_async.Snapshot.array)


class Transaction(_Twin):
    """Staged changes over a snapshot; `with` commits on exit and aborts on an exception."""

    @property
    def id(self) -> str:
        """The transaction's id in the log."""
        return self._async.id

    @property
    def version(self) -> int | None:
        """The committed version, None before the commit."""
        return self._async.version

    @property
    def retries(self) -> list[Retry]:
        """The newer commits after which the commit was tried again."""
        return self._async.retries

    create_array = _blocking(_async.Transaction.create_array)
    create_group = _blocking(_async.Transaction.create_group)
    array = _blocking(_async.Transaction.array)
    paths = _blocking(_async.Transaction.paths)
    delete = _blocking(_async.Transaction.delete)
    commit = _blocking(_async.Transaction.commit)
    abort = _blocking(_async.Transaction.abort)

    def __enter__(self) -> Transaction:
        _loop.run(self._async.__aenter__())
        return self

    __exit__ = _blocking(_async.Transaction.__aexit__)


class Store(_Twin):
    """Everything under one URL. Readers never block; writers can conflict only when they commit."""

    @property
    def mode(self) -> Mode:
        """The mode in which the store was opened."""
        return self._async.mode

    @property
    def uuid(self) -> str:
        """The identity of the store, chosen at random at its creation."""
        return self._async.uuid

    url = _blocking(_async.Store.url)
    traffic = _blocking(_async.Store.traffic)

    transaction = _blocking(_async.Store.transaction)
    snapshot = _blocking(_async.Store.snapshot)
    tags = _blocking(_async.Store.tags)
    outcome = _blocking(_async.Store.outcome)
    pending = _blocking(_async.Store.pending)
    finish = _blocking(_async.Store.finish)
    diff = _blocking(_async.Store.diff)
    verify = _blocking(_async.Store.verify)
    repair = _blocking(_async.Store.repair)
    collect = _blocking(_async.Store.collect)
    close = _blocking(_async.Store.close)

    @functools.wraps(_async.Store.history)
    def history(self) -> Iterator[Commit]:  # noqa: D102 - has the docstring of the method it wraps
        commits = self._async.history()

        async def next_commit() -> Commit | None:  # runs on the loop, which can then close an abandoned iteration
            commit: Commit | None = await anext(commits, None)
            return commit

        _iterations.add(commits)
        try:
            while (commit := _loop.run(next_commit())) is not None:
                yield commit
        finally:
            _iterations.discard(commits)

    def __enter__(self) -> Store:
        return self

    __exit__ = _blocking(_async.Store.__aexit__)


_TWINS: dict[type, type[_Twin]] = {
    _async.Array: Array,
    _async.Snapshot: Snapshot,
    _async.Store: Store,
    _async.Transaction: Transaction,
}

open = _blocking(_async.open)
save = _blocking(_async.save)
restore = _blocking(_async.restore)
steps = _blocking(_async.steps)
copy = _blocking(_async.copy)
quantize = _blocking(_async.quantize)
quantize_report = _blocking(_async.quantize_report)

"""The names of `tstore`, blocking: `import tstore.sync as tstore`.

One event loop in one daemon thread serves all calls of a process, so they also work under a running loop, as in
a notebook, and from many threads. A forked child gets a loop of its own. Ctrl-C cancels the call and waits until
it has ended, so that nothing writes behind the caller's back; the outcome of a commit is always learned.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

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
from tstore.chunks.grid import Index
from tstore.errors import Misuse
from tstore.kv.base import Backend
from tstore.kv.trace import Traffic
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

P = ParamSpec("P")
R = TypeVar("R")

_THREAD = "tstore-loop"


class _Loop:
    """The event loop of this process, started at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, call: Coroutine[Any, Any, R]) -> R:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name=_THREAD, daemon=True).start()
            loop = self._loop
        if threading.current_thread().name == _THREAD:
            call.close()
            raise Misuse("a blocking call of tstore.sync was made inside of its own loop; await tstore's instead")
        ended = threading.Event()
        tasks: list[asyncio.Task[R]] = []

        def start() -> None:
            task = loop.create_task(call)
            tasks.append(task)
            task.add_done_callback(lambda _: ended.set())

        loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except BaseException:
            loop.call_soon_threadsafe(_cancel, tasks)
            ended.wait()
            if not tasks[0].cancelled():
                tasks[0].exception()  # looked at, so that it is not reported as lost
            raise
        return tasks[0].result()


def _cancel(tasks: list[asyncio.Task[R]]) -> None:
    tasks[0].cancel()


_loop = _Loop()

_iterations: set[AsyncIterator[Any]] = set()
"""Those under way, held so that a cyclic garbage collection does not close one together with those inside it."""


def _after_fork() -> None:
    global _loop  # noqa: PLW0603 - the parent's loop has no thread in the child
    _loop = _Loop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Twin:
    """A blocking object beside the awaited one that does the work."""

    def __init__(self, awaited: Any) -> None:
        self._awaited = awaited

    def __repr__(self) -> str:
        return repr(self._awaited).replace("<tstore.", "<tstore.sync.", 1)


def _blocking(call: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    """The same function or method, blocking; blocking objects among its arguments stand for awaited ones."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        plain = [a._awaited if isinstance(a, _Twin) else a for a in args]
        named = {k: v._awaited if isinstance(v, _Twin) else v for k, v in kwargs.items()}
        return _loop.run(call(*plain, **named))  # type: ignore[arg-type]

    return wrapper


def _same(of: type, name: str) -> Any:
    """The property of the awaited class, read from the awaited object."""
    return property(lambda self: getattr(self._awaited, name), doc=getattr(of, name).__doc__)


class Array(_Twin):
    """A chunked array, or a view of one: indexing gives a view and does no I/O."""

    path: str = property(lambda self: self._awaited.path, doc="Where the array stands in its tree.")  # type: ignore[assignment]
    shape: tuple[int, ...] = _same(_async.Array, "shape")
    ndim: int = _same(_async.Array, "ndim")
    size: int = _same(_async.Array, "size")
    nbytes: int = _same(_async.Array, "nbytes")
    dtype: np.dtype[Any] = _same(_async.Array, "dtype")
    chunks: tuple[int, ...] = _same(_async.Array, "chunks")
    attributes: dict[str, Any] = _same(_async.Array, "attributes")
    dimension_names: tuple[str | None, ...] | None = _same(_async.Array, "dimension_names")
    fill_value: Any = _same(_async.Array, "fill_value")
    codecs: list[dict[str, Any]] = _same(_async.Array, "codecs")

    read = _blocking(_async.Array.read)
    write = _blocking(_async.Array.write)
    resize = _blocking(_async.Array.resize)

    __iter__ = None

    def __getitem__(self, index: Index) -> Array:
        return Array(self._awaited[index])


class Snapshot(_Twin):
    """What a store holds as of one version."""

    version: int = _same(_async.Snapshot, "version")
    tags: dict[str, int] = _same(_async.Snapshot, "tags")

    def paths(self) -> list[str]:
        """The paths of all arrays, sorted."""
        found: list[str] = self._awaited.paths()
        return found

    def attributes(self, path: str = "") -> dict[str, Any]:
        """The attributes of the array or group at a path; empty for a group that has none."""
        found: dict[str, Any] = self._awaited.attributes(path)
        return found

    def array(self, path: str) -> Array:
        """The array at a path; `NotFound` names near paths where there is none."""
        return Array(_loop.run(self._awaited.array(path)))


class Transaction(_Twin):
    """Staged changes over a snapshot; `with` commits on exit and aborts on an exception."""

    version: int | None = property(  # type: ignore[assignment]
        lambda self: self._awaited.version, doc="The version it became, None before."
    )
    retries: list[Retry] = property(  # type: ignore[assignment]
        lambda self: self._awaited.retries, doc="What came in the way of the commit and was overcome."
    )
    id: str = property(lambda self: self._awaited.id, doc="Its id in the log.")  # type: ignore[assignment]

    create_group = _blocking(_async.Transaction.create_group)
    paths = _blocking(_async.Transaction.paths)
    delete = _blocking(_async.Transaction.delete)
    commit = _blocking(_async.Transaction.commit)
    abort = _blocking(_async.Transaction.abort)

    @functools.wraps(_async.Transaction.create_array)
    def create_array(self, *args: Any, **kwargs: Any) -> Array:
        """See `tstore.Transaction.create_array`."""
        return Array(_loop.run(self._awaited.create_array(*args, **kwargs)))

    def array(self, path: str) -> Array:
        """The array at a path, as this transaction sees it, for reading and writing; `NotFound`."""
        return Array(_loop.run(self._awaited.array(path)))

    def __enter__(self) -> Transaction:
        _loop.run(self._awaited.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _loop.run(self._awaited.__aexit__(kind, error, trace))


class Store(_Twin):
    """Everything under one URL. Readers never block; writers meet only in the commit."""

    url: str = _same(_async.Store, "url")
    traffic: Traffic | None = _same(_async.Store, "traffic")
    mode: Mode = property(lambda self: self._awaited.mode, doc='"r", "r+", "a" or "x".')  # type: ignore[assignment]
    uuid: str = property(lambda self: self._awaited.uuid, doc="Made with the store.")  # type: ignore[assignment]

    tags = _blocking(_async.Store.tags)
    outcome = _blocking(_async.Store.outcome)
    transactions = _blocking(_async.Store.transactions)
    finish = _blocking(_async.Store.finish)
    diff = _blocking(_async.Store.diff)
    verify = _blocking(_async.Store.verify)
    collect = _blocking(_async.Store.collect)

    @functools.wraps(_async.Store.transaction)
    def transaction(self, *args: Any, **kwargs: Any) -> Transaction:
        """See `tstore.Store.transaction`."""
        return Transaction(self._awaited.transaction(*args, **kwargs))

    def snapshot(self, at: int | str | datetime.datetime | None = None) -> Snapshot:
        """The state as of a version, a tag, or a time; by default the newest."""
        return Snapshot(_loop.run(self._awaited.snapshot(at)))

    def close(self) -> None:
        """Releases open files; the store can still be used, and opens them again."""
        _loop.run(self._awaited.close())

    def history(self) -> Iterator[Commit]:
        """Every commit, newest first."""
        commits = self._awaited.history()

        async def following() -> Commit | None:  # first run by the loop, which so closes an iteration left early
            commit: Commit | None = await anext(commits, None)
            return commit

        _iterations.add(commits)
        try:
            while (commit := _loop.run(following())) is not None:
                yield commit
        finally:
            _iterations.discard(commits)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@functools.wraps(_async.open)
def open(
    url: str | os.PathLike[str] | Backend,
    mode: Mode = "a",
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: Cache | str | os.PathLike[str] | None = None,
) -> Store:
    """The store at a URL, for blocking use."""
    return Store(_loop.run(_async.open(url, mode, storage_options=storage_options, cache=cache)))


save = _blocking(_async.save)
restore = _blocking(_async.restore)
steps = _blocking(_async.steps)
copy = _blocking(_async.copy)
quantize = _blocking(_async.quantize)
quantize_report = _blocking(_async.quantize_report)

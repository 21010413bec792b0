"""Pickling of stores, snapshots and arrays: a pickle opens the same store in another process.

1. The pickle of a `Store` has its URL, storage options and cache; that of a `Snapshot` also the version and the
   checksum of its record; that of an `Array` of a snapshot also the path and the view. None has values.
2. Unpickling opens the store, blocking. Objects of one process that were unpickled from equal pickles share it.
3. Storage options may have a token: treat a pickle of a store as a secret.
4. If unpickling fails, the object raises the reason when it is used. An error raised earlier would end a worker of
   a `multiprocessing.Pool`, and the parent would wait for its result for ever.
5. What belongs to its process can't be pickled: transactions and their arrays, checkpointers, saves in the
   background, and stores on a `Storage`.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from tstore.core.array import Appended, Array, viewed
from tstore.core.format.arrays.views import View
from tstore.core.log.reader import LogReader
from tstore.core.runtime.event_loops import BACKGROUND
from tstore.core.snapshot import Snapshot
from tstore.core.storage.connect import Address
from tstore.core.store import Mode, Store, open
from tstore.core.transactions.handles import HandleSource
from tstore.core.transactions.transaction import Transaction
from tstore.errors import Misuse, NotAStore, TimelineChanged

__all__ = ["raises_when_used", "refusal"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def raises_when_used(kind: type[_T]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorate a function that unpickles an object of a type: its error is raised when the object is used."""

    def decorate(unpickle: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(unpickle)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return unpickle(*args, **kwargs)
            except Exception as error:  # no error may end the process that unpickles
                return _unusable(kind, error)

        return wrapper

    return decorate


def _unusable(kind: type[_T], error: Exception) -> _T:
    class Unusable(kind):  # type: ignore[misc, valid-type]
        """An object that could not be opened when it was unpickled."""

        def __init__(self) -> None:
            """Do nothing: the constructor of the type would use the object."""

        def __getattribute__(self, name: str) -> Any:
            if name in ("__class__", "__reduce_ex__"):
                return object.__getattribute__(self, name)
            raise error.with_traceback(None)

        def __repr__(self) -> str:
            return f"<{kind.__module__}.{kind.__name__} that can't be used: {error}>"

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            return _unusable, (kind, error)

    return Unusable()


class _Version(NamedTuple):
    """A version of a store, by its number and the checksum of its record, b"" for version 0."""

    number: int
    check: bytes


_stores: WeakValueDictionary[str, Store] = WeakValueDictionary()
_snapshots: WeakValueDictionary[str, Snapshot] = WeakValueDictionary()


def _reduce_store(store: Store) -> tuple[Any, ...]:
    address = _address(store.log.reader)
    if store.marker is None:  # unpickling needs the uuid
        BACKGROUND.run(store.log.ensure_created())
    return _store, (address, store.uuid, "r" if store.mode == "r" else "r+")


@raises_when_used(Store)
def _store(address: Address, uuid: str, mode: Mode) -> Store:
    key = repr((address, uuid, mode))
    store = _stores.get(key)
    if store is None:
        store = _stores[key] = BACKGROUND.run(_opened(address, uuid, mode))
    return store


async def _opened(address: Address, uuid: str, mode: Mode) -> Store:
    store = await _open(address, mode)
    if store.uuid != uuid:
        raise TimelineChanged(f"{store.url} is another store than the one that was pickled; open it by its URL")
    return store


async def _open(address: Address, mode: Mode) -> Store:
    url, options, cache = address
    try:
        return await open(url, mode, storage_options=options, cache=cache)
    except NotAStore as error:
        if url.startswith("memory://"):
            raise NotAStore(
                f"{url} exists only in the process that created it; use a store on disk or a server"
            ) from error
        raise


def _reduce_snapshot(snapshot: Snapshot) -> tuple[Any, ...]:
    log = snapshot.log
    return _snapshot, (_address(log), BACKGROUND.run(_version(log, snapshot.version)))


@raises_when_used(Snapshot)
def _snapshot(address: Address, version: _Version) -> Snapshot:
    key = repr((address, version))
    snapshot = _snapshots.get(key)
    if snapshot is None:
        snapshot = _snapshots[key] = BACKGROUND.run(_snapshot_of(address, version))
    return snapshot


async def _snapshot_of(address: Address, version: _Version) -> Snapshot:
    store = await _open(address, "r")
    snapshot = await store.snapshot(version.number)
    if await _version(snapshot.log, version.number) != version:
        raise TimelineChanged(
            f"{snapshot.location}: another commit has this version than when the snapshot was pickled; the store "
            "was replaced, for example by a restored backup. Open the version that you want"
        )
    return snapshot


async def _version(log: LogReader, number: int) -> _Version:
    return _Version(number, (await log.stored(number)).check if number else b"")


def _reduce_array(array: Array) -> tuple[Any, ...]:
    source, path, view, _ = array.parts
    return _array, (source, path, view)


@raises_when_used(Array)
def _array(snapshot: Snapshot, path: str, view: View) -> Array:
    return viewed(BACKGROUND.run(snapshot.array(path)), view)


def _address(log: LogReader) -> Address:
    if log.address is None:
        raise Misuse(f"{log.storage.url}: a store on a Storage can't be pickled; open it by its URL")
    return log.address


def _reduce_appended(appended: Appended) -> tuple[Any, ...]:
    return _appended, (appended.path, appended.region)


def _appended(path: str, region: tuple[slice, ...]) -> Appended:
    return Appended(path, lambda: region)


def refusal(message: str) -> Callable[[Any], NoReturn]:
    """Return a `__reduce__` that raises `Misuse`."""

    def refuse(_: Any) -> NoReturn:
        raise Misuse(message)

    return refuse


_refuse = refusal(
    "a transaction and its arrays belong to the process that began it and can't be pickled: pass the store, and "
    "begin a transaction there, of the same name for one commit of all processes"
)

copyreg.pickle(Store, _reduce_store)
copyreg.pickle(Snapshot, _reduce_snapshot)
copyreg.pickle(Array, _reduce_array)
copyreg.pickle(Appended, _reduce_appended)
copyreg.pickle(Transaction, _refuse)
copyreg.pickle(HandleSource, _refuse)

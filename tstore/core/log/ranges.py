"""Verified ranges of objects, cached as what they were decoded to, up to a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import numpy as np

from tstore.core.storage.base import Storage
from tstore.core.storage.cache import forget
from tstore.errors import Corrupt, NotFound

__all__ = ["Ranges", "read_range"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_CACHED_BYTES = 32 << 20


class Ranges(Generic[K, V]):
    """A cache of decoded ranges, which threads may share; the most recently used one always stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cached: OrderedDict[K, tuple[V, int]] = OrderedDict()  # with their lengths
        self._size = 0

    def get(self, key: K) -> V | None:
        """Return what is cached for a key, or None."""
        with self._lock:
            if key not in self._cached:
                return None
            self._cached.move_to_end(key)
            return self._cached[key][0]

    def __contains__(self, key: object) -> bool:
        return key in self._cached

    def put(self, key: K, value: V, length: int) -> V:
        """Cache a decoded range of this length, and return it, or what another thread has cached meanwhile."""
        with self._lock:
            cached, _ = self._cached.setdefault(key, (value, length))
            if cached is value:
                self._size += length
            while self._size > _CACHED_BYTES and len(self._cached) > 1:
                _, (_, evicted) = self._cached.popitem(last=False)
                self._size -= evicted
        return cached


def read_range(storage: Storage, key: str, offset: int, length: int, decode: Callable[[bytes], V]) -> V:
    """Return what `decode` makes of a range of an object; blocking.

    Raise `NotFound` if the object is missing, or `Corrupt` with the URL if it is damaged.
    """
    try:
        try:
            return decode(_read(storage, key, offset, length))
        except Corrupt:
            if not forget(storage, key):
                raise
            return decode(_read(storage, key, offset, length))  # the damage may have been in a cached copy
    except NotFound as error:
        raise NotFound(f"{storage.url}: {key} is missing; restore it from a copy of the store") from error
    except Corrupt as error:
        raise Corrupt(f"{storage.url}: {error}") from error


def _read(storage: Storage, key: str, offset: int, length: int) -> bytes:
    data = np.empty(length, np.uint8)  # takes no memory until it is filled, should the object be shorter
    storage.reader(key).read_into(offset, [data.data], length)
    return data.tobytes()

"""A bounded cache of results, keyed by the checksums of the chunks from which they were computed.

Equal chunks have equal statistics in any version, path or store. So every version that shares the chunks of an
array shares its results, and no result is ever out of date.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

__all__ = ["RESULTS", "ResultCache", "result_key"]


def result_key(parts: Iterable[bytes]) -> bytes:
    """Return a hash of the parts and of the boundaries between them."""
    hashed = hashlib.blake2b(digest_size=32)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()


class ResultCache:
    """A cache of at most `limit` bytes of results; the least recently used are dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._results: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()  # event loops of several threads may use it

    def get(self, key: bytes) -> Any:
        """Return the result with this key, or None."""
        with self._lock:
            if key not in self._results:
                return None
            self._results.move_to_end(key)
            return self._results[key][0]

    def put(self, key: bytes, result: Any, size: int) -> None:
        """Keep a result of about `size` bytes, unless it is larger than the limit."""
        with self._lock:
            if key in self._results:
                self._size -= self._results.pop(key)[1]
            if size > self._limit:
                return
            self._results[key] = (result, size)
            self._size += size
            while self._size > self._limit:
                self._size -= self._results.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._results.clear()
            self._size = 0

    @property
    def size(self) -> int:
        """The bytes of all results."""
        return self._size


RESULTS = ResultCache(16 << 20)
"""The results of this process."""

"""Dicts with keys that other programs chose.

Python hashes text and bytes with a secret, but numbers without one. So a file can choose numbers, even small and
different ones, so that each is inserted only after a look at most of those before it: 100,000 take a minute.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["NumberKeys"]

_MAX_SECONDS = 5.0  # of CPU; a million numbers that were not chosen to collide take less than one


class NumberKeys:
    """Inserts the keys of all dicts of one file, until those that are not text have taken too long."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def insert(self, target: dict[Any, Any], key: Any, value: Any) -> None:
        """Do `target[key] = value`; raise `ValueError` if all such calls have taken more than 5 s of CPU."""
        if isinstance(key, (str, bytes)):
            target[key] = value
            return
        start = time.thread_time()
        target[key] = value
        self._seconds += time.thread_time() - start
        if self._seconds > _MAX_SECONDS:
            raise ValueError("numbers as keys of dicts collide")

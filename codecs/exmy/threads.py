"""Parallel work on the parts of an array, in threads: the kernels release the GIL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from exmy.errors import SizeError
from exmy.reference import TILE

__all__ = ["PART_LENGTH", "check_threads", "run_parts", "split_at_tiles"]

PART_LENGTH = 1 << 20
"""The least number of elements in a part (the last may have fewer), so that starting its work costs little."""


def check_threads(threads: int) -> int:
    """Return the number of threads as an int. Raise `SizeError` unless it is an integer of at least 1."""
    if isinstance(threads, bool) or not isinstance(threads, (int, np.integer)) or threads < 1:
        raise SizeError(f"threads is {threads!r}; expected an integer of at least 1")
    return int(threads)


def split_at_tiles(count: int, threads: int) -> list[tuple[int, int]]:
    """Split `count` elements at tile boundaries; return the bounds (low, high) of the parts.

    One thread or few elements get a single part.
    """
    if threads == 1 or count < 2 * PART_LENGTH:
        return [(0, count)]
    step = -(-max(PART_LENGTH, -(-count // (threads * 4))) // TILE) * TILE
    return [(low, min(low + step, count)) for low in range(0, count, step)]


def run_parts(work: Callable[[int, int], Any], parts: Iterable[tuple[int, int]], threads: int) -> None:
    """Call work(low, high) for all parts, on up to `threads` threads. Raise the error of the first that fails."""
    parts = list(parts)
    if threads == 1 or len(parts) < 2:
        for part in parts:
            work(*part)
        return
    with ThreadPoolExecutor(min(threads, len(parts)), thread_name_prefix="exmy") as pool:
        for future in [pool.submit(work, *part) for part in parts]:
            future.result()

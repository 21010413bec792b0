"""Keys of dicts that a hostile writer chooses so that Python finds few of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import numpy.typing as npt

__all__ = ["equal_hashes", "long_walks", "tuples_of_equal_hash"]

_MASK = (1 << 64) - 1
_MODULUS = (1 << 61) - 1  # of the hashes of numbers
_PRIME_1, _PRIME_2, _PRIME_5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x27D4EB2F165667C5,
)  # of the hashes of tuples


def equal_hashes(length: int) -> list[int]:
    """Return numbers whose hashes are all 0."""
    return [number * _MODULUS for number in range(1, length + 1)]


def tuples_of_equal_hash(length: int) -> list[tuple[int, int]]:
    """Return pairs of numbers of 64 bits that have one hash."""
    return list(islice(_tuples(), length))


def _tuples() -> Iterator[tuple[int, int]]:
    rotated = 12345 * pow(_PRIME_1, -1, 1 << 64) & _MASK
    wanted = (rotated >> 31 | rotated << 33) & _MASK
    for first in count(1):
        state = (_PRIME_5 + first * _PRIME_2) & _MASK
        state = (state << 31 | state >> 33) * _PRIME_1 & _MASK
        second = (wanted - state) * pow(_PRIME_2, -1, 1 << 64) & _MASK
        if second < _MODULUS:
            yield first, second


def long_walks(bits: int) -> list[int]:
    """Return small numbers with different hashes, for a dict of 2 ** `bits` places.

    The first half fills places one after the other in the order in which a dict tries them; each of the second
    half walks through many of these.
    """
    size = 1 << bits
    mask, length = np.uint64(size - 1), size // 3 - 1
    run = np.empty(length, np.int64)
    place = 1
    for i in range(length):
        run[i] = place
        place = (5 * place + 1) % size
    order = np.full(size, length, np.int64)
    order[run] = np.arange(length)
    late: list[npt.NDArray[np.uint64]] = []
    for start in count(size, 1 << 20):
        numbers = np.arange(start, start + (1 << 20), dtype=np.uint64)
        places, rest = numbers & mask, numbers.copy()
        walking = order[places.astype(np.int64)] < length
        for _ in range(6):
            rest >>= np.uint64(5)
            places = (places * np.uint64(5) + rest + np.uint64(1)) & mask
            walking &= order[places.astype(np.int64)] < length
        late.append(numbers[walking & (order[places.astype(np.int64)] < length // 2)])
        if sum(map(len, late)) >= length:
            break
    return [*run.tolist(), *np.concatenate(late)[:length].tolist()]

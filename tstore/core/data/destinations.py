"""Reads into the caller's arrays: whether these share memory, and which a failed read leaves partly filled."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.data.pieces import Piece, ReadJob, StackJob
from tstore.errors import InvalidArgument, bullet_list

__all__ = ["check_distinct", "note_partly_read", "partly_read"]

_MAX_WORK = 10_000  # candidates that NumPy tries when it searches for an element shared by two arrays


def check_distinct(arrays: Iterable[tuple[str, npt.NDArray[Any]]]) -> None:
    """Raise `InvalidArgument`, naming both, if two arrays share memory; columns of one array do not."""
    spans = [(*np.lib.array_utils.byte_bounds(array), name, array) for name, array in arrays if array.size]
    spans.sort(key=operator.itemgetter(0))
    reaching: list[tuple[int, str, npt.NDArray[Any]]] = []  # arrays that end after the start of the next one
    for start, stop, name, array in spans:
        reaching = [span for span in reaching if span[0] > start]
        for _, other, memory in reaching:
            if _may_share(array, memory):
                raise InvalidArgument(
                    f"{name}: shares memory with {other}, and each would overwrite the other; pass arrays with "
                    "memory of their own, or read one of the two"
                )
        reaching.append((stop, name, array))


def _may_share(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MAX_WORK)  # type: ignore[arg-type]  # it takes any number
    except np.exceptions.TooHardError:
        return True


def partly_read(
    jobs: Sequence[ReadJob | StackJob],
    begun: Sequence[Sequence[Piece]],
    ended: Collection[Sequence[Piece]],
    remaining: Iterable[Sequence[Piece]],
) -> set[str]:
    """Return the paths of the arrays that a failed read has partly filled.

    `begun` and `ended` are the batches of pieces that had begun and ended; the `remaining` ones had not begun.
    """
    done = set(map(id, ended))
    failed = [batch for batch in begun if id(batch) not in done]
    changed = _paths(begun) | {job.path for job in jobs if job.meta.sparse}  # fill values are stored before
    return changed & _paths(itertools.chain(failed, remaining))


def _paths(batches: Iterable[Sequence[Piece]]) -> set[str]:
    return {job.path for batch in batches for piece in batch for job in piece.jobs}


def note_partly_read(error: BaseException, paths: Collection[str]) -> None:
    """Add to an error which of the caller's arrays now have a mix of old and new values."""
    if paths:
        error.add_note(
            "arrays that now have some of their new values, but not all (others have all or none):"
            + bullet_list(sorted(paths))
        )

"""Counted work: what a call costs, in numbers that do not depend on how busy the machine is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["CountedText", "Work", "counted_work"]


class Work:
    """The lines of tstore that were executed, and the comparisons of `CountedText`."""

    def __init__(self) -> None:
        self.steps = 0


@contextlib.contextmanager
def counted_work() -> Iterator[Work]:
    """Count the work of this thread during the block; of work in C, only the comparisons of `CountedText`."""
    work = Work()

    def count(_frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        work.steps += event == "line"
        return count

    def enter(frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        return count if str(frame.f_globals.get("__name__")).startswith("tstore") else None

    traced, compared = sys.gettrace(), CountedText.comparisons
    sys.settrace(enter)
    try:
        yield work
    finally:
        sys.settrace(traced)
        work.steps += CountedText.comparisons - compared


class CountedText(str):
    """Text that counts its comparisons, such as those of a search through a sequence."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedText.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__

"""Warnings that are attributed to the user's line, not to the line of the library that warns.

The line is looked for in this order:

1. On the stack of the thread that warns: the innermost frame outside of the libraries and of Python's own modules.
2. For a library's own threads and tasks: in the other threads and tasks that wait for a library.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["LIBRARIES", "Place", "users_place", "warn"]

LIBRARIES = {"exmy"}
"""The packages to skip when looking for the user's line; a package built on exmy adds its name."""


class Place(NamedTuple):
    """A line of source code, and the registry of the warnings already shown for its module."""

    filename: str
    line: int
    module: str
    shown: dict[Any, Any]


def warn(message: str, category: type[Warning] = UserWarning, place: Place | None = None) -> None:
    """Issue a warning for a place, by default the user's line."""
    filename, line, module, shown = place or users_place()
    warnings.warn_explicit(message, category, filename, line, module, shown)


def users_place() -> Place:
    """Return the line of user code that is calling the library."""
    frame = _caller(_outward(sys._getframe(1))) or next(_waiting_callers(), None)
    if frame is None:
        return Place("exmy", 0, "exmy", {})
    names = frame.f_globals
    shown = names.setdefault("__warningregistry__", {})
    return Place(frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<string>"), shown)


def _caller(frames: Iterable[FrameType]) -> FrameType | None:
    """Return the innermost frame of user code that calls a library, None if there is none.

    `frames` starts with the innermost. The search ends at the frame that runs an event loop: the code that started
    the loop did not call the task.
    """
    in_library = False
    for frame in frames:
        if _runs_event_loop(frame):
            return None
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in LIBRARIES:
            in_library = True
        elif package not in sys.stdlib_module_names:
            return frame if in_library else None
    return None


def _waiting_callers() -> Iterator[FrameType]:
    """Yield the frames from which other threads and tasks call a library, those of the main thread first."""
    import asyncio  # only here: codecs do not need it

    main = threading.main_thread().ident
    for _, innermost in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        frames = list(_outward(innermost))
        if (frame := _caller(frames)) is not None:
            yield frame
        for loop in [frame.f_locals.get("self") for frame in frames if _runs_event_loop(frame)]:
            for task in asyncio.all_tasks(loop):
                if (frame := _caller(reversed(list(_inward(task.get_coro()))))) is not None:
                    yield frame


def _runs_event_loop(frame: FrameType) -> bool:
    return frame.f_code.co_name == "run_forever" and frame.f_globals.get("__name__") == "asyncio.base_events"


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _inward(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of those that it awaits."""
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame
        coroutine = coroutine.cr_await

"""The blocking `Checkpointer`."""

from __future__ import annotations

from typing import Any

import tstore as _async
from tstore.sync.facade import BlockingWrapper, blocking, call_unwrapped, wraps

__all__ = ["Checkpointer"]


class Checkpointer(BlockingWrapper):  # noqa: D101 - has the docstring of the class it wraps
    __module__ = "tstore.sync"
    __doc__ = (_async.Checkpointer.__doc__ or "").replace("`async with`", "`with`")

    @wraps(_async.Checkpointer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(call_unwrapped(_async.Checkpointer, *args, **kwargs))

    preempted = blocking(_async.Checkpointer.preempted)
    unsaved = blocking(_async.Checkpointer.unsaved)

    should_save = blocking(_async.Checkpointer.should_save)
    save = blocking(_async.Checkpointer.save)
    latest = blocking(_async.Checkpointer.latest)
    best = blocking(_async.Checkpointer.best)
    steps = blocking(_async.Checkpointer.steps)
    tiers = blocking(_async.Checkpointer.tiers)
    restore_latest = blocking(_async.Checkpointer.restore_latest)
    restore = blocking(_async.Checkpointer.restore)
    rollback = blocking(_async.Checkpointer.rollback)
    wait = blocking(_async.Checkpointer.wait)
    close = blocking(_async.Checkpointer.close)

    def __enter__(self) -> Checkpointer:
        return self

    __exit__ = blocking(_async.Checkpointer.__aexit__)

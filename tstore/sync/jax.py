"""The names of `tstore.jax` without `await`."""

from __future__ import annotations

import functools
from typing import Any

from tstore import jax as _async
from tstore import sync
from tstore.sync.facade import BlockingWrapper, blocking, call_unwrapped

__all__ = ["Checkpointer", "explain", "metadata", "restore", "save", "save_async"]


class Checkpointer(sync.Checkpointer):  # noqa: D101 - has the docstring of the class it wraps
    __doc__ = _async.Checkpointer.__doc__

    @functools.wraps(_async.Checkpointer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        BlockingWrapper.__init__(self, call_unwrapped(_async.Checkpointer, *args, **kwargs))

    save = blocking(_async.Checkpointer.save, __name__)
    restore = blocking(_async.Checkpointer.restore, __name__)
    restore_latest = blocking(_async.Checkpointer.restore_latest, __name__)


explain = blocking(_async.explain, __name__)
metadata = blocking(_async.metadata, __name__)
restore = blocking(_async.restore, __name__)
save = blocking(_async.save, __name__)
save_async = blocking(_async.save_async, __name__)


def __dir__() -> list[str]:
    return __all__

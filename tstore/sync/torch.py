"""The names of `tstore.torch` without `await`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tstore import sync
from tstore import torch as _async
from tstore.core.hints import no_such_name
from tstore.sync.facade import BlockingWrapper, blocking, call_unwrapped

if TYPE_CHECKING:
    from tstore.torch import Reader, Writer

__all__ = ["Checkpointer", "Reader", "Writer", "load_into", "restore", "save", "save_async", "stream"]


class Checkpointer(sync.Checkpointer):  # noqa: D101 - has the docstring of the class it wraps
    __doc__ = _async.Checkpointer.__doc__

    @functools.wraps(_async.Checkpointer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        BlockingWrapper.__init__(self, call_unwrapped(_async.Checkpointer, *args, **kwargs))

    save = blocking(_async.Checkpointer.save, __name__)
    restore = blocking(_async.Checkpointer.restore, __name__)


load_into = blocking(_async.load_into, __name__)
restore = blocking(_async.restore, __name__)
save = blocking(_async.save, __name__)
save_async = blocking(_async.save_async, __name__)
stream = blocking(_async.stream, __name__)


def __getattr__(name: str) -> Any:
    if name in ("Reader", "Writer"):  # these import torch.distributed.checkpoint
        return getattr(_async, name)
    raise no_such_name(__name__, name)


def __dir__() -> list[str]:
    return __all__

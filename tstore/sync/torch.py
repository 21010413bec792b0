"""The names of `tstore.torch` without `await`."""

from __future__ import annotations

from tstore import torch as _async
from tstore.sync.facade import blocking
from tstore.torch import Reader, Writer

__all__ = ["Reader", "Writer", "restore", "save"]

restore = blocking(_async.restore, __name__)
save = blocking(_async.save, __name__)

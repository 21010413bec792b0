"""The names of `tstore.torch` without `await`."""

from __future__ import annotations

from tstore import torch as _async
from tstore.sync.facade import blocking

__all__ = ["restore", "save"]

restore = blocking(_async.restore, __name__)
save = blocking(_async.save, __name__)

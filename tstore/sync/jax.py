"""The names of `tstore.jax` without `await`."""

from __future__ import annotations

from tstore import jax as _async
from tstore.sync.facade import blocking

__all__ = ["explain", "restore", "save", "save_async"]

explain = blocking(_async.explain, __name__)
restore = blocking(_async.restore, __name__)
save = blocking(_async.save, __name__)
save_async = blocking(_async.save_async, __name__)

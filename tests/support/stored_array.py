"""An array in a store of its own."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np

import tstore.sync as blocking

__all__ = ["stored"]


def stored(values: np.ndarray[Any, Any], chunks: Any = None, **options: Any) -> blocking.Array:
    """Return an array of a new store with these values."""
    store = blocking.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        tx.create_array("a", values.shape, values.dtype, chunks, **options).write(values)
    return store.snapshot().array("a")

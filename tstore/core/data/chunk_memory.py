"""Memory for the values of a chunk while it is decoded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.variable import is_variable
from tstore.core.runtime.budget import scratch

__all__ = ["chunk_memory"]


@contextlib.contextmanager
def chunk_memory(meta: ArrayMeta) -> Iterator[npt.NDArray[Any]]:
    """Yield an array of the shape and dtype of a chunk; its memory is reused once the context ends."""
    if is_variable(meta.dtype):
        yield np.empty(meta.chunks, meta.dtype)
        return
    with scratch(meta.chunk_size * meta.dtype.itemsize) as buffer:
        yield buffer.view(meta.dtype).reshape(meta.chunks)

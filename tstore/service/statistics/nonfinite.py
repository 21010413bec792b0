"""Search a sample of a version's float arrays for NaN and infinity."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.array import Array
from tstore.core.format.arrays.dtypes import is_float
from tstore.core.format.arrays.samples import Tiling, spread_indices
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.service.statistics.numbers import as_floats

__all__ = ["Nonfinite", "find_nonfinite"]

_BUDGET = 32 << 20  # bytes of values
_STORED = 2 * _BUDGET  # bytes to read from packs, about
_MAX_ARRAYS = 1024
_TILES = 256  # tiles of all arrays together, at least one each
_BATCH = 64  # arrays read together
_LONGEST_CHUNK = 64 << 20  # decoded bytes; arrays with longer chunks are skipped


class Nonfinite(NamedTuple):
    """The arrays in whose values a search found NaN or infinity, and how much it has read."""

    found: dict[str, int]
    """The number of such values that were read, by the path of the array."""
    arrays_read: int
    values_read: int
    complete: bool
    """Whether all values were read of all arrays of floats."""


async def find_nonfinite(snapshot: Snapshot) -> Nonfinite:
    """Search the arrays of floats of a snapshot for NaN and infinity, in a sample that is the same each time.

    Training that diverges leaves such values in whole arrays within a step or two, so a sample of each array finds
    them. About 32 MiB of values of at most 1,024 arrays are read, none of arrays with chunks above 64 MiB. Raise
    what `Array.read` raises.
    """
    paths = await run(snapshot.paths)
    taken = [paths[i] for i in spread_indices(len(paths), min(len(paths), _MAX_ARRAYS))]
    await snapshot.read_nodes(taken)
    every = [await snapshot.array(path) for path in taken]
    arrays = [a for a in every if a.size and (is_float(a.dtype) or a.dtype.kind == "c")]
    chosen = [a for a in arrays if math.prod(a.chunks) * a.dtype.itemsize <= _LONGEST_CHUNK]
    found: dict[str, int] = {}
    read = values = stored = 0
    batches = -(-len(chosen) // _BATCH)
    for first in range(batches):  # each batch is spread over the tree
        batch = chosen[first::batches]
        tiles = [(array, tile) for array in batch for tile in _tiles(array, len(chosen))]
        stored += sum(plan.bytes_read for plan in await asyncio.gather(*(tile.explain() for _, tile in tiles)))
        results = await snapshot.read_many([tile for _, tile in tiles])
        counts = await run(_count, results)
        for (array, _), count in zip(tiles, counts, strict=True):
            if count:
                found[array.path] = found.get(array.path, 0) + count
        read += len(batch)
        values += sum(result.size for result in results)
        if stored > _STORED:
            break
    complete = len(taken) == len(paths) and values == sum(array.size for array in arrays)
    return Nonfinite(found, read, values, complete)


def _tiles(array: Array, arrays: int) -> list[Array]:
    """Return the parts of an array to read, if as many arrays share the budget."""
    tiling = Tiling.of(array.shape, array.chunks, array.dtype.itemsize, _BUDGET // arrays)
    taken = tiling._replace(sampled=min(tiling.sampled, max(1, _TILES // arrays)))
    return [array[region] for region in taken.regions()]


def _count(results: Sequence[npt.NDArray[Any]]) -> list[int]:
    return [values.size - int(np.count_nonzero(np.isfinite(as_floats(values)))) for values in results]

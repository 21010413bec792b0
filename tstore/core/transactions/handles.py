"""The handles and views through which the arrays of a transaction are read and written.

A handle belongs to one array of one transaction. An array that was deleted and created again at the same path is a
a different array, even if its metadata is equal, and every operation on a handle of the former raises `Misuse`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.array import Appended, Array
from tstore.core.data.pieces import ReadJob
from tstore.core.data.planning import ReadPlan, read_plan
from tstore.core.data.reader import read_chunks
from tstore.core.format.arguments import quote
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import Selection, whole
from tstore.core.format.arrays.points import PointSelection
from tstore.core.format.paths import checked_path
from tstore.core.format.tree.node import Node
from tstore.core.runtime.pool import run, run_to_end
from tstore.core.transactions.staged_tree import StagedTree
from tstore.core.transactions.staging import Staging
from tstore.errors import InvalidArgument, Misuse, NotFound

__all__ = ["HandleSource", "array_of", "check_handle", "create_array", "new_array"]


async def array_of(staging: Staging, path: str) -> Array:
    """Return the array at a path as a transaction sees it; raise `NotFound`."""
    async with staging.operation() as staged:
        path = checked_path(path)
        await staging.read_nodes(staged, [path])
        meta = staged.meta(path)
        return Array(HandleSource(staging, staged.deletion_count), path, meta)


async def create_array(staging: Staging, path: str, meta: ArrayMeta) -> Array:
    """Stage a new array and return it; raise `AlreadyExists`."""
    async with staging.operation() as staged:
        await staging.read_around(staged, [path])
        path = staged.create_array(path, meta)
        return Array(HandleSource(staging, staged.deletion_count), path, meta)


async def new_array(
    staging: Staging,
    path: str,
    shape: Sequence[int] | None,
    dtype: Any,
    data: Any,
    new_meta: Callable[[Sequence[int], Any], ArrayMeta],
) -> Array:
    """Stage a new array, with its values if there is `data`, and return it; raise `AlreadyExists`.

    If the values can't be written, the array is not staged either.
    """
    if data is None:
        if shape is None or dtype is None:
            raise InvalidArgument(f"{quote(path)}: pass the shape and the dtype of the new array, or its data")
        return await create_array(staging, path, new_meta(shape, dtype))
    values = data if hasattr(data, "shape") and hasattr(data, "dtype") else np.asarray(data)
    meta = new_meta(values.shape if shape is None else shape, values.dtype if dtype is None else dtype)
    array = await create_array(staging, path, meta)
    try:
        await array.write(values)
    except BaseException:
        with contextlib.suppress(Misuse, NotFound):  # another task deleted it, or the transaction has ended
            await run_to_end(_discard(array))
        raise
    return array


async def _discard(array: Array) -> None:
    """Drop an array that this transaction has created, unless it was deleted since."""
    source, path, _, meta = array.parts
    assert isinstance(source, HandleSource)
    async with source.staging.operation() as staged:
        staged.check_handle(path, meta, source.taken)
        staged.remove(path)


async def check_handle(array: Array) -> None:
    """Raise `Misuse` if an array of a transaction was created again since its handle was taken, or was resized.

    Raise `NotFound` if it was deleted.
    """
    source, path, _, meta = array.parts
    assert isinstance(source, HandleSource)
    async with source.staging.operation() as staged:
        staged.check_handle(path, meta, source.taken)


class HandleSource:
    """The `ArraySource` of a transaction's arrays.

    `taken` is the number of deletions in the transaction before the handle was taken.
    """

    __slots__ = ("staging", "taken")

    def __init__(self, staging: Staging, taken: int) -> None:
        self.staging = staging
        self.taken = taken

    async def node(self, path: str, meta: ArrayMeta) -> Node:
        """Return the array with its chunks as the transaction sees them, patches applied."""
        async with self.staging.operation() as staged:
            return await self._node(staged, path, meta, whole(meta.shape))

    async def read_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> None:
        """Fill `out` with the values that the transaction sees: its own writes on top of its base."""
        async with self.staging.operation() as staged:
            job = ReadJob(path, meta, await self._node(staged, path, meta, selection), selection, out)
            await self.staging.await_read(staged, read_chunks(self.staging.log.storage, [job]))

    async def map_array(self, path: str) -> None:
        """Return None: what a transaction has staged can't be mapped."""

    async def explain_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> ReadPlan:
        """Return what `read_array` with the same arguments would read."""
        async with self.staging.operation() as staged:
            job = ReadJob(path, meta, await self._node(staged, path, meta, selection), selection, out)
            return await run(read_plan, self.staging.log.storage, job)

    async def stored_chunks(self, path: str, meta: ArrayMeta) -> npt.NDArray[np.int64]:
        """Return the numbers of the chunks of an array that the transaction sees, ascending."""
        async with self.staging.operation() as staged:
            node = await self._node(staged, path, meta, whole(meta.shape))
            return await self.staging.await_read(staged, run(node.numbers))

    async def _node(
        self, staged: StagedTree, path: str, meta: ArrayMeta, selection: Selection | PointSelection
    ) -> Node:
        """Return an array as the transaction sees it, patches applied, for a read of a selection."""
        await self.staging.read_nodes(staged, [path])
        staged.check_handle(path, meta, self.taken)
        if self.staging.isolation == "serializable":
            staged.note_values(path, selection)
        array = staged.arrays.get(path)
        if array is not None:
            if array.patches:
                await self.staging.apply_patches(staged, array)
            staged.check_handle(path, meta, self.taken)  # it may have been resized or deleted meanwhile
        return staged.chunks(path)

    async def write_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, values: npt.NDArray[Any]
    ) -> None:
        """Stage values of a selection; whole chunks are written now, parts of chunks later."""
        staging = self.staging
        async with staging.operation() as staged:
            await staging.read_nodes(staged, [path])
            async with staging.heartbeat():
                staged.check_handle(path, meta, self.taken)
                array = staged.array_to_change(path, meta)
                if array.extension is not None:
                    await array.resize(meta.shape, staged.base_chunks(path))  # an ordinary change from now on
                await array.write(staging.packs, staging.segments, selection, values)

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Stage another shape and return the new metadata."""
        async with self.staging.operation() as staged:
            await self.staging.read_nodes(staged, [path])
            staged.check_handle(path, meta, self.taken)
            array = staged.array_to_change(path, meta)
            await array.resize(shape, staged.base_chunks(path))
            return array.meta

    async def append_array(
        self, path: str, meta: ArrayMeta, axis: int, values: npt.NDArray[Any]
    ) -> tuple[ArrayMeta, Appended]:
        """Stage values past the end of an array; return the new metadata and the handle of the values.

        Appends run one after the other, so that concurrent ones do not disturb each other.
        """
        from tstore.core.transactions.appends import append, handle

        staging = self.staging
        if staging.is_cooperative:
            raise Misuse(
                f"{path}: a transaction of several hosts can't append; resize the array in another transaction, "
                "and let each host write its region"
            )
        async with staging.operation() as staged, staging.appending.setdefault(path, asyncio.Lock()):
            await staging.read_nodes(staged, [path])
            current = staged.meta(path)
            # other appends may have made it longer
            is_longer = (
                len(current.shape) == len(meta.shape) and current.with_shape(meta.shape).document == meta.document
            )
            staged.check_handle(path, current if is_longer else meta, self.taken)
            array = staged.array_to_change(path, current)
            base = staged.base_chunks(path)
            extension = await append(array, staging.packs, staging.segments, base, axis, values)
            start = current.shape[axis]

            def check() -> None:
                staging.lifecycle.check_committed(path)
                if staged.was_deleted(path, self.taken):
                    raise Misuse(
                        f"{path}: the array was deleted after values were appended to it, so these have no region"
                    )

            return array.meta, handle(path, extension, start, values.shape, check)

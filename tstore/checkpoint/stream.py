"""The arrays of a checkpoint one after the other, each as soon as it is complete, while the next ones are read."""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tstore.checkpoint.leaves import Shards
from tstore.checkpoint.reading import Reading
from tstore.checkpoint.request import Cast, Request
from tstore.checkpoint.source import Source
from tstore.core.data.reader import new_values
from tstore.core.format.arguments import quote
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.tree.node import Node
from tstore.core.log.expiry import guard_expiry
from tstore.core.runtime.pool import run
from tstore.core.steps import check_one_version, chosen_snapshot
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument

__all__ = ["Order", "stream"]

Order = Literal["storage"] | Sequence[str]
"""The order of streamed arrays: that of their bytes, or paths that come first, in this order."""

_TOGETHER = 8 << 20  # bytes of small arrays that are read together
_AHEAD = 64 << 20  # bytes of arrays that are read before the consumer asks for them


async def stream(
    store: str | os.PathLike[str] | Store,
    step: int | None = None,
    *,
    at: int | str | None = None,
    target: Any = None,
    only: str | list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Cast = None,
    order: Order = "storage",
    host: int = 0,
    hosts: int = 1,
) -> AsyncGenerator[tuple[str, Any], None]:
    """Yield the path and the values of each array of a checkpoint, while the next ones are read.

    Up to 64 MiB are read ahead, or one longer array, so a consumer that keeps no array needs little memory. Python
    scalars are not among the arrays: `restore` returns them. If the consumer stops early, what is being read is
    cancelled; `contextlib.aclosing` makes it wait for that.

    Parameters
    ----------
    target, only, rename, dtype, host, hosts
        As in `tstore.restore`; a target need not have Python scalars. A target's `Shards` come with the parts that
        they ask for, and only these are read.
    order
        "storage", the order of the bytes in the store, which is read fastest; or paths, which come first.

    Raises
    ------
    As `tstore.restore`, before an array that can't be read, or the small arrays that are read together with it;
    `SnapshotExpired` if garbage collection removes the version meanwhile.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-stream", {"w": np.ones((2, 3)), "b": np.zeros(2)}, step=7)
    >>> for path, values in tstore.stream("memory://of-stream", order=["b"]):
    ...     print(path, values.shape)
    b (2,)
    w (2, 3)
    """
    check_one_version(step, at)
    request = Request(only, rename, dtype, "error", "same", host, hosts)
    async with opened(store, "r") as opened_store:
        snapshot = await chosen_snapshot(opened_store, step, at)
        source = await Source.read(snapshot, request)
        leaves = source.leaves(target, request, elsewhere=source.scalars)  # which are not streamed
        paths = await guard_expiry(
            opened_store.log.reader, snapshot.version, run(_ordered, source, list(leaves), order)
        )
        windows = _windows(source, leaves, paths)
        reads: deque[tuple[int, asyncio.Task[dict[str, Any]]]] = deque()
        following = next(windows, None)

        def read_ahead() -> None:
            nonlocal following
            while following is not None and (not reads or sum(n for n, _ in reads) + following.size <= _AHEAD):
                read = _read(source, request, {path: leaves[path] for path in following.paths})
                reads.append((following.size, asyncio.create_task(read)))
                following = next(windows, None)

        read_ahead()
        try:
            while reads:
                _, read = reads.popleft()
                arrays = await read
                read_ahead()  # while the consumer has these arrays
                while arrays:
                    path = next(iter(arrays))
                    yield path, arrays.pop(path)
        finally:
            for _, read in reads:
                read.cancel()
            await asyncio.gather(*(read for _, read in reads), return_exceptions=True)


class _Window(NamedTuple):
    """Arrays that are read together."""

    size: int
    paths: list[str]


async def _read(source: Source, request: Request, leaves: Mapping[str, Any]) -> dict[str, Any]:
    reading = Reading(source, request, new_values)
    for path, leaf in leaves.items():
        reading.add(path, leaf)
    return await reading.read()


def _ordered(source: Source, paths: Sequence[str], order: Order) -> list[str]:
    """Return the paths in this order; the values of hosts, which are read together, come first."""
    listed = [] if isinstance(order, str) else order
    if not isinstance(listed, Sequence) or (order is not listed and order != "storage"):
        raise InvalidArgument(f"order={quote(order)}: expected 'storage', or a list of paths")
    if unknown := [path for path in listed if path not in paths]:
        raise InvalidArgument(f"order=…: {quote(unknown[0])} is not one of the arrays that are streamed")
    first = [path for path in paths if path in source.places]
    rest = set(paths).difference(first, listed)
    return [*first, *dict.fromkeys(listed), *sorted(rest, key=lambda path: _place(source.node(path)))]


def _place(node: Node) -> tuple[str, int]:
    """Return the pack and the offset of an array's first chunk; of one in the metadata, no pack."""
    row = node.row(0)
    return ("", 0) if row is None or isinstance(row.pack, bytes) else (row.pack, row.offset)


def _windows(source: Source, leaves: Mapping[str, Any], paths: Sequence[str]) -> Iterator[_Window]:
    """Yield the paths in windows of up to `_TOGETHER` bytes of values, or of one longer array."""
    window = _Window(0, [])
    for path in paths:
        size = _size(source.node(path).meta, leaves[path])
        if window.paths and window.size + size > _TOGETHER and path not in source.places:
            yield window
            window = _Window(0, [])
        window.paths.append(path)
        window = window._replace(size=window.size + size)
    if window.paths:
        yield window


def _size(meta: ArrayMeta, leaf: Any) -> int:
    """Return the bytes of the values to read."""
    if isinstance(leaf, Shards):
        return sum(map(math.prod, leaf.layout.part_shapes)) * meta.dtype.itemsize
    return meta.nbytes

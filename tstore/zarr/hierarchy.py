"""The groups and arrays of a snapshot, and the encoded bytes of their chunks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tstore.core.data.encoded_chunks import read_part
from tstore.core.format.arrays.dtypes import has_ml_dtype
from tstore.core.format.arrays.grid import chunk_coordinates
from tstore.core.format.tree.node import Node
from tstore.core.log.expiry import guard_expiry
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.core.transactions.encoded import Extent
from tstore.errors import NotFound, name_list
from tstore.zarr.keys import enclosing_folders

__all__ = ["Hierarchy", "SnapshotHierarchy", "listed_nodes"]


class Hierarchy(Protocol):
    """What a `ZarrStore` reads: a `SnapshotHierarchy` or an `EncodedStaging`."""

    @property
    def location(self) -> str:
        """The location, for messages."""

    async def unplaced(self) -> dict[str, bytes]:
        """Return the bytes by key that are not part of the tree."""

    async def node(self, path: str) -> Node | None:
        """Return the group or array at a path, None if there is none."""

    async def first_array(self, paths: Sequence[str]) -> Node | None:
        """Return the array at the first of these paths that has one, or None."""

    async def nodes_starting(self, prefix: str) -> list[Node]:
        """Return the groups and arrays whose paths begin with a prefix, sorted by path."""

    async def has_nodes(self, path: str) -> bool:
        """Return whether there is a group or an array at or below a path."""

    async def numbers(self, path: str) -> npt.NDArray[np.int64]:
        """Return the numbers of the chunks of an array that exist, ascending."""

    async def length(self, path: str, number: int) -> int | None:
        """Return the encoded length of a chunk, None if there is none."""

    async def encoded(self, path: str, number: int, extent: Extent) -> npt.NDArray[np.uint8] | None:
        """Return a part of the encoded bytes of a chunk, None if there is none; raise `Corrupt`."""


class SnapshotHierarchy:
    """The groups and arrays of a snapshot; nodes are in memory once they were read."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    @property
    def location(self) -> str:
        """The URL of the store and the version, for messages."""
        return self.snapshot.location

    async def unplaced(self) -> dict[str, bytes]:
        """Return {}: a version has no other objects."""
        return {}

    async def node(self, path: str) -> Node | None:
        """Return the group or array at a path, None if there is none."""
        await self.snapshot.read_nodes([path])
        return self.snapshot.tree.nodes.get(path)

    async def first_array(self, paths: Sequence[str]) -> Node | None:
        """Return the array at the first of these paths that has one, or None."""
        await self.snapshot.read_nodes(paths)
        nodes = map(self.snapshot.tree.nodes.get, paths)
        return next((node for node in nodes if node is not None and node.is_array), None)

    async def nodes_starting(self, prefix: str) -> list[Node]:
        """Return the groups and arrays whose paths begin with a prefix, sorted by path."""
        nodes = self.snapshot.tree.nodes
        await self.snapshot.read_nodes(nodes.around_start(prefix) if prefix else None)
        return [nodes[path] for path in sorted(nodes.starting_with(prefix))]

    async def has_nodes(self, path: str) -> bool:
        """Return whether there is a group or an array at or below a path."""
        nodes = self.snapshot.tree.nodes
        await self.snapshot.read_nodes(nodes.around(path) if path else None)
        return bool(nodes.at_or_below(path))

    async def numbers(self, path: str) -> npt.NDArray[np.int64]:
        """Return the numbers of the chunks of an array that exist, ascending."""
        node = await self._array(path)
        return await run(node.numbers)

    async def length(self, path: str, number: int) -> int | None:
        """Return the encoded length of a chunk, None if there is none."""
        node = await self._array(path)
        row = await run(node.row, number) if node.reads_segments else node.row(number)
        return None if row is None else row.length

    async def _array(self, path: str) -> Node:
        await self.snapshot.read_nodes([path])
        return self.snapshot.tree.nodes[path]

    async def encoded(self, path: str, number: int, extent: Extent) -> npt.NDArray[np.uint8] | None:
        """Return a part of the encoded bytes of a chunk, None if it was never written and the array is sparse.

        Raise `NotFound` if the array is not sparse, which Zarr can't express, and `Corrupt`.
        """
        node, log = await self._array(path), self.snapshot.log

        def read() -> npt.NDArray[np.uint8] | None:
            row = node.row(number)
            return None if row is None else read_part(log.storage, path, row, *extent(row.length))

        data = await guard_expiry(log, self.snapshot.version, run(read))
        if data is None and not node.meta.sparse:
            at = chunk_coordinates(number, node.meta.counts)
            raise NotFound(
                f"{self.location}: chunk {at} of {path} was never written; write it first, or create the array "
                "with sparse=True"
            )
        return data


async def listed_nodes(hierarchy: Hierarchy, prefix: str, unlisted: set[str]) -> tuple[list[Node], set[str]]:
    """Return the nodes to list whose paths begin with a prefix, and the groups above those that are not listed.

    Arrays of a dtype that zarr-python lacks are not listed, but added to `unlisted`, with a warning.
    """
    nodes = await hierarchy.nodes_starting(prefix)
    others = {node.path for node in nodes if node.is_array and has_ml_dtype(node.meta.dtype)}
    if not others <= unlisted:
        unlisted |= others
        warnings.warn(
            f"{hierarchy.location}: arrays of dtypes that zarr-python lacks are not listed; read them with "
            f"tstore, or by their keys; {name_list('unlisted arrays', sorted(others))}",
            stacklevel=2,
        )
    groups = {above for path in others for above in enclosing_folders(path)}
    return [node for node in nodes if node.path not in others], groups

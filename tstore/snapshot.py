"""The tree of groups and arrays as of one commit: read-only, never changing under its reader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import exmy
import numpy.typing as npt

from tstore.array import Array
from tstore.data.exmy_chunks import read_packed
from tstore.data.pieces import ReadJob
from tstore.data.reader import read_chunks
from tstore.errors import Misuse, NotFound
from tstore.format.array_metadata import ArrayMeta
from tstore.format.grid import Selection, whole
from tstore.format.tree import OWN, Node, Tree, checked_path
from tstore.log.expiry import check_alive, unexpired
from tstore.log.log import Log

__all__ = ["Snapshot", "array_node", "snapshot_of"]


class Snapshot:
    """What a store holds as of one version."""

    def __init__(self, log: Log, tree: Tree) -> None:
        self._log = log
        self._tree = tree

    @property
    def version(self) -> int:
        """The version this is the state of; 0 for the empty store before its first commit."""
        return self._tree.version

    @property
    def where(self) -> str:
        """The store and the version, as errors name them."""
        return f"{self._log.backend.url} at version {self.version}"

    @property
    def tags(self) -> dict[str, int]:
        """Every tag that was set up to this version, with the version it names."""
        return dict(self._tree.tags)

    @property
    def tree(self) -> Tree:
        """The nodes behind this snapshot."""
        return self._tree

    def paths(self) -> list[str]:
        """The paths of all arrays, sorted."""
        return sorted(p for p, n in self._tree.nodes.items() if n.is_array)

    def attributes(self, path: str = "") -> dict[str, Any]:
        """The attributes of the array or group at a path; empty for a group that has none."""
        node = self._tree.nodes.get(path.strip("/"))
        return {} if node is None else node.attributes

    def own_attributes(self) -> dict[str, Any]:
        """Return what tstore itself keeps in the root group; others may have written anything there."""
        own = self.attributes().get(OWN)
        return own if isinstance(own, dict) else {}

    async def array(self, path: str) -> Array:
        """The array at a path; `NotFound` names near paths where there is none."""
        path = checked_path(path)
        return Array(self, path, array_node(self._tree, path, self.where).meta)

    async def read_array(self, path: str, meta: ArrayMeta, selection: Selection, out: npt.NDArray[Any]) -> None:
        """Fills `out`, which has one axis per axis of the array."""
        node = array_node(self._tree, path, self.where)
        await self._read([ReadJob(path, meta, node, selection, out)])

    async def read_many(self, wanted: Iterable[tuple[str, Selection | None, npt.NDArray[Any]]]) -> None:
        """Fills many arrays (path, selection or None for all of it, destination) in one call."""
        jobs = []
        for path, selection, out in wanted:
            node = array_node(self._tree, path, self.where)
            meta = node.meta
            jobs.append(ReadJob(path, meta, node, whole(meta.shape) if selection is None else selection, out))
        await self._read(jobs)

    async def _read(self, jobs: list[ReadJob]) -> None:
        await unexpired(self._log, self.version, read_chunks(self._log.backend, jobs))

    async def read_packed(self, path: str) -> exmy.Quantized:
        """An array of eXmY chunks as it is stored; `InvalidArgument` for any other, `NotFound`."""
        path = checked_path(path)
        node = array_node(self._tree, path, self.where)
        return await unexpired(self._log, self.version, read_packed(self._log.backend, path, node.meta, node))

    async def write_array(
        self, path: str, meta: ArrayMeta, selection: Selection, values: npt.NDArray[Any]
    ) -> None:
        """Refuses: a snapshot never changes."""
        raise Misuse(f"{path}: a snapshot can't be written; open a transaction: store.transaction()")

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Refuses: a snapshot never changes."""
        raise Misuse(f"{path}: a snapshot can't be resized; open a transaction: store.transaction()")

    def __repr__(self) -> str:
        return f"<tstore.Snapshot {self.where}>"


async def snapshot_of(log: Log, version: int, newest: int) -> Snapshot:
    """The snapshot of a version; `SnapshotExpired` where a gc up to version `newest` or later removed it."""
    await check_alive(log, version, newest)
    return Snapshot(log, await unexpired(log, version, log.tree(version)))


def array_node(tree: Tree, path: str, where: str) -> Node:
    """The array at a path of a tree; `NotFound` says what is near it."""
    node = tree.nodes.get(path)
    if node is not None and node.is_array:
        return node
    head = path.rpartition("/")[0]
    near = sorted(p for p, n in tree.nodes.items() if n.is_array and p.startswith(head))[:5]
    shown = f"; near it are: {', '.join(near)}" if near else "; it holds no arrays there"
    raise NotFound(f"{where} has no array {path!r}{shown}")

"""The write set of a transaction in the model, and the conflicts between two write sets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tstore.lab.simulation.history import Append, Clear, Create, Delete, Op, Put, Resize

__all__ = ["WriteSet"]


class WriteSet(NamedTuple):
    """The write set of a transaction.

    It has the numbers of the chunks written entirely and in part, by path; the nodes that were created or resized,
    those that were deleted, and those that were only appended to; and whether the whole tree was replaced. That of
    a copy is empty.
    """

    whole_chunks: dict[str, set[int]]
    partial_chunks: dict[str, set[int]]
    reshaped: set[str]
    deleted: set[str]
    appended: set[str]
    replaces_tree: bool

    @staticmethod
    def from_ops(ops: Iterable[Op]) -> WriteSet:
        """Return the write set of operations."""
        writes = WriteSet({}, {}, set(), set(), set(), any(isinstance(op, Clear) for op in ops))
        for op in ops:
            match op:
                case Create(path) | Resize(path):
                    writes.reshaped.add(path)
                case Delete(path):
                    writes.deleted.add(path)
                    writes.reshaped.discard(path)
                    writes.appended.discard(path)
                    writes.whole_chunks.pop(path, None)
                    writes.partial_chunks.pop(path, None)
                case Put(path):
                    writes.whole_chunks.setdefault(path, set()).update(op.whole_chunks)
                    writes.partial_chunks.setdefault(path, set()).update(op.touched_chunks - op.whole_chunks)
                case Append(path):
                    writes.appended.add(path)
        # an append along with other changes of the array is a resize
        writes.reshaped.update(writes.appended & (writes.whole_chunks.keys() | writes.partial_chunks.keys()))
        return writes

    def written_nodes(self) -> set[str]:
        """Return the paths of the nodes that were written, not those that were only deleted."""
        return self.reshaped | self.appended | self.whole_chunks.keys() | self.partial_chunks.keys()

    def conflict(self, newer: WriteSet, *, reapplied: bool) -> str | None:
        """Return what conflicts between this transaction and a commit newer than its base, or None.

        A transaction that replaces the whole tree conflicts with no commit. With `reapplied`, this transaction's
        writes of parts of chunks do not conflict, because a commit re-applies them to the newer version.
        """
        if self.replaces_tree:
            return None
        if newer.replaces_tree:
            return "the whole tree" if self.written_nodes() | self.deleted else None
        nodes = self.written_nodes() & (newer.reshaped | newer.deleted)
        nodes |= newer.written_nodes() & (self.reshaped | self.deleted)
        if nodes:
            return f"the nodes {sorted(nodes)}"
        for path in self.written_nodes() & newer.written_nodes():
            theirs = newer.whole_chunks.get(path, set()) | newer.partial_chunks.get(path, set())
            mine = self.whole_chunks.get(path, set())
            if not reapplied:
                mine = mine | self.partial_chunks.get(path, set())
            if shared := mine & theirs:
                return f"the chunks {sorted(shared)} of {path}"
        return None

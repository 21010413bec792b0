"""Buffers that are filled one after the other with the bytes of a body."""

from __future__ import annotations

from tstore.storage.objects import Buffers

__all__ = ["Sink"]


class Sink:
    """`count` buffers of `size` bytes in total, of which `left` are not filled yet."""

    def __init__(self, buffers: Buffers) -> None:
        views = [view for view in (memoryview(b).cast("B") for b in buffers) if len(view)]
        self.size = self.left = sum(map(len, views))
        self.count = len(views)
        self._rest = iter(views)
        self.room = next(self._rest, memoryview(b""))
        """The unfilled part of the next buffer; empty when all are filled."""

    @property
    def full(self) -> bool:
        """Whether every buffer is filled."""
        return not self.room

    def filled(self, size: int) -> None:
        """Note that `size` bytes, at least one, were written into `room`."""
        self.left -= size
        self.room = self.room[size:] if size < len(self.room) else next(self._rest, memoryview(b""))

    def take(self, block: bytes | memoryview) -> bool:
        """Copy the bytes into the next buffers; return False if some are left over."""
        rest = memoryview(block)
        while rest and self.room:
            size = min(len(rest), len(self.room))
            self.room[:size] = rest[:size]
            rest = rest[size:]
            self.filled(size)
        return not len(rest)

"""The report of a garbage collection."""

from __future__ import annotations

from typing import NamedTuple

from tstore.core.format.plain_text import pluralize

__all__ = ["CollectReport"]


class CollectReport(NamedTuple):
    """The result of a garbage collection, or with `dry_run` what it would do.

    `version` is the commit of the collection, None for a dry run or if there was nothing to collect. `versions`
    lists those that expired, `tags` their tags. `transactions` were deleted with all their objects: those of
    expired versions, the `abandoned` ones, and those that an earlier collection did not delete. `packs` were
    deleted singly, because other objects of their transactions are still needed. `bytes` and `objects` count all
    deletions.
    """

    version: int | None
    versions: list[int]
    tags: list[str]
    transactions: list[str]
    abandoned: list[str]
    packs: list[str]
    objects: int
    bytes: int
    dry_run: bool

    def __repr__(self) -> str:
        counts = ", ".join(
            pluralize(len(getattr(self, f"{noun}s")), noun) for noun in ("version", "transaction", "pack")
        )
        sizes = f"{pluralize(self.objects, 'object')}, {pluralize(self.bytes, 'byte')}"
        return f"<tstore.CollectReport version={self.version} dry_run={self.dry_run}: {counts}, {sizes}>"

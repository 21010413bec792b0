"""Commits that exclude a cooperative transaction: once one of them is in the log, it can never be committed.

1. A garbage collection that condemned the transaction, or what it reuses.
2. A repair: what it voided may be this very transaction, committed by another host.
3. A commit that changed the same, or removed steps where the transaction saves one.

Whoever commits compares everything. A host that has delivered looks only for what needs no other object than the
records, so that it learns at once that waiting is in vain.
"""

from __future__ import annotations

from msgspec.structs import replace

from tstore.core.format.objects.records import Fragment, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.changes import Changes
from tstore.core.log.group_commit import Newer
from tstore.core.log.log import check_against_collection
from tstore.core.log.reader import LogReader
from tstore.core.runtime.pool import run
from tstore.core.transactions.conflicts import overlap_of
from tstore.core.transactions.fragments import record_from_fragment
from tstore.core.transactions.membership import Membership
from tstore.errors import Conflict

__all__ = ["Exclusion"]


class Exclusion:
    """The search for commits that exclude one transaction; each check raises `Conflict` for one."""

    def __init__(self, log: LogReader, member: Membership) -> None:
        self._log = log
        self._member = member

    async def check(self, changes: Changes, newer: Newer) -> None:
        """Compare newer commits with the changes of all hosts."""
        for version, other in newer:
            self._check_voided(version, other)
            overlap = await overlap_of(changes, await self._log.trees.changes(version, other))
            self._check_conflicts(version, [*overlap.conflicts, *overlap.chunks, *overlap.extended])

    async def check_record(self, fragment: Fragment, version: int, newer: Record) -> None:
        """Compare a newer commit with the fragment of one host, without reading any manifest."""
        inline = [fragment.manifest] if isinstance(fragment.manifest, Manifest) else []
        reused = tuple(pack for manifest in inline for pack in manifest.reused(self._member.transaction))
        record = replace(record_from_fragment(fragment, 0.0), reused=reused)
        await check_against_collection(self._log, record, version, newer)
        self._check_voided(version, newer)
        if newer.tags or newer.tagged or newer.dropped or newer.deleted or newer.replaces:
            changes = await run(Changes.from_record, record, inline)
            self._check_conflicts(version, changes.overlap(Changes.from_record(newer, [])).conflicts)

    def _check_voided(self, version: int, newer: Record) -> None:
        if newer.voids or newer.was_voided:
            raise Conflict(
                f"{self._log.storage.url}: a repair voided version {min(newer.voids, default=version)} after "
                f"transaction {self._member.name!r} began, so it is not committed; repeat it with another attempt",
                [],
            )

    def _check_conflicts(self, version: int, conflicts: list[str]) -> None:
        if conflicts:
            raise Conflict(
                f"{self._log.storage.url}: version {version} and transaction {self._member.name!r} changed the "
                "same chunks, metadata or tags, so it is not committed; repeat it with another attempt",
                conflicts,
            )

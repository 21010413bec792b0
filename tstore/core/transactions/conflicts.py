"""Check whether newer commits conflict with a transaction, and apply its changes again over them.

Some commits exclude a cooperative transaction: once one is in the log, the transaction can never be committed.

1. A garbage collection that condemned the transaction, or what it reuses. So does the last one before hosts began
   again with the same attempt: each learns of it before it delivers.
2. A repair: what it voided may be this very transaction, committed by another host.
3. A commit that changed the same nodes, or removed steps while the transaction saves one.

Whoever commits compares everything. A host that has delivered looks only for what needs no other object than the
records, so that it learns at once that waiting is pointless.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tstore.core.data.writer import PackSet
from tstore.core.format.layout import owner_of
from tstore.core.format.objects.records import Fragment, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.changes import Changes, Overlap
from tstore.core.format.tree.retention import refuse_condemned
from tstore.core.log.expiry import guard_expiry, last_collection
from tstore.core.log.group_commit import Newer, Retry
from tstore.core.log.log import check_against_collection
from tstore.core.log.pages import read_pages
from tstore.core.log.reader import LogReader
from tstore.core.runtime.pool import run
from tstore.core.transactions.appends import moved
from tstore.core.transactions.fragments import record_from_fragment
from tstore.core.transactions.membership import Membership
from tstore.core.transactions.read_set import differing_chunks
from tstore.core.transactions.staged_tree import StagedTree
from tstore.core.transactions.tag_edits import TagEdits
from tstore.errors import CommitOutcomeUnknown, Conflict

__all__ = ["Exclusion", "check_reads", "overlap_of", "reapply", "revise_compactions"]


async def check_reads(log: LogReader, staged: StagedTree, tags: TagEdits, newer: Newer) -> None:
    """Raise `Conflict` if newer commits changed what a serializable transaction has read."""
    base = staged.base
    for version, _ in newer:
        tree = await guard_expiry(log, version, log.head(version))
        changed = await guard_expiry(log, version, run(staged.reads.changed, base, tree))
        changed += tags.changed(base.tags, tree.tags)
        if changed:
            raise Conflict(
                f"{staged.origin}: version {version}, committed since then, changed what this serializable "
                "transaction has read, so it is not committed; read again and repeat it",
                changed,
            )


async def overlap_of(changes: Changes, newer: Changes) -> Overlap:
    """Return the overlap of changes with those of a newer commit, reading segments in a thread."""
    in_segments = changes.in_segments or newer.in_segments
    return await run(changes.overlap, newer) if in_segments else changes.overlap(newer)


class _Touched(NamedTuple):
    """What newer commits also changed: chunks that this transaction wrote in part, and arrays to move, by path."""

    chunks: dict[str, set[int]]
    extended: set[str]


async def _touched(log: LogReader, staged: StagedTree, changes: Changes, newer: Newer) -> _Touched:
    """Return which changes of a transaction must be applied again over newer commits.

    Raise `Conflict` if the changes of this transaction overlap with a newer commit in any other way.
    """
    touched = _Touched({}, set())
    for version, other in newer:
        overlap = await overlap_of(changes, await log.trees.changes(version, other))
        patched, whole = await run(staged.split_overlap, overlap.chunks) if overlap.chunks else ({}, {})
        conflicts = overlap.conflicts
        if whole:
            conflicts += await _changed(log, staged, whole, newer[-1][0])
        if conflicts:
            raise Conflict(
                f"{staged.origin}: version {version}, committed since then, and this transaction changed the same "
                "chunks or metadata, so the transaction is not committed; read again and repeat it",
                conflicts,
            )
        touched.extended.update(overlap.extended)
        for path, numbers in patched.items():
            touched.chunks.setdefault(path, set()).update(numbers)
    return touched


async def _changed(
    log: LogReader, staged: StagedTree, chunks: Mapping[str, npt.NDArray[np.uint64]], version: int
) -> list[str]:
    """Describe the chunks whose bytes in a version differ from those in the base.

    Equal bytes prove nothing: both may have incremented the same value.
    """
    nodes = (await guard_expiry(log, version, log.head(version))).nodes
    await guard_expiry(log, version, read_pages(nodes, chunks))

    def changed() -> list[str]:
        base = staged.base.nodes
        differing = (differing_chunks(base[path], nodes.get(path), n) for path, n in chunks.items())
        return list(itertools.chain.from_iterable(differing))

    return await guard_expiry(log, version, run(changed))


async def reapply(
    log: LogReader, packs: PackSet, staged: StagedTree, changes: Changes, newer: Newer
) -> Retry | None:
    """Apply patches again, and move appended values, on top of the newest of newer commits.

    Return why the manifest has changed, or None if it has not. Raise `Conflict` if the changes conflict.
    """
    chunks, extended = await _touched(log, staged, changes, newer)
    if not chunks and not extended:
        return None
    version = newer[-1][0]  # older ones may have expired; if this one has too, the caller validates again
    nodes = (await guard_expiry(log, version, log.head(version))).nodes
    await guard_expiry(log, version, read_pages(nodes, chunks.keys() | extended))
    for path in sorted(extended):
        work = moved(staged.arrays[path], nodes[path], log.storage, packs, log.objects.segments)
        staged.arrays[path] = await guard_expiry(log, version, work)
    for path, numbers in chunks.items():
        patches = staged.arrays[path].apply_patches(log.storage, packs, nodes[path], numbers)
        await guard_expiry(log, version, patches)
    reasons = [f"it changed chunks that this transaction wrote in part: {', '.join(chunks)}"] if chunks else []
    reasons += (
        [f"it changed arrays that one of the two extended: {', '.join(sorted(extended))}"] if extended else []
    )
    return Retry(version, "; ".join(reasons))


async def revise_compactions(log: LogReader, staged: StagedTree, newer: Newer) -> bool:
    """Adapt the compactions to newer commits; return whether this changes the manifest."""
    compacting = [array for array in staged.arrays.values() if array.compaction is not None]
    revised = False
    for version, other in newer if compacting else ():
        nodes = (await log.trees.changes(version, other)).nodes
        for array in compacting:
            revised |= array.path in nodes and array.revise_compaction(nodes[array.path])
    return revised


class Exclusion:
    """The search for commits that exclude one transaction; each check raises `Conflict` for one."""

    def __init__(self, log: LogReader, member: Membership) -> None:
        self._log = log
        self._member = member

    async def check(self, changes: Changes, newer: Newer) -> None:
        """Compare newer commits with the changes of all hosts."""
        for _, other in newer:
            self._check_voided(other)
        if voided := [version for version, other in newer if other.was_voided]:
            raise CommitOutcomeUnknown(
                f"{self._log.storage.url}: a repair that voided version {voided[0]} has not ended, so this host "
                f"does not commit transaction {self._member.name!r}, but another one that has read version "
                f"{voided[0]} before may; call store.outcome({self._member.transaction!r}) after the repair",
                self._member.transaction,
            )
        for version, other in newer:
            overlap = await overlap_of(changes, await self._log.trees.changes(version, other))
            self._check_conflicts(version, [*overlap.conflicts, *overlap.chunks, *overlap.extended])

    async def check_record(self, fragment: Fragment, version: int, newer: Record) -> None:
        """Compare a newer commit with the fragment of one host, without reading any manifest."""
        inline = [fragment.manifest] if isinstance(fragment.manifest, Manifest) else []
        reused = tuple(pack for manifest in inline for pack in manifest.reused(self._member.transaction))
        record = replace(record_from_fragment(fragment, 0.0), reused=reused)
        await check_against_collection(self._log, record, version, newer)
        self._check_voided(newer)
        if newer.tags or newer.tagged or newer.dropped or newer.deleted or newer.replaces:
            changes = await run(Changes.from_record, record, inline)
            self._check_conflicts(version, changes.overlap(Changes.from_record(newer, [])).conflicts)

    async def check_begun_again(self, base: int) -> None:
        """Compare the last collection up to a version, which hosts that begin again have read.

        It may still be deleting objects whose keys the transaction uses again: single ones if living versions need
        others of the earlier use.
        """
        last = await last_collection(self._log, base)
        if last and (collection := await self._log.collection(last)) is not None:
            record = Record(self._member.transaction, base, 0.0)
            owners = (*collection.transactions, *map(owner_of, collection.objects))
            refuse_condemned(self._log.storage.url, record, last, replace(collection, transactions=owners))

    def _check_voided(self, newer: Record) -> None:
        """Raise `Conflict` if a newer commit is that of a repair, below which the transaction is not committed."""
        if newer.voids:
            raise Conflict(
                f"{self._log.storage.url}: a repair voided version {min(newer.voids)} after "
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

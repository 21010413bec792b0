"""The tree of the head as of a version, built from the nearest root (a stored tree) below it and later records.

A copy of a version, such as a quantized one, changes only tags of the head, and roots have the tree of the head.
The tree of a copy has the nodes of its own record, so it needs no older manifest.

A root is used only if it contains the checksum of its version's record. Any other root, and one that cannot be
read, is skipped in favor of older roots and the records. The checksum of one record vouches for all earlier
records, because each record is written only once. Only replacing records by hand breaks this rule, which `Chain`
notices above the root; `tstore verify` compares every root with the records.

A root refers to an earlier root for nodes that have not changed since (`layout.parent_root`), or to the manifest
of the last commit that replaced the whole tree. Garbage collection keeps both as long as a living version needs
them. If an earlier root is missing or damaged, its tree is built from the records; if only some pages are damaged,
only those are rebuilt. If that fails, because manifests of expired versions are gone, roots that refer to this one
are skipped too: a version that replaced the whole tree, and those after it, need no older manifest.

If a record was lost, but not the root of a later version, the void record that a repair puts in its place names
that version (`Record.resumes`). Trees of earlier versions are made without the lost record. A tree of that version
or a later one is made from the root, never across the void record.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple
from weakref import WeakValueDictionary

from msgspec.structs import replace

from tstore.core.format.layout import ROOT_EVERY, commit_key, root_chain, version_of
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.records import Record, Root, StoredRecord
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.changes import Changes
from tstore.core.format.tree.nodes import Nodes
from tstore.core.format.tree.stored_nodes import DerivedNodes
from tstore.core.format.tree.tree import Tree
from tstore.core.log.objects import LostRoot, MetadataObjects
from tstore.core.log.pages import pages_of_root
from tstore.core.log.records import CACHED_RECORDS, Records, VersionCache
from tstore.core.runtime.event_loops import PerLoop, run_apart
from tstore.core.runtime.pool import run, uses_threads
from tstore.errors import Corrupt, NotFound, UnsupportedFormat

__all__ = ["Trees"]

_CACHED = 4


class _ReadAhead(NamedTuple):
    """A record read ahead, None if it is too long to stay in memory, and whether it replaces the tree."""

    record: Record | None
    replaces: bool


class Trees:
    """The trees of one log, and the changes of its commits."""

    def __init__(self, objects: MetadataObjects, records: Records) -> None:
        self._objects = objects
        self._records = records
        self._cached: VersionCache[Tree] = VersionCache(_CACHED)
        self._copies: VersionCache[Tree] = VersionCache(_CACHED)
        self._changes: VersionCache[tuple[Record, Changes]] = VersionCache(CACHED_RECORDS)
        self._building: PerLoop[WeakValueDictionary[int, asyncio.Lock]] = PerLoop(WeakValueDictionary)
        objects.pages.derive = self.derived_pages

    async def tree(self, version: int) -> Tree:
        """Return the tree of a version that exists: of a copy its own, otherwise that of the head."""
        if self._records.voided:
            await self.drop_voided()
        record = await self._records.record(version) if version else None
        if record is None or not record.source:
            return await self.head(version)
        if (cached := self._copies.get(version)) is not None:
            return cached
        before, records = await self._nearest(version - 1, version, set())
        whole = _ReadAhead(replace(record, source=0, replaces=True), replaces=True)
        tree = await self._after(before, [*records, whole], version)
        if self._records.voided:
            return await self.tree(version)
        self._copies.put(version, tree)
        return tree

    async def head(self, version: int) -> Tree:
        """Return the tree of the head as of a version that exists, with the tags as of that version."""
        if self._records.voided:
            await self.drop_voided()
        if (tree := self._cached.get(version) or self._from_cached(version)) is not None:
            return tree
        async with self._building.get().setdefault(version, asyncio.Lock()):  # once for all tasks of a loop
            tree = self._cached.get(version) or await self._built(version, version + 1, set())
            if not self._records.voided:
                self._cached.put(version, tree)
                return tree
        return await self.head(version)  # a record just read is a repair, which voided versions

    async def _built(self, version: int, before: int, lost: set[int]) -> Tree:
        """Return the tree as of a version, from records and the nearest cached tree or root below `before`.

        Roots whose version is in `lost`, or that refer to one of these, are not used; more are added to it.
        """
        tree, records = await self._nearest(version, before, lost)
        void = [read.record for read in records if read.record is not None and read.record.void]
        crossed = [record.resumes for record in void if 0 < record.resumes <= version]
        if crossed or not tree.leads_to(version):
            root = max([tree.resumes, *crossed])
            raise LostRoot.from_version(self._objects.storage.url, root)
        return await self._after(tree, records, version)

    async def _after(self, tree: Tree, records: Sequence[_ReadAhead], version: int) -> Tree:
        """Return the tree as of a version after an earlier tree and all records between them."""
        commits = list(zip(range(tree.version + 1, version + 1), records, strict=True))
        last_replacing = max((v for v, read in commits if read.replaces), default=0)
        needed = [(v, read.record) for v, read in commits if v >= last_replacing]
        manifests = await self._manifests(needed, tree)
        for number, (record, _) in commits:
            if record is None:  # it was too long to read ahead
                record = (await self._records.record(number)).of_head
                if number >= last_replacing:
                    manifests[number] = await self._nodes_or_manifests(number, record, tree)
            record = await self._records.with_collection(number, record)
            # the nodes before a commit that replaces them are not needed, and may have expired
            read = manifests.pop(number, []) if number >= last_replacing else Nodes()
            try:
                nodes = tree.nodes
                if nodes.is_paged and (record.deleted or (isinstance(read, list) and nodes.after_reads(read))):
                    tree = await run(tree.after, number, record, read)  # this may read pages
                else:
                    tree = tree.after(number, record, read)
            except Corrupt as error:
                if str(error).startswith(self._objects.storage.url):  # the error of a page
                    raise
                raise self._objects.with_key(commit_key(number), error) from error
        return tree

    def _from_cached(self, version: int) -> Tree | None:
        """Return the tree if cached records with all their manifests lead to it from a cached tree, else None."""
        commits: list[tuple[int, Record, list[Manifest]]] = []
        tree, before = None, version
        while tree is None:
            stored = self._records.cached(before)
            if stored is None or stored.is_long or stored.record.collection is not None:
                return None
            if stored.record.deleted or stored.record.replaces or stored.record.void:
                return None  # a deletion may read pages; manifests before a replaced tree may be damaged
            record = stored.record.of_head
            manifests = self._objects.inline_manifests(before, record)
            if manifests is None:
                return None
            commits.append((before, record, manifests))
            before -= 1
            tree = self._cached.get(before)
        if _may_lose_pages(tree, version) or 0 < tree.resumes <= version:
            return None
        writes: list[Manifest] = []  # the manifests of the last commits that only wrote chunks, applied together
        for number, record, manifests in reversed(commits):
            if tree.nodes.after_reads(manifests):
                return None
            if _only_writes(record, manifests) and number % ROOT_EVERY and tree.nodes:
                writes += manifests
                continue
            tree = tree.after_writes(number - 1, writes).after(number, record, manifests)
            writes = []
        tree = tree.after_writes(version, writes)
        self._cached.put(version, tree)
        return tree

    async def _manifests(
        self, commits: list[tuple[int, Record | None]], tree: Tree
    ) -> dict[int, list[Manifest] | Nodes]:
        """Return the manifests of the commits whose records are known; `tree` is the tree before all of them."""
        known = [(v, record) for v, record in commits if record is not None]
        if all(isinstance(m, Manifest) for _, r in known for m in r.manifests):
            return {v: await self._objects.manifests(v, r) for v, r in known}
        first = next((v for v, record in commits if record is None or record.changes_nodes), 0)
        manifests = await asyncio.gather(
            *[self._nodes_or_manifests(v, r, tree if v == first else None) for v, r in known]
        )
        return dict(zip((v for v, _ in known), manifests, strict=True))

    async def _nodes_or_manifests(self, version: int, record: Record, tree: Tree | None) -> list[Manifest] | Nodes:
        """Return the manifests of a commit; the nodes, not read yet, if they are a whole tree in pages.

        That is the case if the commit replaces the tree before it, or that tree is known to be empty.
        """
        nodes = self._objects.paged_nodes(version, record)
        if nodes is not None and (record.replaces or (tree is not None and not await run(bool, tree.nodes))):
            return nodes
        return await self._objects.manifests(version, record)

    async def changes(self, version: int, record: Record) -> Changes:
        """Return what a version changed in the head, cached because many transactions validate against it."""
        cached, changes = self._changes.get(version) or (None, None)
        if cached is not record or changes is None:
            changes = Changes.from_record(record, await self._objects.manifests(version, record.of_head))
            self._changes.put(version, (record, changes))
        return changes

    async def drop_voided(self) -> None:
        """Drop the trees and records of versions that a repair voided.

        Raise `TimelineChanged` if this process has used a record that was voided since, and `Corrupt` if that
        record is there again, as from a backup made before the repair.
        """
        voided = self._records.voided
        while voided:
            for version in sorted(voided):
                self._cached.drop_from(version)
                self._copies.drop_from(version)
                self._objects.commits.forget(version)
                cached = self._records.cached(version)
                if cached is not None and not cached.record.void:
                    await self._records.refetch(version, cached.check)
                    raise Corrupt(
                        f"{self._objects.storage.url}: {commit_key(version)} is a record again, though a repair "
                        "voided that version, so it was probably restored from a backup made before; "
                        f"`tstore repair --void-intact {version}` voids it again"
                    )
                voided.discard(version)  # last: if the storage does not respond, the next call tries again

    async def root(self, version: int) -> Root | None:
        """Return the root of a version, not yet compared with its record, or None if it cannot be read."""
        if version == 0:
            return None
        with contextlib.suppress(NotFound, Corrupt, UnsupportedFormat):  # a root only saves time
            return await self._objects.root(version)
        return None

    async def add_root(self, version: int, root: Root | None) -> None:
        """Cache the tree of a root if the root has the checksum of the cached record of its version."""
        if root is not None and _is_of(root, version, self._records.cached(version)):
            tree = await self._tree_of_root(root, set())
            if tree is not None:
                self._cached.put(version, tree)

    def replace(self, tree: Tree) -> None:
        """Cache a tree in place of the one that is cached for its version."""
        self._cached.put(tree.version, tree)

    def missing_records(self, version: int) -> list[int]:
        """Return the lower versions whose records are needed for the tree of a version and are not cached."""
        cached = (v for v in (0, *self._cached.versions()) if v <= version)
        nearest = max(version - version % ROOT_EVERY, *cached)
        return [v for v in range(nearest + 1, version) if v not in self._records]

    async def _nearest(self, version: int, before: int, lost: set[int]) -> tuple[Tree, list[_ReadAhead]]:
        """Return the nearest tree below `before` that is cached or has a root, and the records above it."""
        last = min(version, before - 1)
        usable = (v for v in self._cached.versions() if v <= last and lost.isdisjoint(root_chain(v)))
        cached_trees = [tree for tree in map(self._cached.get, usable) if tree is not None]
        trees = [t for t in cached_trees if t.leads_to(version) and not _may_lose_pages(t, version)]
        nearest = max(trees, key=lambda tree: tree.version, default=Tree.empty())
        cached = list(takewhile(bool, map(self._records.cached, range(nearest.version + 1, version + 1))))
        whole = len(cached) == version - nearest.version and (trees or not cached_trees)
        void = [stored.record for stored in cached if stored is not None and stored.record.void]
        if whole and not any(0 < record.resumes <= version for record in void):
            return nearest, [_drop_if_long(stored) for stored in cached if stored is not None]
        root_version, top = last - last % ROOT_EVERY, version
        records: list[_ReadAhead] = []
        while True:
            numbers = range(max(root_version, nearest.version) + 1, top + 1)
            stored = self._root_tree(root_version, version, nearest, lost)
            tree, between = await asyncio.gather(stored, self._read_ahead(numbers, version))
            records[:0] = between
            if tree is not None:
                return tree, records
            root_version, top = root_version - ROOT_EVERY, root_version

    async def _read_ahead(self, versions: Sequence[int], newest: int) -> list[_ReadAhead]:
        found = zip(versions, await self._records.short_records(versions), strict=True)
        return [_drop_if_long(short or await self._records.stored_below(v, newest)) for v, short in found]

    async def _root_tree(self, version: int, newest: int, nearest: Tree, lost: set[int]) -> Tree | None:
        """Return `nearest` if it is as new as the root, else the tree of the root, None if that is unusable.

        `newest` is a version that exists.
        """
        if version <= nearest.version:
            return nearest
        if not lost.isdisjoint(root_chain(version)):
            return None
        root = await self._usable_root(version, newest)
        return None if root is None else await self._tree_of_root(root, lost)

    async def _usable_root(self, version: int, newest: int) -> Root | None:
        """Return the root of a version, None if it can't be read or is not that of the version's record.

        Raise an error if this record can't be read: then no tree from this version up to `newest` can be built.
        """
        root, stored = await asyncio.gather(self.root(version), self._records.stored_below(version, newest))
        return root if root is not None and _is_of(root, version, stored) else None

    async def _tree_of_root(self, root: Root, lost: set[int]) -> Tree | None:
        """Return the tree of a root over that of its parent, which is built from records if that has no root.

        Return None, and add the parent to `lost`, if it cannot be built.
        """
        needed: list[int] = []
        for version in reversed(root_chain(root.parent)):
            if self._cached_over(version) is not None:
                break
            needed.append(version)
        usable = await asyncio.gather(*[self._usable_root(version, root.version) for version in needed])
        roots = dict(zip(needed, usable, strict=True))
        chain, earlier = [root], None
        while parent := chain[-1].parent:
            if (earlier := self._cached_over(parent)) is not None:
                break
            if (known := roots.get(parent)) is None:
                try:
                    earlier = await self._built(parent, parent, lost)
                except (NotFound, Corrupt, UnsupportedFormat):
                    lost.add(parent)
                    return None
                break
            chain.append(known)
        for each in reversed(chain):
            if not self._records.chain.agrees(each.parent, each.parent_check):
                return None  # it belongs to another history; reading the records will show that
            earlier = Tree.from_root(each, self._objects.pages, earlier)
        assert earlier is not None
        return earlier

    def _cached_over(self, version: int) -> Tree | None:
        """Return a cached tree that knows the nodes as of an earlier version that has a root, or None."""
        trees = map(self._cached.get, self._cached.versions())
        return next((tree for tree in trees if tree is not None and tree.nodes.knows(version)), None)

    def derived_pages(self, reference: ObjectRef) -> list[DerivedNodes] | None:
        """Return the nodes of each page in a root as the records before it determine them; blocking.

        Use this if the object is damaged or missing. Return None if that fails. Raise `TimelineChanged` if the
        records determine other pages.
        """
        if not uses_threads():
            return None
        return run_apart(self._derived_pages(reference))

    async def _derived_pages(self, reference: ObjectRef) -> list[DerivedNodes] | None:
        version = version_of(reference.key)
        # from the roots below; if these are damaged too, from the records alone: as if the first of each chain of
        # roots were lost
        firsts = {root_chain(ROOT_EVERY << i)[0] for i in range(version.bit_length())}
        for lost in (set[int](), firsts):
            with contextlib.suppress(NotFound, Corrupt, UnsupportedFormat):
                return pages_of_root(
                    reference, await self._built(version, version, lost), self._objects.storage.url
                )
        return None


def _is_of(root: Root, version: int, stored: StoredRecord | None) -> bool:
    """Return whether a root was written for exactly this record of this version."""
    return stored is not None and root.version == version and stored.has_root(root)


def _may_lose_pages(tree: Tree, version: int) -> bool:
    """Return whether a tree reads pages of roots that a garbage collection may delete although it keeps `version`.

    It keeps those from which a reader builds the tree of that version, from its last root on.
    """
    return tree.nodes.is_paged and tree.version < version - version % ROOT_EVERY


def _only_writes(record: Record, manifests: Sequence[Manifest]) -> bool:
    """Return whether a commit only writes chunks: it deletes nothing and is not a collection."""
    tags = record.tags or record.dropped or record.tagged
    return not (tags or record.void or record.source or any(any(m.replaces_node) for m in manifests))


def _drop_if_long(stored: StoredRecord) -> _ReadAhead:
    return _ReadAhead(None if stored.is_long else stored.record.of_head, stored.record.replaces)

"""The tree built from the records alone, version by version, and the records that do not follow from it.

Each record must follow from the tree before it (`check_foundation`): after the version that created or resized an
array was lost or voided, a later write has chunks of an array that is not there. And a living version needs the
manifests of older ones, back to the last commit that replaced the whole tree. Collections keep these manifests;
but if that commit is voided, the version needs those before it, which may be gone.

After records that can't be read, or are left out, the replay begins again with the tree of the next root; it
also begins again at the root that has the changes of a lost record (`Record.resumes`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from msgspec.structs import replace

from tstore.core.format.frame import NO_RECORD
from tstore.core.format.layout import commit_key, first_link, root_key
from tstore.core.format.objects.records import REPAIR, RESUMES, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.nodes import Nodes
from tstore.core.format.tree.tree import Tree
from tstore.core.format.tree.validation import check_compactions, check_foundation, run_steps
from tstore.core.log.expiry import changes_nothing
from tstore.core.log.reader import LogReader
from tstore.core.runtime.pool import run
from tstore.errors import Corrupt, NotFound, UnsupportedFormat

__all__ = ["UNREADABLE", "Replay"]

UNREADABLE = (Corrupt, NotFound, UnsupportedFormat)
"""The errors from reading a record that is damaged, missing or of a newer tstore."""


class Replay:
    """The tree built from records alone, up to the last version that was checked; versions are checked in order.

    `living` says whether a version is living. Versions in `voided` count as void; their records are not read. It
    maps each to the version from which on its changes are known nevertheless, 0 for none (`Record.resumes`).
    """

    def __init__(self, log: LogReader, living: Callable[[int], bool], voided: Mapping[int, int] = {}) -> None:
        self._log = log
        self._living = living
        self._voided = voided
        self._tree: Tree | None = Tree.empty()  # None after a record that can't be read, until the next root
        self._stopped = 0  # if there is no tree: only a root above this version can begin the replay again
        self._nodes_known = True  # False after a manifest that can't be read, such as that of an expired version
        self._lost = 0, ""  # the version from which on the nodes are not known, and why
        self._unfounded: dict[int, str] = {}  # living versions that do not follow from those before, and why

    def skip(self, version: int) -> None:
        """Leave out the records before a version."""
        self._tree, self._stopped = None, version - 1

    async def fault(self, version: int, record: Record) -> str:
        """Return why a living version differs from what its writer committed; "" if it does not, or if unknown."""
        if changes_nothing(record) or record.replaces or record.source or not self._living(version):
            return ""
        if record.voids and not record.changes_nodes:  # what is damaged is the version whose state it has
            return ""
        await self._advance(version)
        if self._tree is None:
            return ""
        if version in self._unfounded:
            return f"{self._log.storage.url}: {commit_key(version)}: {self._unfounded[version]}"
        lost, reason = self._lost
        if self._nodes_known or self._living(lost):  # then that version is at fault
            return ""
        return f"{self._log.storage.url}: version {version} needs what version {lost} wrote: {reason}"

    async def tree(self, version: int) -> Tree | None:
        """Return the tree as of a version, None if its nodes are not known."""
        await self._advance(version)
        return self._tree if self._nodes_known else None

    async def root_fault(self, version: int) -> str:
        """Return the fault of the root of a version, in its bytes, record or tree; "" if there is none."""
        await self._advance(version)
        key = root_key(version)
        name, advice = f"{self._log.storage.url}: {key}", "delete this object: it only saves time"
        try:
            root = await self._log.objects.whole_root(version)
            tree = Tree(version, Nodes(), root.tags, root.copies)
            if self._nodes_known and self._tree is not None:
                # over the nodes that the records have, which readers use too if the parent of the root is missing
                tree = Tree.from_root(root, self._log.objects.pages, self._tree)
        except NotFound:  # there is no root
            return ""
        except (Corrupt, UnsupportedFormat) as error:
            reason = str(error) if key in str(error) else f"{name}: {error}"
            try:
                await self._log.head(version)
            except UNREADABLE:  # records that are lost, or expired
                return f"{reason}. Only it has the tree of version {version}; restore it from a copy of the store"
            return f"{reason}. Readers ignore it; {advice}"
        try:
            stored = await self._log.stored(version)
            parent = await self._log.stored(root.parent) if root.parent else None
        except UNREADABLE:  # reported elsewhere
            return ""
        follows = root.parent_check == NO_RECORD if parent is None else parent.accepts(root.parent_check)
        if root.version != version or not stored.has_root(root) or not follows:
            return f"{name} is not the root of {commit_key(version)}. Readers ignore it; {advice}"
        try:
            replayed, nodes_known = self._tree, self._nodes_known
            differing = [] if replayed is None else await run(replayed.differences, tree, nodes_known)
        except UNREADABLE:  # a segment of an expired version, or damaged, which is reported elsewhere
            return ""
        if not differing:
            return ""
        shown = ", ".join(d or "the root group" for d in differing[:5]) + (", …" if len(differing) > 5 else "")
        return f"{name} differs from the records up to version {version} in {shown}; {advice}"

    async def compaction_fault(self, version: int, record: Record | None, manifests: Sequence[Manifest]) -> str:
        """Return the fault of the compactions in the manifests of a version; "" if there is none."""
        if record is None or not any(manifest.compactions for manifest in manifests):
            return ""
        await self._advance(version - 1)
        if self._tree is not None and self._tree.leads_to(version) and (self._nodes_known or record.source):
            try:
                await run(run_steps, check_compactions(record, manifests, self._tree.nodes))
            except UNREADABLE as error:
                return f"{self._log.storage.url}: {commit_key(version)}: {error}"
        return ""

    async def _restart(self, version: int) -> None:
        """Begin again with the tree of the last root below a version, if there is one above what can't be read."""
        root = first_link(version)
        if root <= self._stopped:
            return
        self._stopped = root  # it is tried once
        with contextlib.suppress(*UNREADABLE):  # its nodes may have expired; a later root is used then
            if await self._log.trees.root(root) is not None:
                self._tree, self._nodes_known = await self._log.head(root), True

    async def _advance(self, version: int) -> None:
        """Replay the records up to a version; a record that can't be read ends the replay until the next root."""
        if self._tree is None:
            await self._restart(version)
        if self._tree is None:
            return
        log, versions = self._log, range(self._tree.version + 1, version + 1)
        try:
            # no manifest is needed from before the last commit that replaces the whole tree
            first = max([v async for v, record in self._records(versions) if record.replaces], default=0)
            async for number, record in self._records(versions):
                if number in (self._tree.resumes, record.resumes):
                    self._tree, self._nodes_known = await log.head(number), True
                    continue
                if number == first:
                    self._nodes_known = True
                manifests: list[Manifest] = []
                if number >= first and self._nodes_known:
                    manifests = await self._manifests(number, record.of_head, self._tree.nodes)
                if number in self._unfounded:
                    record = replace(record, deleted=())
                record = await log.records.with_collection(number, record)
                self._tree = self._tree.after(number, record, manifests)
        except UNREADABLE:
            self._stopped = max(self._stopped, self._tree.version)
            self._tree = None

    async def _records(self, versions: range) -> AsyncIterator[tuple[int, Record]]:
        """Yield each version with its record, that of a voided one as void."""
        for voided, numbers in itertools.groupby(versions, lambda number: number in self._voided):
            if voided:
                for number in numbers:
                    yield number, _void(self._voided[number])
            else:
                async for item in self._log.each_record(numbers):
                    yield item

    async def _manifests(self, version: int, record: Record, nodes: Nodes) -> list[Manifest]:
        """Return the manifests of a version; if they can't be applied to the nodes, note why, and return none."""
        try:
            manifests = await self._log.objects.manifests(version, record)
        except UNREADABLE as error:
            self._nodes_known, self._lost = False, (version, str(error))
            return []
        try:
            await run(check_foundation, record, manifests, nodes)
        except Corrupt as error:
            if self._living(version):
                self._unfounded[version] = str(error)
            else:
                self._nodes_known, self._lost = False, (version, str(error))
            return []
        return manifests


def _void(resumes: int) -> Record:
    return Record(f"{REPAIR}void", 0, 0.0, void=True, metadata={RESUMES: resumes})

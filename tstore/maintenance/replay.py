"""The tree replayed from records alone, for comparison with every root."""

from __future__ import annotations

from tstore.errors import Corrupt, NotFound, UnsupportedFormat
from tstore.format.layout import commit_key, root_key
from tstore.format.records import Root
from tstore.format.references import Manifest
from tstore.format.tree import Tree
from tstore.log.reader import LogReader
from tstore.maintenance.damage import UNREADABLE

__all__ = ["ReplayedTree"]


class ReplayedTree:
    """The tree as of the last version whose root was checked; versions are checked in ascending order."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._tree: Tree | None = Tree.empty()  # None after a record that can't be read
        self._nodes_known = True  # False after a manifest that can't be read, such as that of an expired version

    async def root_fault(self, version: int) -> str:
        """Return what is wrong with the root of a version: its bytes, its record or its tree; "" for nothing."""
        await self._advance(version)
        key = root_key(version)
        name, advice = f"{self._log.storage.url}: {key}", "delete this object: it only saves time"
        try:
            root, stored = await self._log.objects.read(key, Root), await self._log.stored(version)
            tree = Tree.from_root(root)
        except NotFound:  # no root, or no record, which is reported already
            return ""
        except (Corrupt, UnsupportedFormat) as error:
            reason = str(error) if key in str(error) else f"{name}: {error}"
            return f"{reason}. Readers ignore it; {advice}"
        if (root.version, root.record_check) != (version, stored.check):
            return f"{name} is not the root of {commit_key(version)}. Readers ignore it; {advice}"
        paths = [] if self._tree is None else self._tree.differences(tree, nodes=self._nodes_known)
        if not paths:
            return ""
        shown = ", ".join(p or "the root group" for p in paths[:5]) + (", …" if len(paths) > 5 else "")
        return f"{name} differs from the records up to version {version} in {shown}; {advice}"

    async def _advance(self, version: int) -> None:
        """Replay the records up to a version; one that can't be read ends the replay for good."""
        if self._tree is None:
            return
        log, versions = self._log, range(self._tree.version + 1, version + 1)
        try:
            # no manifest is needed from before the last commit that replaces the whole tree
            first = max([v async for v, record in log.each(log.record, versions) if record.replaces], default=0)
            async for number, record in log.each(log.record, versions):
                manifests: list[Manifest] = []
                if number == first:
                    self._nodes_known = True
                if number >= first:
                    try:
                        manifests = await log.objects.manifests(number, record)
                    except UNREADABLE:
                        self._nodes_known = False
                record = await log.records.with_collection(number, record)
                self._tree = self._tree.after(number, record, manifests)
        except UNREADABLE:
            self._tree = None

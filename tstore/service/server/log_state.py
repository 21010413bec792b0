"""The state of the log behind a server, as needed to validate the next record.

It advances with each record that the server accepts, so that a commit reads only the newest record. It is read
again if a backup was restored under the server, or if a commit of `tstore repair` has voided a record.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tstore.core.format.frame import check_of
from tstore.core.format.layout import commit_key, owner_of
from tstore.core.format.objects.records import LivingVersion, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.retention import Condemned, Ledger
from tstore.core.format.tree.tree import Tree
from tstore.core.log.commits import CommitObjects
from tstore.core.log.expiry import collections, existing_collection, ledger_since, named_collection
from tstore.core.log.marker import read_marker
from tstore.core.log.reader import LogReader
from tstore.core.log.records import Chain
from tstore.core.maintenance.damage import missing_records
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.errors import Corrupt, NotFound, UnsupportedFormat
from tstore.service.server.chunk_checks import CheckProgress

__all__ = ["LoadedTree", "LogState", "manifest_memory", "tags_memory"]

_RECENT_TRANSACTIONS = 1024
_RECENT_COLLECTIONS = 8
_MAX_CONDEMNED = 1 << 20  # names that the recent collections condemned together
_TAG = 110  # bytes of a tag in memory, without its text
_NODE = 330  # bytes of a new node in memory, without its path and its chunks
_OVERLAY = 90  # bytes of a table of changed chunks in memory, without its chunks
_DOCUMENT = 100  # bytes of a document in memory, without its text
_SEGMENT = 400  # bytes of the reference to a segment in memory
_CHUNK = 36  # bytes of a chunk in memory, without its checksums


class LoadedTree(NamedTuple):
    """The tree of the head as of a version, loaded into memory; it takes at most about `memory` bytes there.

    If it is not `complete`, some of its objects are missing, as in a copy of a history whose versions were
    collected; then only its tags are valid.
    """

    tree: Tree
    complete: bool
    memory: int

    def memory_after(self, record: Record, added: int) -> int:
        """Return `memory` after a record whose manifests take `added` bytes; a replaced tree keeps its tags."""
        before = tags_memory(self.tree.tags) if record.replaces else self.memory
        return before + tags_memory(record.tags) + tags_memory(record.tagged) + added


class LogState:
    """The state of the log at `version`, whose record ends in the checksum `check`, with the tree `loaded`.

    `gc` is the version of the newest garbage collection that no repair voided. The next record must name the
    version `collected` as the newest garbage collection: `gc`, or a later one that was voided (see
    `existing_collection`). `chain` has the links of recent records. `progress` is empty after each collection, and
    in a state that has just been read, as after a repair.
    """

    def __init__(self) -> None:
        self.version = 0
        self.check = b""
        self.chain = Chain()
        self.loaded = LoadedTree(Tree.empty(), complete=True, memory=0)
        self.collected = 0
        self.gc = 0
        self.progress = CheckProgress()
        self._alive: tuple[LivingVersion, ...] = ()
        self._condemned: list[Condemned] = []
        self._recent: dict[str, int] = {}
        self._ledger: Ledger | None = Ledger()
        self._reading_ledger = asyncio.Lock()
        self._needed: tuple[int, set[str], set[str]] = (-1, set(), set())  # for a version: transactions, objects

    @staticmethod
    async def read(storage: Storage, version: int) -> LogState:
        """Read the state as of an existing version; raise `Corrupt` or `NotFound` if the log is damaged."""
        state = LogState()
        marker = await read_marker(storage)  # a copy creates the marker last
        log = LogReader.strict(storage, None if marker is None else marker.log_id)
        state.chain = log.records.chain
        if version == 0:
            return state
        state._ledger = None
        state.version, state.check = version, (await log.stored(version)).check
        recent = range(max(1, version - _RECENT_TRANSACTIONS + 1), version + 1)
        async for number, record in log.each_record(recent):
            state._remember(number, record)
        await state._read_collections(log)
        try:
            tree = await log.head(version)
            await run(tree.nodes.load)  # the records that follow are compared with all nodes
            memory = manifest_memory(await run(tree.manifest)) + tags_memory(tree.tags)
            state.loaded = LoadedTree(tree, complete=not tree.resumes, memory=memory)
        except (Corrupt, NotFound, UnsupportedFormat):
            tree = Tree.empty()
            async for number, record in log.each_record(range(1, version + 1)):
                tree = tree.after(number, await log.records.with_collection(number, record), [])
            state.loaded = LoadedTree(tree, complete=False, memory=0)
        return state

    async def _read_collections(self, log: LogReader) -> None:
        """Read the decisions of the recent collections, ignoring those that a repair has voided."""
        self.collected = await named_collection(log, self.version)
        async for gc, collection in collections(log, await existing_collection(log, self.collected)):
            count = len(self._condemned)
            if not count:
                self.gc, self._alive = gc, collection.alive
            self._condemned = _within_limits([*self._condemned, Condemned.from_collection(collection)])
            if len(self._condemned) in (count, _RECENT_COLLECTIONS):
                break

    async def follow(self, storage: Storage, version: int) -> bool:
        """Advance to a later version by records of other writers; return False if one voids an older record."""
        log = LogReader.strict(storage)
        log.records.chain = self.chain
        async for number, (record, check, _) in log.each(log.stored, range(self.version + 1, version + 1)):
            if record.voids:
                return False
            manifests: list[Manifest] | None = None
            with contextlib.suppress(Corrupt, NotFound, UnsupportedFormat):
                manifests = await log.objects.manifests(number, record.of_head)
            record = await log.records.with_collection(number, record)
            collected = await named_collection(log, number)
            if number == self.version + 1:  # otherwise a concurrent task has advanced already
                complete = manifests is not None and (self.loaded.complete or record.replaces)
                memory = self.loaded.memory_after(record, sum(map(manifest_memory, manifests or [])))
                tree = self.loaded.tree.after(number, record, manifests if complete and manifests else [])
                self.advance(number, record, check, LoadedTree(tree, complete, memory))
                self.collected = collected
        return True

    def advance(self, version: int, record: Record, check: bytes, loaded: LoadedTree) -> None:
        """Advance to the next version, with the checksum of its record and the resulting tree."""
        if record.resumes:
            loaded = loaded._replace(tree=loaded.tree.after(version, record, []))
        if loaded.tree.resumes:  # only a root has the changes of a lost record
            loaded = loaded._replace(complete=False)
        self.version, self.check, self.loaded = version, check, loaded
        self._remember(version, record)
        self.collected = record.collected if record.collection is None else version
        if record.collection is not None:
            self.gc = version
            self.progress = CheckProgress()
            self._alive = record.collection.alive
            self._condemned = _within_limits([Condemned.from_collection(record.collection), *self._condemned])
            self._ledger = Ledger(self._alive)
        elif self._ledger is not None:
            self._ledger.add(version, record)

    async def is_current(self, commits: CommitObjects) -> bool:
        """Return whether the record of this version is unchanged in the storage."""
        try:
            return not self.version or check_of(await commits.get(self.version)) == self.check
        except NotFound:
            return False

    async def ledger(self, storage: Storage) -> Ledger:
        """Return a copy of the ledger of living versions."""
        return Ledger((await self._read_ledger(storage)).alive.values())

    async def not_living(self, storage: Storage, versions: Iterable[int]) -> list[int]:
        """Return which of these versions are not living, in order."""
        return sorted(set(versions).difference((await self._read_ledger(storage)).alive))

    async def _read_ledger(self, storage: Storage) -> Ledger:
        """Return the ledger of living versions; the records since the last collection are read once."""
        async with self._reading_ledger:
            if self._ledger is None:
                log, version = LogReader.strict(storage), self.version
                ledger = await ledger_since(log, self.gc, self._alive, version)
                while version < self.version and self._ledger is None:  # the state has advanced meanwhile
                    version += 1
                    ledger.add(version, await log.record(version))
                if self._ledger is None:
                    self._ledger = ledger
            return self._ledger

    async def ledger_at_end(self, storage: Storage) -> Ledger:
        """Return a copy of the ledger; raise `Corrupt` if the next record is missing although later ones exist."""
        if missing := await missing_records(LogReader(storage), self.version):
            raise Corrupt(f"{commit_key(missing[0])} is missing, though later commits exist; restore it first")
        return await self.ledger(storage)

    async def needs(self, storage: Storage, key: str) -> bool:
        """Return whether an object belongs to the transaction of a living version, or such a version needs it."""
        version, transactions, objects = self._needed
        if version != self.version:
            version, ledger = self.version, await self.ledger(storage)
            transactions, objects = ledger.transactions, ledger.dependencies
            self._needed = version, transactions, objects
        return key in objects or owner_of(key) in transactions

    def committed_as(self, record: Record) -> int | None:
        """Return the recent version that has committed a transaction of the record already, None if none has."""
        transactions = () if record.void else record.transactions  # one transaction may need several void records
        return next((self._recent[t] for t in transactions if t in self._recent), None)

    def is_condemned(self, key: str) -> bool:
        """Return whether an object or the folder of a transaction was condemned recently."""
        return any(c.includes(key) for c in self._condemned)

    def check_not_condemned(self, keys: Iterable[str]) -> None:
        """Raise `Corrupt` if one of these objects or folders of transactions was condemned recently."""
        for key in keys:
            if self.is_condemned(key):
                raise Corrupt(f"a garbage collection condemned {key}")

    def _remember(self, version: int, record: Record) -> None:
        if not record.void:
            self._recent.update(dict.fromkeys(record.transactions, version))
        while len(self._recent) > _RECENT_TRANSACTIONS:
            del self._recent[next(iter(self._recent))]


def _within_limits(condemned: Sequence[Condemned]) -> list[Condemned]:
    """Return the leading (newest) collections: at least one, and more while the limits permit."""
    recent = condemned[:_RECENT_COLLECTIONS]
    totals = itertools.accumulate(len(c.transactions) + len(c.objects) for c in recent)
    return [c for i, (c, total) in enumerate(zip(recent, totals, strict=True)) if not i or total <= _MAX_CONDEMNED]


def manifest_memory(manifest: Manifest) -> int:
    """Return about how many bytes the contents of a manifest take in memory, as part of a tree."""
    columns = (manifest.packs, manifest.inline, manifest.documents, manifest.paths)
    replaced = manifest.replaces_node.count(1) + manifest.replaces_node.count(3)
    return (
        sum(sum(map(sys.getsizeof, column)) for column in columns)
        + _NODE * replaced
        + _OVERLAY * (len(manifest.paths) - replaced)
        + _DOCUMENT * len(manifest.documents)
        + _CHUNK * len(manifest.table)
        + len(manifest.checks)
        + _SEGMENT * len(manifest.segment_table)
        + len(manifest.segment_packs) * 2
    )


def tags_memory(tags: Collection[str]) -> int:
    """Return about how many bytes tags take in memory, as part of a tree."""
    return sum(map(sys.getsizeof, tags)) + _TAG * len(tags)

"""What the log behind a server says as of one version, as far as the next record is compared with it.

It goes on with each record that the server takes, so that a commit costs no reading of the log but of the newest
record. It is read anew where a backup was restored under the server, or `tstore repair` has voided a record: the
repair's own commit, the newest then, tells of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from tstore.errors import Corrupt, NotFound, UnsupportedFormat
from tstore.format.condemned import Condemned
from tstore.format.frame import check_of
from tstore.format.layout import commit_key, owner_of
from tstore.format.records import Alive, Record
from tstore.format.references import Manifest
from tstore.format.retention import Ledger
from tstore.format.tree import Tree
from tstore.log.expiry import collections, existing_collection, ledger_since, named_collection
from tstore.log.reader import LogReader
from tstore.runtime.concurrency import each
from tstore.storage.base import Storage

__all__ = ["Standing", "weight_of"]

_REMEMBERED = 1024
_COLLECTIONS = 8
_CONDEMNED = 1 << 20  # names that the last gcs condemned together


class Standing:
    """The state as of `version`, whose record ends in the checksum `check`.

    `tree` is what the records make. Where it is not `whole`, objects that it is made of are gone, as in the midst
    of a history of which much was collected; then its tags alone count. Its manifests have `weight` bytes at most.
    `gc` is the version of the newest garbage collection, and `collected` the one that the next record has to name
    as that: a later one where a repair has voided that, which stands for the one before it.
    """

    def __init__(self) -> None:
        self.version = 0
        self.check = b""
        self.tree = Tree.empty()
        self.whole = True
        self.weight = 0
        self.collected = 0
        self.gc = 0
        self._alive: tuple[Alive, ...] = ()
        self._condemned: list[Condemned] = []
        self._recent: dict[str, int] = {}
        self._ledger: Ledger | None = Ledger()
        self._needed: tuple[int, set[str], set[str]] = (-1, set(), set())

    @staticmethod
    async def read(backend: Storage, version: int) -> Standing:
        """Read the state as of a version that exists; `Corrupt` or `NotFound` where the log is damaged."""
        found = Standing()
        if version == 0:
            return found
        log = LogReader.strict(backend)
        found._ledger = None
        found.version, found.check = version, (await log.stored(version)).check
        async for number, record in each(log.record, range(max(1, version - _REMEMBERED + 1), version + 1)):
            found._remember(number, record)
        await found._read_collections(log)
        try:
            found.tree = await log.tree(version)
            found.weight = weight_of(found.tree.manifest())
        except (Corrupt, NotFound, UnsupportedFormat):
            found.whole = False
            async for number, record in each(log.record, range(1, version + 1)):
                found.tree = found.tree.after(number, await log.records.with_collection(number, record), [])
        return found

    async def _read_collections(self, log: LogReader) -> None:
        """Read what the last collections decided; one that was voided, as by a repair, decided nothing."""
        self.collected = await named_collection(log, self.version)
        async for gc, collection in collections(log, await existing_collection(log, self.collected)):
            if not self._condemned:
                self.gc, self._alive = gc, collection.alive
            before, self._condemned = self._condemned, _last([*self._condemned, Condemned.by(collection)])
            if len(self._condemned) in (len(before), _COLLECTIONS):
                break

    async def follow(self, backend: Storage, version: int) -> bool:
        """Go on to a later version, by the records that others created; False where one voided an older one."""
        log = LogReader.strict(backend)
        async for number, (record, check) in each(log.stored, range(self.version + 1, version + 1)):
            if record.voids:
                return False
            manifests: list[Manifest] = []
            there = True
            try:
                manifests = await log.objects.manifests(number, record)
            except (Corrupt, NotFound, UnsupportedFormat):
                there = False
            record = await log.records.with_collection(number, record)
            if number == self.version + 1:  # else it was taken in meanwhile
                whole = there and (self.whole or record.replaces)
                weight = sum(map(weight_of, manifests)) + (0 if record.replaces else self.weight)
                tree = self.tree.after(number, record, manifests)
                self.goes_on(number, record, check, tree, whole=whole, weight=weight)
        return True

    def goes_on(self, version: int, record: Record, check: bytes, tree: Tree, *, whole: bool, weight: int) -> None:
        """Take in the next version, whose record ends in that checksum, and after which the tree is `tree`."""
        self.version, self.check = version, check
        self.tree, self.whole, self.weight = tree, whole, weight
        self._remember(version, record)
        self.collected = record.collected if record.collection is None else version
        if record.collection is not None:
            self.gc = version
            self._alive = record.collection.alive
            self._condemned = _last([Condemned.by(record.collection), *self._condemned])
            self._ledger = Ledger(self._alive)
        elif self._ledger is not None:
            self._ledger.add(version, record)

    async def stands(self, backend: Storage) -> bool:
        """Whether the record of the version is still the same one."""
        try:
            return not self.version or check_of(await backend.get(commit_key(self.version))) == self.check
        except NotFound:
            return False

    async def ledger(self, backend: Storage) -> Ledger:
        """Return a copy of the versions that live; the records since the last collection are read once."""
        if self._ledger is None:
            version = self.version
            ledger = await ledger_since(LogReader.strict(backend), self.gc, self._alive, version)
            if version != self.version:
                return ledger
            self._ledger = ledger
        return Ledger(self._ledger.alive.values())

    async def needs(self, backend: Storage, key: str) -> bool:
        """Whether a version that lives is made of an object, or of one of its transaction."""
        version, transactions, held = self._needed
        if version != self.version:
            version, ledger = self.version, await self.ledger(backend)
            transactions, held = ledger.transactions, ledger.held
            self._needed = version, transactions, held
        return key in held or owner_of(key) in transactions

    def became(self, record: Record) -> int | None:
        """Return the version that a transaction of the record has become before, None where none has of late."""
        if record.void:  # a transaction may need several of these
            return None
        return next((self._recent[t] for t in record.transactions if t in self._recent), None)

    def has_condemned(self, keys: Iterable[str]) -> str | None:
        """Return the first of the objects, or folders of transactions, that a recent collection condemned."""
        return next((key for key in keys if any(gone.covers(key) for gone in self._condemned)), None)

    def _remember(self, version: int, record: Record) -> None:
        if not record.void:
            self._recent.update(dict.fromkeys(record.transactions, version))
        while len(self._recent) > _REMEMBERED:
            del self._recent[next(iter(self._recent))]


def _last(condemned: Sequence[Condemned]) -> list[Condemned]:
    """Return the newest of what gcs condemned, the newest first: so many that memory is bounded, one at least."""
    counts = itertools.accumulate(len(gone.transactions) + len(gone.objects) for gone in condemned[:_COLLECTIONS])
    return [
        gone
        for at, (gone, count) in enumerate(zip(condemned, counts, strict=False))
        if not at or count <= _CONDEMNED
    ]


def weight_of(manifest: Manifest) -> int:
    """Return about how many bytes a manifest has."""
    names = (manifest.packs, manifest.inline, manifest.documents, manifest.paths)
    return sum(len(text) for column in names for text in column) + 56 * len(manifest.table)

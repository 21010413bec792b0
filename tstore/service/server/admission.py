"""Admission control: the records, roots and deletions that a server accepts, validated against its own log.

A record is accepted if it follows from the log before it (`format.tree.validation`) and everything that it names
exists: each manifest with the length and checksum in the record, and each chunk (`chunk_checks`). All this is
checked before the record is created, in steps between which other clients have their `Turns`. Of concurrent
creates of one version, exactly one succeeds.

1. A record of a garbage collection needs the scope ADMIN, and must follow from the living versions
   (`format.tree.retention`).
2. A record that names missing objects needs the scope ADMIN: a copy of a history lacks those of expired versions.
3. The record of a repair needs the scope ADMIN: readers forget the versions that a repair voids.
4. A record may tag, or be a copy of, living versions only; with the scope ADMIN, as in a copy of a history, it may
   also be a copy of a voided one.
5. An archive needs the scope ADMIN, and must have exactly the server's own records, of versions old enough
   (`maintenance.archiving`). So it hides no record. Only then may the objects of these records be deleted.
6. A record names the log of the store, and a record of it, in its link (`log.records.Chain`).
7. A root must have exactly the bytes that the server derives from its log.

The manifests of one record, with their segments, have a bounded number of bytes (`manifests`). The manifests of
all records being validated take at most about `MAX_MEMORY` bytes of memory in total, and so does the tree of a
version; segments are not part of it.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import math
from typing import NamedTuple

from tstore.core.format.bounds import MAX_METRICS, tags_excess_message
from tstore.core.format.frame import check_of
from tstore.core.format.layout import MARKER, ROOT_EVERY, archive_end, commit_key, root_key
from tstore.core.format.objects.encoding import Archive, encode
from tstore.core.format.objects.records import REPAIR, Record, Root
from tstore.core.format.tree.added_chunks import added_chunks
from tstore.core.format.tree.retention import Ledger, check_collection, packs_of
from tstore.core.format.tree.tree import Tree
from tstore.core.format.tree.validation import (
    Steps,
    check_chunks,
    check_compactions,
    check_parts,
    check_reused,
    next_tree,
    run_steps,
)
from tstore.core.log.commits import CommitObjects
from tstore.core.log.marker import Marker
from tstore.core.log.reader import LogReader
from tstore.core.log.records import VersionCache
from tstore.core.maintenance.archiving import may_be_archived
from tstore.core.runtime.concurrency import batched, together
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.errors import AlreadyExists, Corrupt, NotFound, UnsupportedFormat
from tstore.service.server.access import Scope, Sender, admin_refusal
from tstore.service.server.chunk_checks import ChunkChecks, ReceivedPacks
from tstore.service.server.log_state import LoadedTree, LogState
from tstore.service.server.manifests import MAX_MEMORY, ManifestReader, bytes_to_read, within_memory
from tstore.service.server.quotas import Shares, Turns

__all__ = ["Admission", "NextVersion"]

_log = logging.getLogger("tstore.server")

_EXPANSION = 24  # maximum bytes in memory per byte of a manifest, reached if all paths have two characters
_SMALL_RECORD = 16 << 10  # bytes of a record validated on the event loop; larger ones, and manifests, in a thread
_SMALL_TREE = 4096  # nodes; a record on a larger tree is validated in a thread
_MAX_FOLLOWED = 256  # versions of other writers added one by one; beyond these, the whole state is read again
_RECHECK = 5.0  # seconds after which missing objects of a version are looked for again


class NextVersion(NamedTuple):
    """A record that may be created as a version, and the tree after it."""

    version: int
    record: Record
    loaded: LoadedTree


class Admission:
    """Validates the records, roots and deletions of one server against its log."""

    def __init__(self, storage: Storage, wait: float, turns: Turns) -> None:
        self._storage = storage
        self.commits = CommitObjects(storage)
        self._turns = turns
        self._memory = Shares(MAX_MEMORY, wait, waiting_for="memory")
        self._chunks = ChunkChecks(storage, wait, turns)
        self._manifests = ManifestReader(storage, self._chunks, turns)
        self._state = LogState()
        self._following = asyncio.Lock()
        self._deriving_roots = asyncio.Lock()
        self._rechecked = -math.inf
        self._trees: VersionCache[tuple[bytes, Tree]] = VersionCache(4)  # with their records' checksums
        self._roots: VersionCache[tuple[bytes, bytes]] = VersionCache(64)  # checksum of record, hash of root

    @property
    def version(self) -> int:
        """The newest version that the server knows of; others may have created later ones."""
        return self._state.version

    @property
    def received(self) -> ReceivedPacks:
        """The packs received since the newest garbage collection."""
        return self._state.progress.received

    async def admit(self, version: int, record: Record, data: bytes, sender: Sender) -> NextVersion:
        """Validate a record with its bytes as the next version.

        Raise `Corrupt` if it is invalid, `Refused` if the scope is insufficient or the server is busy, and
        `AlreadyExists` if the version was created meanwhile.
        """
        scope = sender.scope
        state = await self._state_at(version - 1)
        state.chain.check(version, record, data)
        check_parts(record)
        if record.by_repair and scope < Scope.ADMIN:
            subject = f"copying a repair, whose transaction has an id that starts with {REPAIR!r},"
            raise admin_refusal(subject, scope)
        await self._check_last_collection(state, record, scope)
        if record.named_versions:
            await self._check_named(state, version, record, scope)
        if (committed := state.committed_as(record)) is not None:
            raise Corrupt(f"its transaction is already committed, as version {committed}")
        state.check_not_condemned(f"txn/{transaction}" for transaction in record.transactions)
        if record.void:
            return NextVersion(version, record, state.loaded)
        if record.collection is not None:
            return await self._admit_collection(state, version, record, scope)
        if (metrics := len(record.metadata.get("metrics", ()))) > MAX_METRICS:
            raise Corrupt(f"it has {metrics:,} metrics; a commit has at most {MAX_METRICS:,}")
        total = bytes_to_read(record)
        if not (state.loaded.complete or record.replaces or record.source or scope >= Scope.ADMIN):
            state = await self._recheck_objects(state)
        state = copy.copy(state)  # the original may advance meanwhile
        tree = state.loaded.tree
        async with self._memory.claim(sender.client, _EXPANSION * total):
            small = len(data) <= _SMALL_RECORD and not total and len(tree.nodes) <= _SMALL_TREE
            loaded = await self._admit_changes(state, record, small, sender)
        adds_tags = not tree.tags.keys() >= {*record.tags, *record.tagged}
        if adds_tags and (excess := tags_excess_message(loaded.tree.tags)):
            raise Corrupt(f"there would be {excess}")
        return NextVersion(version, record, loaded)

    def advance(self, admitted: NextVersion, data: bytes) -> None:
        """Advance the state by a record that was created."""
        version, record, loaded = admitted
        if self._state.version == version - 1:
            self._state.chain.add(version, record, data)
            self._state.advance(version, record, check_of(data), loaded)
        if version % ROOT_EVERY == 0 and loaded.complete and not loaded.tree.resumes:
            self._trees.put(version, (check_of(data), loaded.tree))

    async def check_root(self, version: int, root: Root, data: bytes) -> None:
        """Raise `Corrupt` unless a root has exactly the bytes that the server derives from its log."""
        await self._newest()
        try:
            check = check_of(await self.commits.get(version))
        except NotFound:
            raise Corrupt(f"there is no version {version} yet") from None
        if root.record_check != check:
            raise Corrupt("it is the root of another record than the server's")
        cached = self._roots.get(version)
        if cached is None or cached[0] != check:
            async with self._deriving_roots:
                tree = await self._tree_at(version, check)
                derived = await LogReader.strict(self._storage).root(tree)
                cached = check, await run(_hash, derived.data)
                self._roots.put(version, cached)
        if await run(_hash, data) != cached[1]:
            raise Corrupt(f"it differs from the records up to version {version}")

    async def check_archive(self, archive: Archive, data: bytes, sender: Sender) -> None:
        """Raise `Corrupt` unless an archive has the server's own records, `Refused` without the scope ADMIN."""
        if sender.scope < Scope.ADMIN:
            raise admin_refusal("archiving records, as a garbage collection does,", sender.scope)
        state = await self._newest()
        if not may_be_archived(archive.end, state.version):
            raise Corrupt(f"version {archive.end} is not old enough, or does not exist yet")
        records: list[bytes] = []
        try:
            for versions in batched(range(archive.end - len(archive.records) + 1, archive.end + 1)):
                records += await together(self.commits.get, versions)
        except NotFound:
            raise Corrupt(f"a record up to version {archive.end} is missing on the server") from None
        if await run(encode, Archive(archive.end, tuple(records))) != data:
            raise Corrupt("its records are not those of the server")

    async def is_archived(self, version: int) -> bool:
        """Return whether the record of a version is in an archive, so that its own object is not needed."""
        return await self.commits.archive(archive_end(version)) is not None

    async def check_marker(self, marker: Marker) -> None:
        """Raise `Corrupt` if there already are records of another log, or a store around this one."""
        if await self._storage.enclosing(MARKER):
            raise Corrupt("the server's folder is inside another store; serve one beside it")
        log_id = (await self._newest()).chain.log_id
        if log_id not in (None, marker.log_id):
            raise Corrupt("the records here belong to another store")

    async def may_delete(self, key: str) -> bool:
        """Return whether a garbage collection condemned an object, and no living version needs it."""
        state = await self._newest()
        return state.is_condemned(key) and not await state.needs(self._storage, key)

    async def _newest(self) -> LogState:
        """Return the state as of the newest version."""
        async with self._following:
            state = self._state
            known = state.chain.log_id is not None and await state.is_current(self.commits)
            if known and not await self.commits.existing([state.version + 1]):
                return state
            return await self._follow(await LogReader.strict(self._storage).newest())

    async def _state_at(self, version: int) -> LogState:
        """Return the state as of `version`; raise `Corrupt` if missing, `AlreadyExists` if not the newest."""
        async with self._following:
            state = self._state
            if version and state.version == version and await state.is_current(self.commits):
                return state
            if version and state.version != version and not await self.commits.existing([version]):
                raise Corrupt(f"there is no version {version}, and versions are numbered without gaps")
            if await self.commits.existing([version + 1]):
                raise AlreadyExists(f"{commit_key(version + 1)} already exists")
            return await self._follow(version)

    async def _follow(self, version: int) -> LogState:
        """Bring the state up to a version, incrementally if the record of the known version is still the same."""
        state = self._state
        try:
            near = state.version <= version <= state.version + _MAX_FOLLOWED
            current = near and state.chain.log_id is not None and await state.is_current(self.commits)
            if not (current and await state.follow(self._storage, version)):
                self._trees.drop_from(0)
                self._roots.drop_from(0)
                self._state = await LogState.read(self._storage, version)
        except (Corrupt, NotFound, UnsupportedFormat) as error:
            self._state = LogState()
            _log.warning("version %d can't be read: %s", version, error)
            raise _unreadable(version) from error
        return self._state

    async def _recheck_objects(self, state: LogState) -> LogState:
        """Read the state again, at most every `_RECHECK` seconds; raise `Corrupt` if objects are still missing."""
        now, version = asyncio.get_running_loop().time(), state.version
        if now >= self._rechecked + _RECHECK:
            self._rechecked = now
            async with self._following:
                self._state = state = await LogState.read(self._storage, version)
        if not state.loaded.complete or state.version != version:
            raise _unreadable(version)
        return state

    async def _record(self, version: int) -> Record:
        """Return the record of a version; raise `Corrupt` without revealing the URL of the store."""
        try:
            return await LogReader(self._storage).record(version)
        except (Corrupt, NotFound, UnsupportedFormat) as error:
            _log.warning("version %d can't be read: %s", version, error)
            raise _unreadable(version) from error

    async def _check_last_collection(self, state: LogState, record: Record, scope: Scope) -> None:
        """Raise `Corrupt` unless the record names the last garbage collection.

        In a copy of a history, the record may name a collection that a repair has voided. Its number stands for
        the collection before it. Readers have to follow such a number, so naming it needs the scope ADMIN.
        """
        last, named = state.collected, record.collected
        while scope >= Scope.ADMIN and named > last and (voided := await self._record(named)).was_voided:
            named = voided.collected
        if named != last:
            raise Corrupt(f"it names version {record.collected} as the last garbage collection; expected {last}")

    async def _check_named(self, state: LogState, version: int, record: Record, scope: Scope) -> None:
        """Raise `Corrupt` if a record tags, or is a copy of, a version that is not alive.

        With the scope ADMIN, the version may be voided.
        """
        not_living = await state.not_living(self._storage, record.named_versions)
        while scope >= Scope.ADMIN and not_living and (await self._record(not_living[-1])).was_voided:
            not_living.pop()
        if state.version != version - 1:
            raise AlreadyExists(f"{commit_key(version)} was created meanwhile")
        if not_living:
            what = "tags" if record.tagged else "is a copy of"
            raise Corrupt(f"it {what} version {not_living[-1]}, which is not alive")

    async def _admit_collection(self, state: LogState, version: int, record: Record, scope: Scope) -> NextVersion:
        if scope < Scope.ADMIN:
            raise admin_refusal("the record of a garbage collection, also in a copy,", scope)
        ledger = await state.ledger_at_end(self._storage)
        voided = await self._voided(record, state, ledger)
        loaded = state.loaded
        if state.version != version - 1:
            raise AlreadyExists(f"{commit_key(version)} was created meanwhile")

        def checked_tree() -> Tree:
            check_collection(record, ledger, packs_of(loaded.tree) if loaded.complete else (), voided)
            return loaded.tree.after(version, record, [])

        return NextVersion(version, record, loaded._replace(tree=await run(checked_tree)))

    async def _voided(self, record: Record, state: LogState, ledger: Ledger) -> frozenset[int]:
        """Return which voided versions decide whether the record of a garbage collection is valid.

        These are the voided ones among: the last collection that the record names; the other versions that it
        names although they are not living; and the newest living versions that it expires.
        """
        collection = record.collection
        assert collection is not None
        voided: set[int] = set()
        if record.collected != state.gc and (await self._record(record.collected)).was_voided:
            voided.add(record.collected)
        for numbers in batched(sorted({*collection.expired, *collection.versions} - ledger.alive.keys())):
            records = await together(self._record, numbers)
            repaired = {number for number, other in zip(numbers, records, strict=True) if other.was_voided}
            voided |= repaired
            if len(repaired) < len(numbers) and not record.by_repair:
                break  # a version is neither living nor voided, so the record will be refused
        expired = set(collection.expired)
        for version in sorted(ledger.alive, reverse=True):
            if version not in expired or not (await self._record(version)).was_voided:
                break
            voided.add(version)
        return frozenset(voided)

    async def _admit_changes(self, state: LogState, record: Record, small: bool, sender: Sender) -> LoadedTree:
        """Check a record's manifests, paths and chunks, on the event loop if `small`; return the tree after it."""
        version, before = state.version + 1, state.loaded
        manifests, complete, added, absent = await self._manifests.read(record, sender.client)
        _check_present(absent, sender.scope)
        memory = before.memory_after(record, 0 if record.source else added)
        complete = complete and (before.complete or record.replaces or record.source > 0)

        def check() -> Steps[dict[str, int]]:
            if complete:  # first, since one comparison refuses a record that lists 10^5 packs without reusing them
                check_reused(record, manifests)
            state.check_not_condemned(record.reused)
            return (yield from check_chunks(manifests))

        pack_ends = run_steps(check()) if small else await self._turns.complete(sender.client, check())
        async for key in self._chunks.absent_packs(pack_ends):
            absent.append(key)
            _check_present(absent, sender.scope)

        def apply() -> Steps[LoadedTree]:
            if not complete:
                is_complete = before.complete and record.source > 0
                return LoadedTree(before.tree.after(version, record, []), is_complete, memory)
            if (
                sender.scope < Scope.ADMIN
            ):  # an admin may copy compactions of versions that a repair has voided since
                yield from check_compactions(record, manifests, before.tree.nodes)
            tree = yield from next_tree(version, record, manifests, before.tree)
            return before._replace(tree=tree, memory=memory) if record.source else within_memory(tree, memory)

        small &= memory <= MAX_MEMORY  # otherwise the memory is counted exactly, which takes long
        after = run_steps(apply()) if small else await self._turns.complete(sender.client, apply())
        if pack_ends:
            chunks = added_chunks(record, manifests, before.tree.nodes, frozenset(absent))
            await self._chunks.check(chunks, (record.manifests, absent), state.progress, sender.client)
        return after

    async def _tree_at(self, version: int, check: bytes) -> Tree:
        """Return the tree of a version whose record ends in `check`, from the root before it and later records."""
        cached = self._trees.get(version)
        if cached is not None and cached[0] == check:
            return cached[1]
        below = version - ROOT_EVERY
        if below and await self._storage.head(root_key(below)) is None:
            raise Corrupt(f"the server can't derive it, because {root_key(below)} is missing")
        try:
            return await LogReader.strict(self._storage).head(version)
        except (Corrupt, NotFound, UnsupportedFormat) as error:
            _log.warning("the tree of version %d can't be derived: %s", version, error)
            raise Corrupt(f"version {version} can't be read on the server") from error


def _check_present(absent: list[str], scope: Scope) -> None:
    """Raise `Refused` if objects that a record names are absent, unless the scope permits that."""
    if absent and scope < Scope.ADMIN:
        subject = f"the record names {absent[0][:99]}, which does not exist; copying a collected store"
        raise admin_refusal(subject, scope)


def _unreadable(version: int) -> Corrupt:
    return Corrupt(
        f"version {version} can't be read on the server: objects are missing, damaged or not copied yet; `tstore "
        "verify` names them"
    )


def _hash(data: bytes) -> bytes:
    """Return a cryptographic hash, since a client may choose the bytes."""
    return hashlib.sha256(data).digest()

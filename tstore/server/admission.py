"""Which records and roots a server takes, and what it lets go: what its own log does not bear out is refused.

A record is taken where it follows from the log before it (`format.validation`), and all that it names is here:
each manifest with the length and the checksum that it says, each pack as long as its chunks need, and chunks that
travel in it with their checksums. All this is looked at before it is created, and of those who race for
a number one wins as ever.

1. A record of a garbage collection needs the scope ADMIN, and follows from what lives (`format.condemned`).
2. A record that names objects which are not here needs the scope ADMIN: in a copy of a history, the versions that
   were collected have lost theirs.
3. A root has the very bytes that the server makes of its log.

What one record makes the server read is its manifests, at most `_MOST_READ` bytes, which is also the most that is
read at once for all records together, and the lengths of the packs that they name. The tree that the server keeps
in memory has at most about `_HEAVIEST` bytes; a record that would make it larger is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Hashable
from typing import NamedTuple

from tstore.errors import AlreadyExists, Corrupt, NotFound, UnsupportedFormat
from tstore.format.condemned import check_collection, packs_of
from tstore.format.encoding import decode, encode
from tstore.format.frame import check_of
from tstore.format.layout import ROOT_EVERY, commit_key, root_key
from tstore.format.records import Record, Root
from tstore.format.references import Manifest, ObjectRef
from tstore.format.retention import Ledger
from tstore.format.tree import Tree
from tstore.format.validation import applied, check_form, check_inline, pack_ends
from tstore.log.reader import LogReader
from tstore.log.version_cache import VersionCache
from tstore.runtime.concurrency import batched, together
from tstore.runtime.pool import run
from tstore.server.access import Scope
from tstore.server.limits import SMALLER
from tstore.server.responses import Refused
from tstore.server.shares import Shares
from tstore.server.standing import Standing, weight_of
from tstore.storage.base import Storage

__all__ = ["Admission", "Next", "Sender"]

_log = logging.getLogger("tstore.server")

_MOST_READ = 192 << 20
_HEAVIEST = 256 << 20
_WITH_TOKENS = "serve with a --token-file that has one, or copy to a folder and serve that"
_SMALL = 16 << 10  # bytes of a record that is compared at once; of a longer one, and of manifests, in a thread
_FEW = 4096  # nodes of a tree to which that applies
_NEAR = 256  # versions that others created, which are read one by one
_AGAIN = 5.0  # seconds after which objects that a version lacked are looked for again


class Sender(NamedTuple):
    """Who sends a record: a client, and the scope of its token."""

    client: Hashable
    scope: Scope


class Next(NamedTuple):
    """A record that may become the next version, and the tree that it makes."""

    version: int
    record: Record
    tree: Tree
    whole: bool
    weight: int


class Admission:
    """Compares what is to be stored, or removed, with the log of one server."""

    def __init__(self, storage: Storage, wait: float) -> None:
        self._storage = storage
        self._memory = Shares(_MOST_READ, wait, "memory")
        self._standing = Standing()
        self._following = asyncio.Lock()
        self._making_roots = asyncio.Lock()
        self._looked = -math.inf
        self._rooted: VersionCache[tuple[bytes, Tree]] = VersionCache(4)
        self._roots: VersionCache[tuple[bytes, bytes]] = VersionCache(64)

    async def admitted(self, version: int, record: Record, size: int, sender: Sender) -> Next:
        """Return the record, of `size` bytes, as the next version.

        `Corrupt` says why it can't be, `Refused` that the scope does not suffice, `AlreadyExists` that the version
        was taken meanwhile.
        """
        scope = sender.scope
        standing = await self._as_of(version - 1)
        check_form(record)
        await self._check_collected(standing, record, scope)
        if (became := standing.became(record)) is not None:
            raise Corrupt(f"its transaction became version {became} before")
        owned = [f"txn/{transaction}" for transaction in record.transactions]
        if (gone := standing.has_condemned([*owned, *record.reused])) is not None:
            raise Corrupt(f"a garbage collection condemned {gone}")
        if record.void:
            return Next(version, record, standing.tree, standing.whole, standing.weight)
        if record.collection is not None:
            return await self._collecting(standing, version, record, scope)
        total = sum(where.length for where in record.manifests if isinstance(where, ObjectRef))
        if total > _MOST_READ:
            raise Corrupt(
                f"its manifests have {total} bytes; a server takes {_MOST_READ} in one commit: {SMALLER}"
            )
        if not (standing.whole or record.replaces or scope >= Scope.ADMIN):
            standing = await self._whole_again(standing)
        weight = size + total + (0 if record.replaces else standing.weight)
        before = Next(version, record, standing.tree, standing.whole, weight)
        async with self._memory.claim(sender.client, total):
            quick = size <= _SMALL and not total and len(before.tree.nodes) <= _FEW
            return await self._changing(before, quick, scope)

    def took(self, made: Next, data: bytes) -> None:
        """Go on with a record that was created."""
        version, record, tree, whole, weight = made
        if self._standing.version == version - 1:
            self._standing.goes_on(version, record, check_of(data), tree, whole=whole, weight=weight)
        if version % ROOT_EVERY == 0 and whole:
            self._rooted.put(version, (check_of(data), tree))

    async def check_root(self, version: int, root: Root, data: bytes) -> None:
        """Raise `Corrupt` unless the root of a version is, to the byte, what the server makes of its log."""
        await self._newest()
        try:
            check = check_of(await self._storage.get(commit_key(version)))
        except NotFound:
            raise Corrupt(f"there is no version {version} yet") from None
        if root.record != check:
            raise Corrupt("it is the root of another record than the one here")
        known = self._roots.get(version)
        if known is None or known[0] != check:
            async with self._making_roots:
                tree = await self._tree_of(version, check)
                known = check, await run(lambda: _hash(encode(tree.root(check))))
                self._roots.put(version, known)
        if await run(_hash, data) != known[1]:
            raise Corrupt(f"it is not what the records up to version {version} make")

    async def may_go(self, key: str) -> bool:
        """Whether a garbage collection condemned an object, of which no version that lives is made."""
        standing = await self._newest()
        return standing.has_condemned([key]) is not None and not await standing.needs(self._storage, key)

    async def _newest(self) -> Standing:
        """The state as of the newest version there is."""
        async with self._following:
            known = self._standing
            if (
                await known.stands(self._storage)
                and await self._storage.head(commit_key(known.version + 1)) is None
            ):
                return known
            return await self._follow(await LogReader.strict(self._storage).newest())

    async def _as_of(self, version: int) -> Standing:
        """The state as of the newest version; `AlreadyExists` where there is a later one already."""
        async with self._following:
            known = self._standing
            if version and known.version == version and await known.stands(self._storage):
                return known
            if version and known.version != version and await self._storage.head(commit_key(version)) is None:
                raise Corrupt(f"there is no version {version}, and no number is left out")
            if await self._storage.head(commit_key(version + 1)) is not None:
                raise AlreadyExists(f"{commit_key(version + 1)} exists already")
            return await self._follow(version)

    async def _follow(self, version: int) -> Standing:
        """The state as of the newest version, from what is known of an older one if that still stands."""
        known = self._standing
        try:
            near = known.version <= version <= known.version + _NEAR and await known.stands(self._storage)
            if not near or not await known.follow(self._storage, version):
                self._rooted.drop(0)
                self._roots.drop(0)
                self._standing = await Standing.read(self._storage, version)
        except (Corrupt, NotFound, UnsupportedFormat) as error:
            self._standing = Standing()
            _log.warning("version %d can't be read: %s", version, error)
            raise _unread(version) from error
        return self._standing

    async def _whole_again(self, standing: Standing) -> Standing:
        """The state of a version of which objects were missing, now that they may be there."""
        now, version = asyncio.get_running_loop().time(), standing.version
        if now >= self._looked + _AGAIN:
            self._looked = now
            async with self._following:
                self._standing = standing = await Standing.read(self._storage, version)
        if not standing.whole or standing.version != version:
            raise _unread(version)
        return standing

    async def _record(self, version: int) -> Record:
        """The record of a version; `Corrupt` does not say where the store lies."""
        try:
            return await LogReader(self._storage).record(version)
        except (Corrupt, NotFound, UnsupportedFormat) as error:
            _log.warning("version %d can't be read: %s", version, error)
            raise _unread(version) from error

    async def _check_collected(self, standing: Standing, record: Record, scope: Scope) -> None:
        """Raise `Corrupt` unless the record names the last garbage collection.

        In the copy of a history it may be one that a repair has voided, which stands for the one before it. Each
        reader follows such names, so a token that may not collect adds none.
        """
        last, named = standing.collected, record.collected
        while scope >= Scope.ADMIN and named > last and (void := await self._record(named)).is_repair:
            named = void.collected
        if named != last:
            raise Corrupt(f"it says that {record.collected} was the last garbage collection; expected {last}")

    async def _collecting(self, standing: Standing, version: int, record: Record, scope: Scope) -> Next:
        if scope < Scope.ADMIN:
            raise Refused(
                403,
                "the record of a garbage collection, also in a copy, needs a token of the scope admin, this "
                f"request has {scope.name.lower()}; {_WITH_TOKENS}",
            )
        ledger = await standing.ledger(self._storage)
        voided = await self._voided(record, standing, ledger)
        tree, whole, weight = standing.tree, standing.whole, standing.weight
        if standing.version != version - 1:
            raise AlreadyExists(f"{commit_key(version)} was created meanwhile")

        def checked() -> Tree:
            check_collection(record, ledger, packs_of(tree) if whole else (), voided)
            return tree.after(version, record, [])

        return Next(version, record, await run(checked), whole, weight)

    async def _voided(self, record: Record, standing: Standing, ledger: Ledger) -> frozenset[int]:
        """The versions named by the record of a garbage collection that a repair has voided, as far as it matters.

        These are those that do not live by the log, and the newest of those that do and expire.
        """
        gone = record.collection
        assert gone is not None
        found: set[int] = set()
        if record.collected != standing.gc and (await self._record(record.collected)).is_repair:
            found.add(record.collected)
        for numbers in batched(sorted({*gone.expired, *gone.versions} - ledger.alive.keys())):
            records = await together(self._record, numbers)
            repairs = {number for number, other in zip(numbers, records, strict=True) if other.is_repair}
            found |= repairs
            if len(repairs) < len(numbers):
                break  # it is refused
        expired = set(gone.expired)
        for version in sorted(ledger.alive, reverse=True):
            if version not in expired or not (await self._record(version)).is_repair:
                break
            found.add(version)
        return frozenset(found)

    async def _changing(self, before: Next, quick: bool, scope: Scope) -> Next:
        version, record, tree, whole, weight = before
        absent: list[str] = []
        manifests = [m for where in record.manifests if (m := await self._manifest(where, absent)) is not None]
        ends = _ends(manifests) if quick else await run(_ends, manifests)
        known = not absent and (whole or record.replaces)
        for keys in batched(ends):
            for key, size in zip(keys, await together(self._storage.size, keys), strict=True):
                if size is None:
                    absent.append(key)
                elif size < ends[key]:
                    raise Corrupt(f"{key} has {size} bytes, and a chunk of it ends at {ends[key]}")
            if absent and scope < Scope.ADMIN:
                break
        if absent and scope < Scope.ADMIN:
            raise Refused(
                403,
                f"the record names {absent[0][:99]}, which is not here; to copy a collected store needs a token "
                f"of the scope admin, this request has {scope.name.lower()}; {_WITH_TOKENS}",
            )

        def made() -> Next:
            if not known:
                return Next(version, record, tree.after(version, record, []), False, weight)
            result = applied(version, record, manifests, tree)
            return _bounded(Next(version, record, result, True, weight))

        return made() if quick and weight <= _HEAVIEST else await run(made)

    async def _manifest(self, where: ObjectRef | Manifest, absent: list[str]) -> Manifest | None:
        """The manifest that a record names; None, and its key in `absent`, where it is not here."""
        if isinstance(where, Manifest):
            return where
        size = await self._storage.size(where.key)
        if size is None:
            absent.append(where.key)
            return None
        data = await self._storage.get(where.key) if size == where.length else b""
        if not where.is_to(data):
            raise Corrupt(f"{where.key} has another length, or checksum, than it says")
        return await run(decode, data, Manifest)

    async def _tree_of(self, version: int, check: bytes) -> Tree:
        """The tree of an older version, from the root before it and the records since then."""
        known = self._rooted.get(version)
        if known is not None and known[0] == check:
            return known[1]
        below = version - ROOT_EVERY
        if below and await self._storage.head(root_key(below)) is None:
            raise Corrupt(f"{root_key(below)} is missing, from which it would be made")
        try:
            return await LogReader.strict(self._storage).tree(version)
        except (Corrupt, NotFound, UnsupportedFormat) as error:
            _log.warning("the tree of version %d can't be made: %s", version, error)
            raise Corrupt(f"version {version} can't be read here") from error


def _ends(manifests: list[Manifest]) -> dict[str, int]:
    """How long each pack must be at least; `Corrupt` where what travels in the manifests is not as they say."""
    ends = pack_ends(manifests)
    check_inline(manifests)
    return ends


def _unread(version: int) -> Corrupt:
    return Corrupt(
        f"version {version} can't be read here: objects of it are missing or damaged, or were not copied yet; "
        "tstore verify tells which"
    )


def _bounded(made: Next) -> Next:
    """The same, with the true weight of the tree where it may be too heavy; `Corrupt` where it is."""
    if made.weight <= _HEAVIEST:
        return made
    root = made.tree.root(b"")
    weight = weight_of(root.manifest)
    if weight > _HEAVIEST:
        raise Corrupt(
            f"the references to all chunks would have {weight} bytes; a server takes {_HEAVIEST}: {SMALLER}"
        )
    return made._replace(tree=Tree.of(root), weight=weight)


def _hash(data: bytes) -> bytes:
    """What tells these bytes from any others, also from those that somebody looks for."""
    return hashlib.sha256(data).digest()

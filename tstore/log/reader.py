"""The records of a log as they are read: which is the newest, and what the tree is as of a version.

Finding the newest version
1. Start from the highest version this process has seen, or from the `latest` hint if that version exists.
2. Gallop: probe 1, 2, 4, … numbers further while they exist; numbers are dense and never deleted.
3. Bisect between the last that exists and the first that does not.

Where a request mostly waits for a server, a probe reads the record, many go out at once (`search`), and
with the last of them whatever the tree needs from below. So the tree as of a new version takes no other requests,
and the root that the hint stands for is read with the first of them.

A process that knows the newest version looks at the next number only; on a disk it reads at once what is above it,
up to the first number that is absent, and looks whether there is one behind that: then the log has a hole.

What is believed
1. With the look above the newest known record, that record itself is read again. Where it is another one or gone,
   the store was replaced, as by restoring a backup at its URL: `TimelineChanged`. It is not read again within a
   moment after the last look, in which a commit goes out without one.
2. A root counts where it names the checksum of the record of its version. Any other, and one that cannot be read,
   is passed over, and older roots and the records serve instead. A root stands for all records up to its own; that
   these are the ones it was made of follows only as long as each number is written once. Somebody who replaces
   single records of a store breaks that, and `tstore verify` tells, as it compares each root with the records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import takewhile

from msgspec.structs import replace

from tstore.errors import Corrupt, NotFound, TimelineChanged, UnsupportedFormat
from tstore.format.encoding import size_of
from tstore.format.frame import check_of
from tstore.format.layout import commit_key, root_key
from tstore.format.records import Record, Root, Stored
from tstore.format.references import Manifest
from tstore.format.tree import Changes, Tree, tree_of
from tstore.log.decisions import Deciding
from tstore.log.recent import Recent
from tstore.log.search import NEVER, Search
from tstore.runtime.concurrency import InTurn
from tstore.runtime.pool import run
from tstore.storage.base import SHORT, Backend
from tstore.storage.cache.store import forget

__all__ = ["HINT", "ROOT_EVERY", "Records", "read_hint"]

ROOT_EVERY = 64
HINT = "latest"

_CACHED, _CACHED_BYTES = 256, 8 << 20  # records, and their bytes as they are stored
_TREES = 4
_MOST_AHEAD = 32


async def read_hint(backend: Backend) -> int:
    """What the hint says is the newest version, not to be trusted; 0 where there is none."""
    try:
        hint = int(await backend.get(HINT))
    except (NotFound, ValueError, Corrupt):
        return 0
    return hint if 0 < hint < NEVER else 0


class Records(Deciding):
    """The commits of one store. `hint` is what `read_hint` gave, if that was asked already.

    The event loops of several threads may use one.
    """

    def __init__(self, backend: Backend, hint: int | None = None) -> None:
        super().__init__(backend)
        self._hint = hint
        self._newest = 0
        self._replaced = ""  # why nothing that is known counts any more
        self._repairs: set[int] = set()  # versions that told of a repair
        self._voided: set[int] = set()  # what the last of these voided, not looked at yet
        self._search = Search(self._exist, waits=backend.transfer.waits)
        self._records: Recent[Stored] = Recent(_CACHED, _CACHED_BYTES)
        self._trees: Recent[Tree] = Recent(_TREES)
        self._changes: Recent[tuple[Record, Changes]] = Recent(_CACHED)

    async def newest(self) -> int:
        """The highest version that is committed now; 0 for an empty log. `TimelineChanged`."""
        self._check_timeline()
        await self._check_voided()
        known = self._newest
        if known and self.backend.transfer.waits:
            more, _ = await asyncio.gather(self._exists(known + 1), self._confirm_stored(known))
            if not more:
                return known
            low, high = await self._gallop(known + 1)
        elif known:
            newer, _, more = await self._read_above(known)
            self._newest = max(self._newest, low := known + len(newer))
            if not more:
                return low
            low, high = await self._gallop(low)
        else:
            low, high = await self._gallop_from_hint()
        while high - low > 1:
            between = self._search.between(low, high)
            below = self._needed_below(low) if len(between) == high - low - 1 else []
            (low, high), _ = await asyncio.gather(self._search.narrowed(low, between, high), self._exist(below))
        self._newest = max(self._newest, low)
        return low

    async def above(self, version: int) -> list[Record]:
        """The records above a version; `Corrupt` where the log has a hole behind them, `TimelineChanged`."""
        found: list[Record] = []
        while True:
            newer, broken, more = await self._read_above(version + len(found))
            found += newer
            if broken:
                raise self._hole(version + len(found) + 1)
            if not more:
                return found

    def is_end(self, version: int) -> bool:
        """Whether nothing stood above a version when that was last looked at, a moment ago."""
        return not self._replaced and self._search.is_end(version)

    async def _read_above(self, version: int) -> tuple[list[Record], bool, bool]:
        """The next records above a version, whether a hole ends them, and whether there may be more.

        The last of those that are known is read again, and confirmed.
        """
        self._check_timeline()
        found: list[Record] = []
        while len(found) < _MOST_AHEAD and (known := self._records.get(version + len(found) + 1)) is not None:
            found.append(known.record)
        last, since = version + len(found), asyncio.get_running_loop().time()
        numbers = range(max(1, last), version + _MOST_AHEAD + 2)
        objects, broken, cut = await self.backend.leading(map(commit_key, numbers))
        objects.reverse()  # each goes once it is decoded
        if last:
            self._confirm(last, objects.pop() if objects else None)
        while objects:
            found.append(self._keep_data(version + len(found) + 1, objects.pop()).record)
        more = cut or len(found) >= _MOST_AHEAD
        if not more and not broken:
            self._search.ends_at(version + len(found), since)
        return found, broken, more

    async def _confirm_stored(self, version: int) -> None:
        """Raises `TimelineChanged` where the record of a version is not the one that is known."""
        try:
            await self.taken(commit_key(version), lambda data: self._confirm(version, data))
        except NotFound:
            self._confirm(version, None)

    def _confirm(self, version: int, data: bytes | None) -> None:
        """Raises `TimelineChanged` where these bytes, read just now, are not of the record that is known."""
        known = self._records.get(version)
        if data is not None and (known is None or check_of(data) == known.check):
            return
        if data is not None:
            self.decoded(commit_key(version), data, Record)  # `Corrupt` where it is the same one, damaged
        what = "is gone" if data is None else "is another one than before"
        self._replaced = (
            f"{self.backend.url}: {commit_key(version)} {what}: the store was replaced, as by a backup that was "
            "restored there; nothing that this process knows of it counts any more: open the store anew"
        )
        self._check_timeline()

    def _check_timeline(self) -> None:
        """Raises `TimelineChanged` once that was found: by then records of both histories may be known."""
        if self._replaced:
            raise TimelineChanged(self._replaced)

    async def _gallop_from_hint(self) -> tuple[int, int]:
        """As `_gallop`, from where the hint says, or from 0 if that is no version."""
        hint = await read_hint(self.backend) if self._hint is None else self._hint
        if hint == 0:
            return await self._gallop(0)
        ahead = self.backend.transfer.waits and hint % ROOT_EVERY == 0
        found, root = await asyncio.gather(self._search.gallop(hint, sure=False), self._root(hint if ahead else 0))
        if found[0] < hint:
            return await self._gallop(0)
        if (tree := tree_of(root, hint, self._records.get(hint))) is not None:
            self._trees.put(hint, tree)
        return found if found[1] < NEVER else await self._gallop(found[0])

    async def _gallop(self, base: int) -> tuple[int, int]:
        """A version that exists (or 0) and one above it that does not, found from `base` up."""
        low, high = await self._search.gallop(base)
        if high == NEVER:
            raise Corrupt(
                f"{self.backend.url} has an object under each name that is asked for, also {commit_key(low)}; "
                "check what answers there: a store's server says 404 for what it does not have"
            )
        return low, high

    def _needed_below(self, version: int) -> list[int]:
        """The versions below one whose records its tree takes, and which are not known."""
        if not self.backend.transfer.waits:
            return []
        known = max(version - version % ROOT_EVERY, *(v for v in (0, *self._trees.versions()) if v <= version))
        return [v for v in range(known + 1, version) if v not in self._records]

    async def record(self, version: int) -> Record:
        """The record of a version; `NotFound` where there is none."""
        return (await self.stored(version)).record

    async def stored(self, version: int) -> Stored:
        """The record of a version with its checksum; `NotFound` where there is none."""
        if (known := self._records.get(version)) is not None:
            return known
        key = commit_key(version)
        try:  # as `taken`, with one call less for each of thousands of records
            data = await self.backend.get(key, SHORT)
        except Corrupt:
            return await self.taken_alone(
                key, lambda data: self._keep_data(version, data), lambda: self._records.get(version)
            )
        return self._keep_data(version, data)

    def keep(self, version: int, stored: Stored, size: int) -> Stored:
        """Remember the record of a version, of `size` bytes, and return it as `stored` does."""
        record = self._apart(version, stored.record, size)
        if record is not stored.record:
            stored, size = Stored(record, stored.check), size_of(replace(record, collection=None))
        self._records.put(version, stored, size)
        return stored

    def _keep_data(self, version: int, data: bytes) -> Stored:
        """The record in what was read of a version, which is kept."""
        record = self._record_in(version, data)
        if record.voids and version not in self._repairs:
            self._repairs.add(version)
            self._voided.update(v for v in record.voids if 0 < v < version)
        return self.keep(version, Stored(record, check_of(data)), len(data))

    async def _check_voided(self) -> None:
        """Raises `TimelineChanged` where a record that is known was voided since, by what a record says.

        A tree that may be made of one that is not known any more is forgotten, and so is what a cache has of it.
        """
        while self._voided:
            version = self._voided.pop()
            known = self._records.get(version)
            first, last = -(-version // ROOT_EVERY) * ROOT_EVERY, max([version, *self._records.versions()])
            for key in (commit_key(version), *map(root_key, range(first, last + 1, ROOT_EVERY))):
                await run(forget, self.backend, key)
            if known is not None and not known.record.void:
                await self._confirm_stored(version)
            self._trees.drop(version)

    async def changes(self, version: int, record: Record) -> Changes:
        """What the record of a version changed; many transactions of a process validate against the same ones."""
        known, changes = self._changes.get(version) or (None, None)
        if known is not record or changes is None:
            changes = Changes.of(record, await self.manifests(version, record))
            self._changes.put(version, (record, changes))
        return changes

    async def tree(self, version: int) -> Tree:
        """The tree as of a version that exists."""
        await self._check_voided()
        known = self._trees.get(version)
        if known is not None:
            return known
        tree, records = await self._way_to(version)
        numbers = range(tree.version + 1, version + 1)
        last = max((v for v, r in zip(numbers, records, strict=True) if r.replaces), default=0)
        shown = [(v, r) for v, r in zip(numbers, records, strict=True) if v >= last]  # that one replaces the rest
        manifests: list[list[Manifest]] = [[]] * (len(records) - len(shown))
        if all(isinstance(m, Manifest) for _, r in shown for m in r.manifests):
            manifests += [await self.manifests(v, r) for v, r in shown]
        else:
            manifests += await asyncio.gather(*[self.manifests(v, r) for v, r in shown])
        for number, record, found in zip(numbers, records, manifests, strict=True):
            tree = tree.after(number, await self.whole(number, record), found)
        if self._voided:  # told of by a record on the way
            return await self.tree(version)
        self._trees.put(version, tree)
        return tree

    async def _way_to(self, version: int) -> tuple[Tree, list[Record]]:
        """The nearest tree that is known or has a root, and all records from there up to a version."""
        known = [tree for v in self._trees.versions() if v <= version and (tree := self._trees.get(v)) is not None]
        nearest = max(known, key=lambda tree: tree.version, default=Tree.empty())
        between = list(takewhile(bool, map(self._records.get, range(nearest.version + 1, version + 1))))
        if len(between) == version - nearest.version:
            return nearest, [stored.record for stored in between if stored is not None]
        rooted, top = version - version % ROOT_EVERY, version
        records: list[Record] = []
        while True:
            numbers = range(max(rooted, nearest.version) + 1, top + 1)
            reading = [self._record_below(v, version) for v in numbers]
            tree, found = await asyncio.gather(self._rooted(rooted, nearest), asyncio.gather(*reading))
            records[:0] = found
            if tree is not None:
                return tree, records
            rooted, top = rooted - ROOT_EVERY, rooted

    async def _rooted(self, version: int, nearest: Tree) -> Tree | None:
        """The tree of the root of a version, or the nearest known one if newer; None where there is none."""
        if version <= nearest.version:
            return nearest
        root, stored = await asyncio.gather(self._root(version), self._stored_or_none(version))
        tree = tree_of(root, version, stored)
        if tree is None and root is not None and await run(forget, self.backend, root_key(version)):
            tree = tree_of(await self._root(version), version, stored)  # a cache had that of another timeline
        return tree

    async def _root(self, version: int) -> Root | None:
        """The root of a version, not compared with its record yet; None where none can be read."""
        if version == 0:
            return None
        with contextlib.suppress(NotFound, Corrupt, UnsupportedFormat):  # it only saves time
            return await self.read(root_key(version), Root)
        return None

    async def _exists(self, version: int) -> bool:
        if version in self._records:
            return True
        if not self.backend.transfer.waits:
            return await self.backend.size(commit_key(version)) is not None
        try:  # it comes as soon as its length, and as a rule it is read next
            return await self._stored_or_none(version) is not None
        except (Corrupt, UnsupportedFormat):
            return True

    async def _exist(self, versions: Sequence[int]) -> list[bool]:
        return list(await asyncio.gather(*[self._exists(v) for v in versions]))

    def _hole(self, version: int) -> Corrupt:
        return Corrupt(
            f"{self.backend.url}: {commit_key(version)} is missing, though later commits are there, so nothing "
            f"can be committed; {self.advice}"
        )

    async def _record_below(self, version: int, later: int) -> Record:
        try:
            return await self.record(version)
        except NotFound:
            if version < later:
                raise self._hole(version) from None
            raise

    async def _stored_or_none(self, version: int) -> Stored | None:
        try:
            return await self.stored(version)
        except NotFound:
            return None

    async def find(self, transaction: str, above: int = 0) -> int | None:
        """The version above `above` that a transaction became, None for none; the newest are read first."""
        newest = unknown = await self.newest()
        while unknown > above and (known := self._records.get(unknown)) is not None:
            if known.record.commits(transaction):
                return unknown
            unknown -= 1

        async def read(version: int) -> Record:
            return await self._record_below(version, newest + 1)

        async with contextlib.aclosing(InTurn(read, range(unknown, above, -1))) as records:
            async for version, record in records:
                if record.commits(transaction):
                    return version
        return None

    async def scan(self, transaction: str, above: int) -> tuple[int | None, int]:
        """The version above `above` that a transaction became, if any, and the last version that was looked at."""
        version = above
        while version + 1 in self._records or await self.backend.size(commit_key(version + 1)) is not None:
            newer, _, _ = await self._read_above(version)
            if not newer:
                break
            for record in newer:
                version += 1
                if record.commits(transaction):
                    return version, version
        return None, version

"""The records of a log as they are read: which is the newest, and what the tree is as of a version.

Records and trees never change, so what was read once is kept.

Finding the newest version
1. Start from the highest version this process has seen, or from the `latest` hint if that version exists.
2. Gallop: probe 1, 2, 4, … numbers further while they exist; numbers are dense and never deleted.
3. Bisect between the last that exists and the first that does not.

Where a request mostly waits for a server, a probe reads the record, and many go out at once: first the next two
numbers, which is all where nothing or one was committed since; then those up to the 64th, the next that writes a
hint; then, between the last that exists and the first that does not, all of them, and with them whatever the tree
needs from below. So the tree as of a new version takes no other requests than those, and the root that the hint
stands for is read with the first of them.

A process that knows the newest version looks at the next number only; on a disk it reads at once what is above it,
up to the first number that is absent, and looks whether there is one behind that: then the log has a hole.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from typing import TypeVar

from tstore.commits.manifest import Fragment, Manifest, ObjectRef, Record, Root, decode
from tstore.commits.tree import Changes, Tree
from tstore.errors import Corrupt, NotFound, TStoreError, UnsupportedFormat
from tstore.kv.base import Backend

__all__ = ["HINT", "ROOT_EVERY", "Records", "commit_key", "read_hint", "root_key"]

ROOT_EVERY = 64
HINT = "latest"

_CACHED = 256
_MOST_AHEAD = 32
_MOMENT = 1.0  # seconds
_PROBES = 31  # at once, where they cost little
_DOUBLINGS = 7  # that is up to `ROOT_EVERY`
_NEVER = 1 << 62

T = TypeVar("T", Record, Manifest, Fragment, Root)


def commit_key(version: int) -> str:
    """The key of a commit's record."""
    return f"commits/{version:020d}"


def root_key(version: int) -> str:
    """The key of the whole tree as of a version that is a multiple of `ROOT_EVERY`."""
    return f"roots/{version:020d}"


async def read_hint(backend: Backend) -> int:
    """What the hint says is the newest version, not to be trusted; 0 where there is none."""
    try:
        hint = int(await backend.get(HINT))
    except (NotFound, ValueError):
        return 0
    return hint if 0 < hint < _NEVER else 0


class Records:
    """The commits of one store. `hint` is what `read_hint` gave, if that was asked already."""

    def __init__(self, backend: Backend, hint: int | None = None) -> None:
        self.backend = backend
        self._hint = hint
        self._newest = 0
        self._end = 0, -math.inf
        self._records: dict[int, Record] = {}
        self._trees: dict[int, Tree] = {0: Tree(0, {}, {})}
        self._changes: dict[int, tuple[Record, Changes]] = {}

    async def newest(self) -> int:
        """The highest version that is committed now; 0 for an empty log."""
        known = self._newest
        if known and self.backend.transfer.waits:
            if not await self._exists(known + 1):
                return known
            low, high = await self._gallop(known + 1)
        elif known:
            newer, _ = await self._read_above(known)
            self._newest = max(self._newest, low := known + len(newer))
            if len(newer) < _MOST_AHEAD:
                return low
            low, high = await self._gallop(low)
        else:
            low, high = await self._gallop_from_hint()
        while high - low > 1:
            between = self._between(low, high)
            below = self._needed_below(low) if len(between) == high - low - 1 else []
            (low, high), _ = await asyncio.gather(self._narrowed(low, between, high), self._exist(below))
        self._newest = max(self._newest, low)
        return low

    async def above(self, version: int) -> list[Record]:
        """The records above a version; `Corrupt` where the log has a hole behind them."""
        found: list[Record] = []
        while True:
            newer, broken = await self._read_above(version + len(found))
            found += newer
            if broken:
                raise self._hole(version + len(found) + 1)
            if len(newer) < _MOST_AHEAD:
                return found

    def is_end(self, version: int) -> bool:
        """Whether nothing stood above a version when that was last looked at, a moment ago."""
        end, since = self._end
        return version == end and asyncio.get_running_loop().time() - since < _MOMENT

    async def _read_above(self, version: int) -> tuple[list[Record], bool]:
        """The next records above a version, below `_MOST_AHEAD` if these are all; whether a hole ends them."""
        found: list[Record] = []
        while len(found) < _MOST_AHEAD and (known := self._records.get(version + len(found) + 1)) is not None:
            found.append(known)
        at, since = version + len(found), asyncio.get_running_loop().time()
        leading = await self.backend.leading(map(commit_key, range(at + 1, version + _MOST_AHEAD + 2)))
        for data in leading.objects:
            at += 1
            found.append(self._decoded(commit_key(at), data, Record))
            self._keep(at, found[-1])
        if len(found) < _MOST_AHEAD and not leading.broken:
            self._end = at, since
        return found, leading.broken

    async def _gallop_from_hint(self) -> tuple[int, int]:
        """As `_gallop`, from where the hint says, or from the begin if that is no version."""
        hint = await read_hint(self.backend) if self._hint is None else self._hint
        if hint == 0:
            return await self._gallop(0)
        ahead = self.backend.transfer.waits and hint % ROOT_EVERY == 0
        found, root = await asyncio.gather(
            self._gallop(hint, sure=False), self._root_or_none(hint if ahead else 0)
        )
        if found[0] < hint:
            return await self._gallop(0)
        if root is not None:
            self._keep_tree(root)
        return found

    async def _gallop(self, base: int, *, sure: bool = True) -> tuple[int, int]:
        """A version that exists (or 0) and one behind it that does not, found from `base`; if not sure, it may not
        exist, and then the first is 0."""
        low = base if sure else 0
        for steps in _looks(self.backend.transfer.waits):
            probes = [base + step for step in (steps if sure else [0, *steps])]
            low, high = await self._narrowed(low, probes, _NEVER)
            if high < _NEVER:
                return low, high
            sure = True
            if low + steps[-1] >= _NEVER:
                break
        raise Corrupt(
            f"{self.backend.url} has an object under each name that is asked for, also {commit_key(low)}; "
            "check what answers there: a store's server says 404 for what it does not have"
        )

    def _between(self, low: int, high: int) -> list[int]:
        """Versions to look at next; all between the two, or some that divide the range."""
        most = _PROBES if self.backend.transfer.waits else 1
        if high - low - 1 <= most:
            return list(range(low + 1, high))
        return [low + (high - low) * i // (most + 1) for i in range(1, most + 1)]

    async def _narrowed(self, low: int, versions: list[int], high: int) -> tuple[int, int]:
        """The last that exists and the first that does not, where `low` is known to exist and `high` not to."""
        since = asyncio.get_running_loop().time()
        exist = await self._exist(versions)
        at = [*exist, False].index(False)
        low, high = [low, *versions][at], [*versions, high][at]
        if high == low + 1 and versions[at + 1 : at + 2] == [high + 1] and not exist[at + 1]:
            self._end = low, since
        return low, high

    def _needed_below(self, version: int) -> list[int]:
        """The versions below one whose records its tree takes, and which are not known."""
        if not self.backend.transfer.waits:
            return []
        known = max(version - version % ROOT_EVERY, *(v for v in self._trees if v <= version))
        return [v for v in range(known + 1, version) if v not in self._records]

    async def record(self, version: int) -> Record:
        """The record of a version; `NotFound` where there is none."""
        found = self._records.get(version)
        if found is None:
            found = await self.read(commit_key(version), Record)
            self._keep(version, found)
        return found

    def _keep(self, version: int, record: Record) -> None:
        self._records[version] = record
        if len(self._records) > _CACHED:
            del self._records[next(iter(self._records))]

    async def changes(self, version: int, record: Record) -> Changes:
        """What the record of a version changed; many transactions of a process validate against the same ones."""
        known, changes = self._changes.get(version, (None, None))
        if known is not record or changes is None:
            changes = Changes.of(record, await self.manifests(record))
            self._changes[version] = record, changes
            if len(self._changes) > _CACHED:
                del self._changes[next(iter(self._changes))]
        return changes

    async def manifests(self, record: Record) -> list[Manifest]:
        """The manifests of a record, read where they do not travel in it."""
        inside = [m for m in record.manifests if isinstance(m, Manifest)]
        if len(inside) == len(record.manifests):
            return inside
        return list(await asyncio.gather(*[self.manifest(m) for m in record.manifests]))

    async def manifest(self, where: ObjectRef | Manifest) -> Manifest:
        """The manifest itself, or the one at that place, checked against its reference."""
        if isinstance(where, Manifest):
            return where
        data = await self.backend.get(where.key)
        if len(data) != where.length or data[-len(where.check) :] != where.check:
            raise Corrupt(
                f"{self.backend.url}: {where.key} is not the object that was committed: expected "
                f"{where.length} bytes, found {len(data)}, or another checksum; restore it from a copy"
            )
        return self._decoded(where.key, data, Manifest)

    async def read(self, key: str, kind: type[T]) -> T:
        """The object at a key; errors name it."""
        return self._decoded(key, await self.backend.get(key), kind)

    def _decoded(self, key: str, data: bytes, kind: type[T]) -> T:
        try:
            return decode(data, kind)
        except (Corrupt, UnsupportedFormat) as error:
            raise type(error)(f"{self.backend.url}: {key}: {error}") from error

    async def tree(self, version: int) -> Tree:
        """The tree as of a version that exists."""
        if version in self._trees:
            return self._trees[version]
        tree, records = await self._way_to(version)
        numbers = range(tree.version + 1, version + 1)
        last = max((v for v, r in zip(numbers, records, strict=True) if r.replaces), default=0)
        shown = [r for v, r in zip(numbers, records, strict=True) if v >= last]  # it replaces what came before
        manifests: list[list[Manifest]] = [[]] * (len(records) - len(shown))
        if all(isinstance(m, Manifest) for r in shown for m in r.manifests):
            manifests += [await self.manifests(r) for r in shown]
        else:
            manifests += await asyncio.gather(*[self.manifests(r) for r in shown])
        for number, record, found in zip(numbers, records, manifests, strict=True):
            tree = tree.after(number, record, found)
        self._keep_tree(tree)
        return tree

    def _keep_tree(self, tree: Tree) -> None:
        self._trees[tree.version] = tree
        while len(self._trees) > 4:
            del self._trees[next(v for v in self._trees if v != 0)]

    async def _way_to(self, version: int) -> tuple[Tree, list[Record]]:
        """The nearest tree that is known or has a root, and all records from there up to a version."""
        cached = self._trees[max(v for v in self._trees if v <= version)]  # held: others may evict it meanwhile
        rooted, top = version - version % ROOT_EVERY, version
        records: list[Record] = []
        if all(v in self._records for v in range(cached.version + 1, version + 1)):
            return cached, [self._records[v] for v in range(cached.version + 1, version + 1)]
        while True:
            numbers = range(max(rooted, cached.version) + 1, top + 1)
            reading = [self._record_below(v, version) for v in numbers]
            root, found = await asyncio.gather(self._root(rooted, cached), asyncio.gather(*reading))
            records[:0] = found
            if root is not None:
                return root, records
            rooted, top = rooted - ROOT_EVERY, rooted

    async def _root(self, version: int, cached: Tree) -> Tree | None:
        """The tree of the root of a version, or the known one if that is newer; None where there is none."""
        if version <= cached.version:
            return cached
        try:
            return Tree.of(await self.read(root_key(version), Root))
        except NotFound:
            return None

    async def _root_or_none(self, version: int) -> Tree | None:
        """The tree of the root of a version, read ahead; None also where whoever needs it will learn why."""
        try:
            return await self._root(version, self._trees[0])
        except TStoreError:
            return None

    async def collected(self, version: int) -> int:
        """The version of the newest gc up to a version, 0 where there is none."""
        if version == 0:
            return 0
        record = await self.record(version)
        return record.collected if record.collection is None else version

    async def _exists(self, version: int) -> bool:
        if version in self._records:
            return True
        if not self.backend.transfer.waits:
            return await self.backend.size(commit_key(version)) is not None
        try:
            await self.record(version)  # as soon as its length, and as a rule it is read next
        except NotFound:
            return False
        except (Corrupt, UnsupportedFormat):
            return True
        return True

    async def _exist(self, versions: list[int]) -> list[bool]:
        return list(await asyncio.gather(*[self._exists(v) for v in versions]))

    def _hole(self, version: int) -> Corrupt:
        return Corrupt(
            f"{self.backend.url}: {commit_key(version)} is missing, though later commits are there; restore it "
            "from a copy of the store, until then nothing can be committed (tstore verify tells more)"
        )

    async def _record_below(self, version: int, later: int) -> Record:
        try:
            return await self.record(version)
        except NotFound:
            if version < later:
                raise self._hole(version) from None
            raise

    async def _record_or_none(self, version: int) -> Record | None:
        try:
            return await self.record(version)
        except NotFound:
            return None

    async def find(self, transaction: str, above: int = 0) -> int | None:
        """The version above `above` that a transaction became, None where it is not committed."""
        return (await self.scan(transaction, above))[0]

    async def scan(self, transaction: str, above: int) -> tuple[int | None, int]:
        """The version above `above` that a transaction became, if any, and the last version that was looked at."""
        version = above
        while (record := await self._record_or_none(version + 1)) is not None:
            version += 1
            if transaction in (record.transaction, *record.transactions):
                return version, version
        return None, version

    async def resolve(self, at: int | str, newest: int) -> int:
        """The version of a number or tag, as of the version `newest`; `NotFound` names what there is."""
        if isinstance(at, int):
            if not 0 <= at <= newest:
                raise NotFound(f"{self.backend.url} has no version {at}; its newest is {newest}")
            return at
        tags = (await self.tree(newest)).tags
        if at not in tags:
            known = ", ".join(sorted(tags)[-10:]) or "none"
            raise NotFound(f"{self.backend.url} has no tag {at!r}; its tags are: {known}")
        return tags[at]


def _looks(waits: bool) -> Iterator[list[int]]:
    """How far ahead to probe, one look after the other; `waits`: whether many probes take no longer than one."""
    if waits:
        yield [1, 2]
        yield [3, 4, 8, 16, 32, 64]
    many = _DOUBLINGS if waits else 1
    for done in itertools.count(_DOUBLINGS if waits else 0, many):
        yield [1 << i for i in range(done, done + many)]

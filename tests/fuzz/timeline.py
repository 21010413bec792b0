"""A model of the versions of a store, with which the store is compared.

The model replays the recorded attempts (`journal`) in the order of the commits in the store's history, which it
identifies by their unique messages.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import tstore
from tests.fuzz.journal import (
    Acknowledged,
    Attempt,
    Collected,
    Collecting,
    Copying,
    CopyMade,
    Create,
    Delete,
    Failed,
    Group,
    Known,
    Op,
    Read,
    Replace,
    Replay,
    Resize,
    Write,
)
from tests.support.store_model import Grid, State
from tstore.core.format.objects.records import REPAIR
from tstore.errors import NotFound, SnapshotExpired
from tstore.lab.simulation.checker import versions_to_keep

__all__ = ["Mismatch", "Timeline", "Version"]


class Mismatch(Exception):
    """The store differs from the model; the first argument is the kind of difference."""


class Version(NamedTuple):
    """One version in the model; `alive` are the versions that have not expired as of it.

    `head` is the newest version up to this one that is not a copy, and `source` that of which this one is a copy.
    """

    state: State
    alive: frozenset[int]
    metrics: dict[str, float]
    transactions: frozenset[str]
    head: int
    source: int = 0


class Timeline:
    """The versions of one store; version 0 is the empty store."""

    def __init__(self) -> None:
        self.versions = [Version(State(), frozenset(), {}, frozenset(), 0)]
        self.attempts: dict[str, Attempt] = {}
        self.committed: dict[str, int] = {}

    def fork(self, newest: int) -> Timeline:
        """Return a copy of the timeline up to a version, which can diverge from there."""
        other = Timeline()
        other.versions = self.versions[: newest + 1]
        other.attempts = dict(self.attempts)
        other.committed = {m: v for m, v in self.committed.items() if v <= newest}
        return other

    def is_living(self, version: int) -> bool:
        """Return whether a version is living, so that it is no collection and not void."""
        return version in self.versions[version].alive

    def void(self, first: int) -> None:
        """Give the versions from `first` on the state of the head before them."""
        before = self.versions[first - 1]
        void = Version(self._start(before), before.alive, {}, frozenset(), before.head)
        self.versions[first:] = [void] * (len(self.versions) - first)

    def _start(self, before: Version) -> State:
        """Return what the next version starts from: the arrays and groups of the head, and all tags."""
        state = self.versions[before.head].state.copy()
        state.tags = dict(before.state.tags)
        return state

    async def copied(self, url: str, events: Sequence[Any], before: Timeline | None) -> Timeline | None:
        """Return the timeline of a copy of the store after the events, from the one before; None without a copy.

        A copier that was killed or failed did not report up to which version it copied; the copy itself shows it.
        """
        reports = [e.version for e in events if isinstance(e, CopyMade) and e.url == url]
        newest = max(reports, default=0)
        if len(reports) < sum(isinstance(e, Copying) and e.url == url for e in events):
            try:
                async with await tstore.open(url, "r") as copy:
                    newest = max(newest, await copy.log.reader.newest())
            except NotFound:
                return before
        return self.fork(newest) if before is None or before.newest < newest else before

    @property
    def newest(self) -> int:
        """The highest version."""
        return len(self.versions) - 1

    async def learn(self, store: tstore.Store, events: Sequence[Any]) -> None:
        """Replay the newer commits of a store from the events. Raises `Mismatch` if they contradict the model."""
        self.attempts |= {e.message: e for e in events if isinstance(e, Attempt)}
        newest = await store.log.reader.newest()
        commits: dict[int, list[tstore.Commit]] = {}
        async for commit in store.history():
            if commit.version <= self.newest:
                break
            commits.setdefault(commit.version, []).insert(0, commit)
        if newest < self.newest or (commits and max(commits) > newest):
            raise Mismatch(
                "newest", f"the newest version is {newest}, but {max(commits, default=self.newest)} was seen"
            )
        reports = {e.version: e for e in events if isinstance(e, Collected) and e.version is not None}
        begun = [e.keep for e in events if isinstance(e, Collecting)]
        for version in range(self.newest + 1, newest + 1):
            await self._replay(version, commits.get(version, []), reports.get(version), begun, store)
        self._check_outcomes(events)
        for event in events:
            if isinstance(event, Read):
                self._check_read(event)

    async def _replay(
        self,
        version: int,
        commits: list[tstore.Commit],
        report: Collected | None,
        begun: Sequence[Any],
        store: tstore.Store,
    ) -> None:
        before = self.versions[-1]
        state, metrics, source = self._start(before), dict[str, float](), 0
        alive = set(before.alive)
        for commit in commits:
            if commit.transaction.startswith("gc-"):
                alive -= await self._expired(version, commit, report, begun, store)
                state.tags = {t: v for t, v in state.tags.items() if v in alive}
                continue
            if commit.transaction.startswith(REPAIR):
                if await store.log.reader.collection(version) is None:
                    alive.add(version)
                continue
            if commit.message not in self.attempts:
                raise Mismatch("unknown", f"version {version} is {commit.message!r}, which no worker began")
            if commit.message in self.committed:
                raise Mismatch(
                    "twice", f"{commit.message} is version {self.committed[commit.message]} and {version}"
                )
            attempt = self.attempts[commit.message]
            self._check_reads(attempt, before.head)
            source = next((op.version for op in attempt.ops if isinstance(op, Replay)), 0)
            if source not in {0} | alive:
                raise Mismatch("expired source", f"version {version} is a copy of version {source}")
            if commit.source != (source or None):
                raise Mismatch("source", f"version {version} is a copy of {commit.source}, not {source}")
            state = await self._applied(attempt, state, version, store)
            if taken := [t for t in attempt.tags if t in state.tags and t not in attempt.moved]:
                raise Mismatch("tag taken", f"version {version} sets existing tags {taken} of {state.tags}")
            for tag in attempt.dropped:
                state.tags.pop(tag, None)
            if attempt.target is not None and attempt.target not in alive:
                raise Mismatch("expired target", f"version {version} tags version {attempt.target}")
            state.tags.update(dict.fromkeys(attempt.tags, attempt.target or version))
            metrics |= attempt.metrics or {}
            for key, value in (attempt.metadata or {}).items():
                if commit.metadata.get(key) != value:
                    raise Mismatch(
                        "metadata", f"version {version} has {key}={commit.metadata.get(key)}, not {value}"
                    )
            if {*commit.tags, *commit.tagged} != set(attempt.tags):
                raise Mismatch("commit tags", f"version {version} has the tags {commit.tags}, not {attempt.tags}")
            self.committed[commit.message] = version
            alive.add(version)
        made = frozenset(c.transaction for c in commits)
        head = before.head if source else version
        self.versions.append(Version(state, frozenset(alive), metrics, made, head, source))

    async def _expired(
        self,
        version: int,
        commit: tstore.Commit,
        report: Collected | None,
        begun: Sequence[Any],
        store: tstore.Store,
    ) -> set[int]:
        """Return the versions that a gc expired: by its rule, or from its record if its report was lost."""
        base = self.versions[commit.base]
        metrics = {v: self.versions[v].metrics for v in base.alive}
        sources = {v: source for v in base.alive if (source := self.versions[v].source)}

        def gone(keep: Any) -> set[int]:
            if keep is None or not base.alive:
                return set()
            return set(base.alive) - versions_to_keep(keep, set(base.alive), base.state.tags, metrics, sources)

        if report is not None:
            expected, actual = gone(report.keep), set(report.versions)
            timed = report.keep is not None and report.keep.newer_than is not None
            if actual != expected and not (timed and actual <= expected):
                raise Mismatch(
                    "retention",
                    f"version {version} expired {sorted(actual)}, not {sorted(expected)}: {report.keep}",
                )
            return actual
        possible = [gone(keep) for keep in begun if keep is None or keep.newer_than is None]
        count = int(commit.message.split()[1])  # "gc: 3 versions expired"
        fitting = [each for each in possible if len(each) == count]
        if fitting:
            return fitting[0]
        collection = await store.log.reader.collection(version)  # not the history, which also includes later gcs
        return set() if collection is None else set(collection.expired) & set(base.alive)

    async def _applied(self, attempt: Attempt, state: State, version: int, store: tstore.Store) -> State:
        sure = len(attempt.ops) if attempt.sure is None else attempt.sure
        for op in attempt.ops[:sure]:
            self._apply(state, op)
        if sure == len(attempt.ops):
            return state
        more = state.copy()  # the state including operations concurrent with the commit
        for op in attempt.ops[sure:]:
            self._apply(more, op)
        try:
            await check_arrays(await store.snapshot(version), more)
        except (Mismatch, SnapshotExpired):
            return state  # if it has expired, later versions may show that this is wrong
        return more

    def _apply(self, state: State, op: Op) -> None:
        match op:
            case Create(path, shape, chunks, dtype, sparse):
                state.arrays[path] = Grid(shape, chunks, sparse, dtype)
            case Write(path):
                state.arrays[path].write(op.slices, op.values)
            case Known(path, values):
                state.arrays[path].write((slice(None),) * values.ndim, values)
            case Resize(path, shape):
                state.arrays[path].resize(shape)
            case Delete(path):
                state.remove([path])
            case Group(path, attributes):
                state.groups[path] = attributes
            case Replace():
                state.arrays.clear()
                state.groups.clear()
            case Replay(version):
                source = self.versions[version].state.copy()
                state.arrays, state.groups = source.arrays, source.groups

    def _check_outcomes(self, events: Iterable[Any]) -> None:
        for event in events:
            match event:
                case Acknowledged(message, version):
                    if self.committed.get(message) != version:
                        was = self.committed.get(message)
                        raise Mismatch(
                            "acknowledged", f"{message} was acknowledged as version {version}, but is {was}"
                        )
                case Failed(message, error) if message in self.committed:
                    raise Mismatch(
                        "failed", f"{message} failed with {error}, but is version {self.committed[message]}"
                    )

    def _check_reads(self, attempt: Attempt, head: int) -> None:
        """Check that what a serializable transaction read is unchanged in the head before its own version."""
        for done, path, values in attempt.reads:
            view = self.versions[head].state.copy()
            for op in done:
                self._apply(view, op)
            grid = view.arrays.get(path)
            if grid is None or not _equal(values, grid.read((slice(None),) * len(grid.shape))):
                raise Mismatch(
                    "serializable",
                    f"{attempt.message}, committed after version {head}, had read other values of {path}",
                )

    def _check_read(self, read: Read) -> None:
        if read.version > self.newest:
            raise Mismatch("read", f"version {read.version} was read, but the newest is {self.newest}")
        state = self.versions[read.version].state
        grid = state.arrays.get(read.path)
        if grid is None:
            raise Mismatch("read", f"{read.path} was read at version {read.version}, which has no such array")
        region = (slice(None),) * len(grid.shape) if read.region is None else tuple(slice(*r) for r in read.region)
        if not _equal(read.values, grid.read(region)):
            raise Mismatch("read", f"{read.path} has other values at version {read.version}, region {read.region}")

    async def check(self, store: tstore.Store, choice: random.Random, *, thorough: bool) -> None:
        """Compare tags, steps and versions of the store with the model: all versions if `thorough`, else some."""
        newest = self.versions[-1]
        snapshot = await store.snapshot()
        if snapshot.version != newest.head:
            raise Mismatch("newest", f"the head is version {snapshot.version}, not {newest.head}")
        if snapshot.tags != newest.state.tags:
            raise Mismatch("tags", f"the tags are {snapshot.tags}, not {newest.state.tags}")
        steps = sorted(int(t[5:]) for t in newest.state.tags if t.startswith("step/"))
        if await tstore.steps(store) != steps:
            raise Mismatch("steps", f"the steps are {await tstore.steps(store)}, not {steps}")
        numbers = range(1, self.newest + 1)
        some = numbers if thorough else sorted({*choice.sample(numbers, min(3, len(numbers))), *numbers[-2:]})
        for version in some:
            await self._check_version(store, version)
        if thorough:
            report = await store.verify()
            if not report.ok:
                raise Mismatch("verify", f"verify: {report.faults[0]}")

    async def _check_version(self, store: tstore.Store, version: int) -> None:
        lives = self.versions[-1].alive
        made = version
        while made and made not in self.versions[made].alive:
            made = self.versions[made - 1].head  # a gc's commit or a void record has the state of the head before
        try:
            snapshot = await store.snapshot(version)
            await check_arrays(snapshot, self.versions[version].state)
        except SnapshotExpired:
            if made in lives or made == 0:
                raise Mismatch("expired", f"version {version} has expired, but should be alive") from None
            return
        if made and made not in lives:
            raise Mismatch("expired", f"version {version} should have expired")


async def check_arrays(snapshot: tstore.Snapshot, state: State) -> None:
    """Raise `Mismatch` if the arrays, values or attributes of a snapshot differ from the model."""
    version = snapshot.version
    if snapshot.paths() != sorted(state.arrays):
        raise Mismatch("paths", f"version {version} has {snapshot.paths()}, not {sorted(state.arrays)}")
    for path, attributes in state.groups.items():
        if snapshot.attributes(path) != attributes:
            raise Mismatch("attributes", f"version {version}: {path!r} has {snapshot.attributes(path)}")
    for path, grid in state.arrays.items():
        array = await snapshot.array(path)
        if (array.shape, array.dtype) != (grid.shape, grid.dtype):
            raise Mismatch(
                "form", f"version {version}: {path} is {array.dtype}{array.shape}, not {grid.dtype}{grid.shape}"
            )
        if not _equal(await reading(array), grid.read((slice(None),) * len(grid.shape))):
            raise Mismatch("values", f"version {version}: the values of {path} differ")


async def reading(array: tstore.Array) -> NDArray[Any] | None:
    """Return the values of an array, or None if a chunk was never written."""
    try:
        return await array.read()
    except NotFound as error:
        if "was never written" not in str(error):
            raise
        return None


def _equal(a: NDArray[Any] | None, b: NDArray[Any] | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b)

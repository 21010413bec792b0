"""Random operations on a store, by hypothesis, compared with a simple model (`tests.support.store_model`).

    pytest tests/guarantees/test_stateful.py                                 # sixty runs
    pytest tests/guarantees/test_stateful.py --hypothesis-profile=long        # twelve thousand

Several transactions of both isolation levels are open at once, through two `Store`s. They create, write, read,
resize and delete, set, move and drop tags, also of earlier versions, and end alone or together. Steps are saved
and versions collected. Reads of any version, by number, tag or time, must equal the model. A commit must succeed
or fail as the table at the top of `tstore/core/format/tree/changes.py` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import inspect
import itertools
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import tstore
from tests.support.store_model import Grid, Region, Seen, State, Touch, apart, is_at_or_below, same
from tstore import Keep
from tstore.core.runtime import pool, world
from tstore.core.runtime.world import World, use_world
from tstore.core.storage.base import Storage
from tstore.errors import (
    AlreadyExists,
    Conflict,
    InvalidArgument,
    Misuse,
    NotFound,
    SnapshotExpired,
    TStoreError,
)
from tstore.lab.simulation.virtual import VirtualLoop

T = TypeVar("T")

NAMES = ["a", "b", "g", "g/x", "g/y", "g/h", "g/h/z", "w"]
PATHS = st.sampled_from(NAMES)
TAGS = st.sampled_from(["good", "best", "step/1"])
RARELY = st.none() | st.none() | st.none() | TAGS
SIDE = st.integers(1, 6)
CHUNK = st.integers(1, 4)
WHICH = st.integers(0, 4)
CUT = st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from([1, 1, 1, 2]))
WIDE, NARROW = 300, 1
MOST = 5
NEVER = "a part was never written"
LONGEST = 12  # the length up to which values are appended


def region_of(shape: tuple[int, ...], cuts: list[tuple[int, int, int]]) -> Region:
    """Return the region of the cuts, clipped to the array; the last axis is whole."""
    sides = []
    for n, (first, last, step) in zip(shape, cuts, strict=False):
        a, b = sorted((first % (n + 1), last % (n + 1)))
        sides.append(slice(a, b, step))
    return (*sides, slice(None))


class Step(NamedTuple):
    """An operation of a transaction; each kind uses some of the fields."""

    kind: str
    choice: int
    path: str
    shape: tuple[int, int]
    chunks: tuple[int, int]
    cuts: list[tuple[int, int, int]]
    flags: tuple[bool, bool, bool]


KINDS = ["write"] * 4 + ["read"] * 2 + ["create"] * 2 + ["delete", "resize", "append", "append", "group", "list"]
STEP = st.builds(
    Step,
    st.sampled_from(KINDS),
    st.integers(0, 15),
    PATHS,
    st.tuples(SIDE, SIDE),
    st.tuples(CHUNK, CHUNK),
    st.lists(CUT, min_size=2, max_size=2),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)


STEPS = st.lists(STEP, min_size=1, max_size=4)

Action = tuple[str, dict[str, Any]]


def action(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Action]:
    """Return a strategy of calls of a method of the machine."""
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


BEGIN = action(
    "begin_transaction",
    store=st.sampled_from([0, 0, 0, 1]),
    serializable=st.sampled_from([False, False, True]),
    setting=RARELY,
    moving=RARELY,
    dropping=RARELY,
    target=st.none() | st.integers(0, 100),
    steps=STEPS,
)
WORK = action("work", which=WHICH, steps=STEPS)
COMMIT = action("commit", which=WHICH, count=st.sampled_from([1, 1, 2, 3, 4, 4]))
END = st.one_of(
    action("abort", which=WHICH),
    action("use_one_that_ended", which=WHICH, path=PATHS),
)
SAVE = action(
    "save", store=WHICH, step=st.integers(0, 3), size=SIDE, same_values=st.booleans(), hosts=st.integers(1, 2)
)
RESTORE = action("restore", store=WHICH, step=st.none() | st.integers(0, 2))
LOOK = action(
    "look",
    store=WHICH,
    how=st.sampled_from(["version", "tag", "time", "held", "diff", "history"]),
    version=st.integers(0, 100),
    other=st.integers(0, 100),
    tag=TAGS,
)
COLLECT = action(
    "collect",
    store=WHICH,
    last=st.none() | st.integers(1, 3),
    every=st.none() | st.integers(1, 3),
    best=st.none() | st.integers(1, 2),
    tag=RARELY,
    now=st.booleans(),
)
# a single rule for all actions: of several rules hypothesis would disable many in each run
OFTEN = [BEGIN, BEGIN, WORK, COMMIT]
ACTIONS = st.sampled_from([*OFTEN * 5, *[LOOK] * 3, END, SAVE, RESTORE, COLLECT]).flatmap(lambda kind: kind)


class Open:
    """An open transaction, and its state in the model."""

    def __init__(self, tx: tstore.Transaction, base: int, state: State, serializable: bool) -> None:
        self.tx = tx
        self.base = base
        self.start = state
        self.view = state.copy()
        self.serializable = serializable
        self.message = ""
        self.ops: list[Callable[[State], Any]] = []
        self.paths: list[str] = []
        self.touch = Touch()
        self.seen: list[Seen] = []
        self.appended: list[tuple[str, Any, tstore.Appended]] = []
        self.mentioned: set[str] = set()
        self.tags: set[str] = set()
        self.target: int | None = None
        self.listed = False
        self.condemned = False

    def do(self, path: str, op: Callable[[State], Any]) -> None:
        """Record an operation, and apply it in the model."""
        self.mentioned.add(path)
        self.paths.append(path)
        self.ops.append(op)
        op(self.view)

    def apply(self, state: State) -> None:
        """Apply the net effect of the operations to a newer state, without what was created and deleted again."""
        for top in self.touch.deleted:
            state.remove([p for p in state.nodes() if is_at_or_below(p, top)])
        for path in self.touch.fresh:
            if path in self.view.arrays:
                state.arrays[path] = self.view.arrays[path].copy()
            else:
                state.groups[path] = self.view.groups[path]
        for path, op in zip(self.paths, self.ops, strict=True):
            if path in self.touch.fresh or path not in self.touch.nodes:
                continue
            region = op(state)
            if path in self.touch.appended and region is not None:
                # newer transactions meet the chunks where the commit has put them
                self.touch.touched.setdefault(path, set()).update(state.arrays[path].touched(region)[0])

    def saw(self, look: Callable[[State], Any], path: str | None) -> None:
        """Record a read of one path, or of all paths if None."""
        if path is None:
            self.listed = True
        else:
            self.mentioned.add(path)
        self.seen.append(Seen(len(self.ops), look, look(self.view), None))

    def found_tags_as_in(self, state: State) -> bool:
        """Return whether its tag lookups would have the same results in a state."""
        return all((tag in state.tags) == (tag in self.start.tags) for tag in self.tags)

    def may_be_overtaken(self, newer: Touch, structure: bool) -> bool:
        """Return whether a serializable transaction may treat a newer commit as one that changed its reads."""
        if newer.replaces or (self.listed and structure):
            return True
        theirs = newer.nodes | newer.deleted
        return any(not apart(mine, other) for mine in self.mentioned for other in theirs)


class Repeatable(World):
    """A world with reproducible times and names; its clock sometimes goes back."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._time = 1.7e9

    def now(self) -> float:
        self._time += self._random.uniform(-0.2, 1)
        return self._time

    def token(self, size: int) -> str:
        return self._random.randbytes(size).hex()

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)


class Slow:
    """A storage whose calls take some time, so that concurrent operations interleave."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        if not inspect.iscoroutinefunction(method):
            return method

        async def call(*arguments: Any) -> Any:
            await asyncio.sleep(world.uniform(0, 1))
            return await method(*arguments)

        return call


class StoreMachine(RuleBasedStateMachine):
    """The state machine that hypothesis drives."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(use_world(Repeatable()))
        self.stack.enter_context(pool.without_threads(self.pause))
        self.loop = self.stack.enter_context(asyncio.Runner(loop_factory=VirtualLoop))
        self.url = f"memory://{uuid.uuid4()}"
        self.values = itertools.count(1)
        self.states: list[State] = [State()]
        self.origin: list[int] = [0]
        self.touches: list[list[Touch]] = [[]]
        self.committed_as: list[list[tuple[str, set[str], set[str], str]]] = [
            []
        ]  # message, tags, dropped, transaction
        self.metrics: dict[int, float] = {}
        self.expired: set[int] = set()
        self.gone: set[str] = set()
        self.open: list[Open] = []
        self.held: list[tuple[int, tstore.Snapshot]] = []
        self.ended: list[Open] = []

    @staticmethod
    async def pause() -> None:
        return None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.get_loop().run_until_complete(work)  # `Runner.run` takes time to prepare for a Ctrl-C

    @initialize()
    def begin(self) -> None:
        self.stores = [self.run(tstore.open(self.url)) for _ in range(2)]
        for store in self.stores:
            store.log.storage = cast(Storage, Slow(store.log.storage))
        self.begin_transaction(0, False, "good", None, None, None, [])
        for path, wide in (("a", NARROW), ("g/x", WIDE)):
            self.create_array(self.open[0], path, (5, 4), (2, 3), (wide == WIDE, True, True))
        self.commit_all(self.open)

    def teardown(self) -> None:
        try:
            if hasattr(self, "stores"):
                self.check_history()
                self.check_all()
        finally:
            self.stack.close()

    @property
    def newest(self) -> int:
        return len(self.states) - 1

    def lives(self, version: int) -> bool:
        return self.origin[version] not in self.expired

    def versions_of(self, state: State) -> dict[str, int]:
        return {t: v for t, v in state.tags.items() if self.lives(v)}

    # ---- transactions

    def pick(self, which: int) -> Open:
        return self.open[which % len(self.open)]

    def refused(self, error: type[TStoreError], work: Awaitable[Any]) -> None:
        async def wait() -> None:
            with pytest.raises(error):
                await work

        self.run(wait())

    def try_on(self, tx: Open, work: Awaitable[T]) -> T | None:
        """Return the result of a read at the base of a transaction, or None if the base has expired."""

        async def wait() -> T | None:
            try:
                return await work
            except SnapshotExpired:
                assert not self.lives(tx.base)
            except Conflict:
                assert tx.condemned
            return None

        return self.run(wait())

    @rule(action=ACTIONS)
    def do(self, action: Action) -> None:
        name, arguments = action
        if self.open or name not in ("work", "commit", "abort"):
            getattr(self, name)(**arguments)

    def begin_transaction(
        self,
        store: int,
        serializable: bool,
        setting: str | None,
        moving: str | None,
        dropping: str | None,
        target: int | None,
        steps: list[Step],
    ) -> None:
        if len(self.open) >= MOST:
            return None
        chosen = self.stores[store % 2]
        number = len(self.committed_as) + len(self.open)
        isolation: Any = "serializable" if serializable else "snapshot"
        named = [t for t in (setting, moving, dropping) if t is not None]
        if len(set(named)) < len(named):
            with pytest.raises(InvalidArgument, match="twice"):
                chosen.transaction(tag=setting, move_tag=moving, drop_tag=dropping)
            return None
        tx = chosen.transaction(f"m{number}", setting, isolation, move_tag=moving, drop_tag=dropping)
        state, known = self.states[-1], self.states[-1].tags
        if setting in known:
            return self.refused(AlreadyExists, tx.__aenter__())
        if dropping is not None and dropping not in known:
            return self.refused(NotFound, tx.__aenter__())
        self.run(tx.__aenter__())
        opened = Open(tx, self.newest, state, serializable)
        opened.message = f"m{number}"
        opened.touch.tags = {t for t in (setting, moving) if t is not None}
        opened.touch.dropped = {dropping} - {None}  # type: ignore[arg-type]
        opened.tags = {setting, dropping} - {None}  # type: ignore[arg-type]
        if target is not None and opened.touch.tags:
            version = target % len(self.states)
            tagging = tx.staging.tag_version(version)
            if not self.lives(version) or version == 0:
                return self.refused(NotFound if version == 0 else SnapshotExpired, tagging)
            opened.target = self.run(tagging)
            assert opened.target == self.origin[version]
        self.open.append(opened)
        self.work(-1, steps)
        return None

    def work(self, which: int, steps: list[Step]) -> None:
        """Apply operations in a transaction."""
        tx = self.pick(which)
        for step in steps:
            there = sorted(tx.view.arrays)
            path = there[step.choice % len(there)] if there and step.choice < 12 else step.path
            match step.kind:
                case "create":
                    self.create_array(tx, step.path, step.shape, step.chunks, step.flags)
                case "group":
                    self.create_group(tx, step.path)
                case "delete":
                    self.delete(tx, path)
                case "write":
                    self.write_region(tx, path, step.cuts, step.flags[0])
                case "resize":
                    self.resize(tx, path, step.shape)
                case "append":
                    self.append(tx, path, step.shape[0], step.flags[0])
                case "read":
                    self.read_region(tx, path, step.cuts)
                case "list":
                    self.list_paths(tx)

    def create_array(
        self, tx: Open, path: str, shape: tuple[int, int], chunks: tuple[int, int], flags: tuple[bool, bool, bool]
    ) -> None:
        wide, sparse, filled = flags
        width = WIDE if wide and sparse else NARROW
        full, pieces = (*shape, width), (*chunks, width)
        work = tx.tx.create_array(path, full, "int64", pieces, sparse=sparse)
        if not tx.view.free_for_array(path):
            tx.mentioned.add(path)
            tx.saw(lambda s: s.free_for_array(path), path)
            return self.refused(AlreadyExists, work)
        array = self.run(work)
        tx.do(path, lambda s: s.arrays.__setitem__(path, Grid(full, pieces, sparse)))
        tx.touch.fresh.add(path)
        if filled:
            self.write(tx, array, path, (slice(None),) * 3)
        return None

    def create_group(self, tx: Open, path: str) -> None:
        kind = {"kind": next(self.values)}
        work = tx.tx.create_group(path, kind)
        if not tx.view.free_for_group(path):
            tx.saw(lambda s: s.free_for_group(path), path)
            return self.refused(AlreadyExists, work)
        self.run(work)
        tx.do(path, lambda s: s.groups.__setitem__(path, kind))
        tx.touch.fresh.add(path)
        tx.touch.groups.add(path)
        return None

    def delete(self, tx: Open, path: str) -> None:
        work = tx.tx.delete(path)
        if not any(is_at_or_below(p, path) for p in tx.view.nodes()):
            tx.saw(lambda s: any(is_at_or_below(p, path) for p in s.nodes()), path)
            return self.refused(NotFound, work)
        self.run(work)
        stored = [p for p in tx.start.nodes() if is_at_or_below(p, path)]
        deleted = tx.touch.deleted
        if any(not any(is_at_or_below(p, d) for d in deleted) for p in stored):
            deleted.add(path)
        gone = [p for p in tx.view.nodes() if is_at_or_below(p, path)]
        tx.saw(lambda s: sorted(p for p in s.nodes() if is_at_or_below(p, path)), path)
        tx.do(path, lambda s: s.remove(gone))
        tx.touch.forget(path)
        return None

    def write_region(self, tx: Open, path: str, cuts: list[tuple[int, int, int]], whole: bool) -> None:
        if path not in tx.view.arrays:
            tx.saw(lambda s: path in s.arrays, path)
            return self.refused(NotFound, tx.tx.array(path))
        array = self.run(tx.tx.array(path))
        shape = tx.view.arrays[path].shape
        self.write(tx, array, path, (slice(None),) * 3 if whole else region_of(shape, cuts))
        return None

    def write(self, tx: Open, array: tstore.Array, path: str, region: Region) -> None:
        grid = tx.view.arrays[path]
        # others may append to the array before the commit
        region = tuple(slice(*s.indices(n)) for s, n in zip(region, grid.shape, strict=True))
        size = np.zeros(grid.shape, bool)[region].shape
        values = next(self.values) * 1000 + np.arange(np.prod(size), dtype=np.int64).reshape(size)
        self.run(array[region].write(values))
        some, whole = grid.touched(region)
        tx.do(path, lambda s: s.arrays[path].write(region, values))
        tx.touch.write(path, some, whole)

    def resize(self, tx: Open, path: str, shape: tuple[int, int]) -> None:
        if path not in tx.view.arrays:
            return
        array = self.run(tx.tx.array(path))
        full = (*shape, array.shape[2])
        self.run(array.resize(full))
        assert array.shape == full
        tx.do(path, lambda s: s.arrays[path].resize(full))
        tx.touch.fresh.add(path)
        tx.touch.write(path, set(), set())

    def append(self, tx: Open, path: str, length: int, other_axis: bool) -> None:
        if path not in tx.view.arrays or max(tx.view.arrays[path].shape[:2]) > LONGEST:
            return
        array = self.run(tx.tx.array(path))
        size, axis = list(array.shape), int(other_axis)
        size[axis] = length
        values = next(self.values) * 1000 + np.arange(np.prod(size), dtype=np.int64).reshape(size)
        handle = self.run(array.append(values, axis))
        tx.do(path, lambda s: s.arrays[path].append(axis, values))
        assert array.shape == tx.view.arrays[path].shape
        tx.touch.append(path, axis)
        tx.appended.append((path, values, handle))

    def read_region(self, tx: Open, path: str, cuts: list[tuple[int, int, int]]) -> None:
        if path not in tx.view.arrays:
            return
        array = self.run(tx.tx.array(path))
        region = region_of(tx.view.arrays[path].shape, cuts)

        def look(state: State) -> Any:
            values = state.arrays[path].read(region)
            return NEVER if values is None else values

        actual = self.try_on(tx, reading(array[region]))
        if actual is None:
            return
        assert same(actual, look(tx.view))
        tx.saw(look, path)

    def list_paths(self, tx: Open) -> None:
        assert self.run(tx.tx.paths()) == sorted(tx.view.arrays)
        tx.saw(lambda s: sorted(s.arrays), None)

    def abort(self, which: int) -> None:
        tx = self.pick(which)
        self.open.remove(tx)
        self.run(tx.tx.abort())
        self.ended.append(tx)

    def commit(self, which: int, count: int) -> None:
        """Commit one transaction, or several at once."""
        which %= len(self.open)
        self.commit_all([*self.open[which:], *self.open[:which]][:count])

    def commit_all(self, some: list[Open]) -> None:
        some = list(some)

        async def together() -> list[int | BaseException]:
            return await asyncio.gather(*[t.tx.commit() for t in some], return_exceptions=True)

        results = self.run(together())
        self.open = [t for t in self.open if t not in some]
        self.ended += some
        outcomes = list(zip(some, results, strict=True))
        for tx, version in sorted((o for o in outcomes if isinstance(o[1], int)), key=lambda o: int(o[1])):  # type: ignore[arg-type]
            assert isinstance(version, int)
            assert tx.tx.version == version
            self.committed(tx, version)
        for tx, error in outcomes:
            if isinstance(error, BaseException):
                if not isinstance(error, (Conflict, SnapshotExpired)):
                    raise error
                assert self.may_fail(tx, error), f"it had no reason to fail: {error}"

    def committed(self, tx: Open, version: int) -> None:
        """Check a commit, whose version may be shared with others of its group commit, and update the model."""
        assert version in (self.newest, self.newest + 1), f"version {version} after {self.newest}"
        if version == self.newest:
            assert len(self.touches[version]) > 0
            assert not tx.serializable
            assert tx.target is None
            for other in self.touches[version]:
                assert not tx.touch.conflicts(other)
                assert not other.conflicts(tx.touch)
        else:
            self.states.append(self.states[-1].copy())
            self.origin.append(version)
            self.touches.append([])
            self.committed_as.append([])
        assert not tx.condemned
        assert tx.target not in self.expired
        state = self.states[version]
        for newer in range(tx.base + 1, version):
            for touch in self.touches[newer]:
                assert not tx.touch.conflicts(touch), f"it should have met version {newer}"
        if tx.serializable:
            for seen in tx.seen:
                assert seen.holds(state, tx.ops), "something that it had read has changed"
            assert tx.found_tags_as_in(state), "a tag that it had looked for has come or gone"
        tx.apply(state)
        for path, values, handle in tx.appended:
            if path in tx.touch.appended:
                assert same(state.arrays[path].read(handle.region), values)
        for tag in tx.touch.dropped:
            state.tags.pop(tag, None)
        state.tags.update(dict.fromkeys(tx.touch.tags, tx.target or version))
        self.touches[version].append(tx.touch)
        self.committed_as[version].append((tx.message, tx.touch.tags, tx.touch.dropped, tx.tx.id))

    def may_fail(self, tx: Open, error: BaseException) -> bool:
        if tx.condemned or tx.target in self.expired:
            return True
        newer = range(tx.base + 1, self.newest + 1)
        for version in newer:
            if tx.serializable and not tx.found_tags_as_in(self.states[version]):
                return True
            for touch in self.touches[version]:
                if tx.touch.conflicts(touch):
                    return True
                structure = bool(touch.fresh or touch.deleted or touch.replaces)
                if tx.serializable and tx.may_be_overtaken(touch, structure):
                    return True
        overtaken = any(v in self.expired for v in (self.origin[tx.base], *newer))
        return overtaken and (tx.touch.patches or tx.serializable)

    def use_one_that_ended(self, which: int, path: str) -> None:
        if not self.ended:
            return
        tx = self.ended[-1 - which % len(self.ended)]
        self.refused(Misuse, tx.tx.create_group(path))
        self.refused(Misuse, tx.tx.commit())
        outcome = self.run(self.stores[which % 2].outcome(tx.tx.id))
        assert outcome == tx.tx.version

    # ---- checkpoints

    def save(self, store: int, step: int, size: int, same_values: bool, hosts: int) -> None:
        chosen = self.stores[store % 2]
        first = 1 if same_values else next(self.values)
        tree = {"w": np.full((size, 2, WIDE), first, np.int64), "b": np.full((2, 1, 1), first, np.int64)}
        version = self.newest + 1
        metrics = {"loss": float(first)}

        async def all_hosts() -> list[int]:
            options: dict[str, Any] = {"metrics": metrics}
            if hosts > 1:
                options |= {"hosts": hosts, "attempt": f"a{version}"}
            saves = [tstore.save(chosen, tree, step, host=h, **options) for h in range(hosts)]
            ended = await asyncio.gather(*saves, return_exceptions=True)  # wait for all of them
            for error in ended:
                if isinstance(error, BaseException):
                    raise error
            return [version for version in ended if isinstance(version, int)]

        tag = f"step/{step}"
        if tag in self.states[-1].tags:
            return self.refused(AlreadyExists, all_hosts())
        assert self.run(all_hosts()) == [version] * hosts
        state = State(tags={**self.states[-1].tags, tag: version})
        for path, values in tree.items():
            shape = (values.shape[0], values.shape[1], values.shape[2])
            grid = state.arrays[path] = Grid(shape, shape, False)
            grid.write((slice(None),) * 3, values)
        self.states.append(state)
        self.origin.append(version)
        self.touches.append([Touch(tags={tag}, replaces=True)])
        self.committed_as.append([])
        self.metrics[version] = float(first)
        return None

    def restore(self, store: int, step: int | None) -> None:
        chosen = self.stores[store % 2]
        tags = self.states[-1].tags
        steps = sorted(int(t.removeprefix("step/")) for t in tags if t.startswith("step/"))
        assert self.run(tstore.steps(chosen)) == steps
        if step is None:
            if not steps:
                return None
            step, asked = steps[-1], None
        else:
            asked = step
        if step not in steps:
            return self.refused(NotFound, tstore.restore(chosen, asked))
        grids = self.states[tags[f"step/{step}"]].arrays
        if any(grid.read((slice(None),) * 3) is None for grid in grids.values()):
            return self.refused(NotFound, tstore.restore(chosen, asked))
        restored = flat(self.run(tstore.restore(chosen, asked)))
        assert restored.keys() == grids.keys()
        for path, values in restored.items():
            assert same(values, grids[path].read((slice(None),) * 3))
        return None

    # ---- time travel

    async def check(self, snapshot: tstore.Snapshot, version: int) -> None:
        """Check that a snapshot equals the model of a version."""
        state = self.states[version]
        assert snapshot.version == version
        assert snapshot.paths() == sorted(state.arrays)
        assert snapshot.tags == state.tags
        for path in NAMES:
            if path not in state.arrays:
                assert snapshot.attributes(path) == state.groups.get(path, {})
        for path, grid in state.arrays.items():
            array = await snapshot.array(path)
            assert (array.shape, array.chunks) == (grid.shape, grid.chunks)
            expected = grid.read((slice(None),) * 3)
            assert same(await reading(array), NEVER if expected is None else expected), path

    async def see(self, store: tstore.Store, at: Any, version: int) -> tstore.Snapshot | None:
        if not self.lives(version):
            with pytest.raises(SnapshotExpired):
                await store.snapshot(at)
            return None
        snapshot = await store.snapshot(at)
        await self.check(snapshot, version)
        return snapshot

    def look(self, store: int, how: str, version: int, other: int, tag: str) -> None:
        """Read a version, by number, tag or time."""
        match how:
            case "version":
                self.look_at_a_version(store, version, hold=other % 2 == 0)
            case "tag":
                self.look_at_a_tag(store, tag)
            case "time":
                self.look_at_a_time(store, version)
            case "held":
                self.read_a_snapshot_that_was_held(version)
            case "diff":
                self.compare(store, version, other)
            case "history":
                self.check_history(self.stores[store % 2])

    def look_at_a_version(self, store: int, version: int, hold: bool) -> None:
        version %= len(self.states)
        snapshot = self.run(self.see(self.stores[store % 2], version, version))
        if hold and snapshot is not None:
            self.held.append((version, snapshot))

    def look_at_a_tag(self, store: int, tag: str) -> None:
        known = self.states[-1].tags
        if tag in known:
            self.run(self.see(self.stores[store % 2], tag, known[tag]))
        else:
            error = SnapshotExpired if tag in self.gone else NotFound
            self.refused(error, self.stores[store % 2].snapshot(tag))

    def look_at_a_time(self, store: int, version: int) -> None:
        chosen = self.stores[store % 2]
        version = 1 + version % self.newest

        async def look() -> None:
            times = [(c.version, c.time) async for c in chosen.history()]
            at = max(time for v, time in times if v == version)
            await self.see(chosen, at, max(v for v, time in times if time <= at))
            with pytest.raises(NotFound):
                await chosen.snapshot(min(time for _, time in times) - datetime.timedelta(microseconds=1))

        self.run(look())

    def read_a_snapshot_that_was_held(self, which: int) -> None:
        if not self.held:
            return
        version, snapshot = self.held[which % len(self.held)]

        async def look() -> None:
            try:
                await self.check(snapshot, version)
            except SnapshotExpired:
                assert not self.lives(version)

        self.run(look())

    def compare(self, store: int, before: int, after: int) -> None:
        before, after = before % len(self.states), after % len(self.states)
        chosen = self.stores[store % 2]
        if not (self.lives(before) and self.lives(after)):
            return self.refused(SnapshotExpired, chosen.diff(before, after))
        old, new = self.states[before].arrays, self.states[after].arrays
        differing = {a.path: a for a in self.run(chosen.diff(before, after)).arrays}
        changed = {p for p in old.keys() & new.keys() if old[p] != new[p]}
        assert differing.keys() == changed | (old.keys() ^ new.keys())
        for path in changed:
            a, b = old[path], new[path]
            if (a.shape, a.chunks, a.sparse) == (b.shape, b.chunks, b.sparse):
                assert differing[path].chunks == a.differing(b)
        return None

    def check_history(self, store: tstore.Store | None = None) -> None:
        async def look() -> list[tstore.Commit]:
            return [c async for c in (store or self.stores[0]).history()]

        history = self.run(look())
        assert sorted({c.version for c in history}) == list(range(1, len(self.states)))
        assert [c.version for c in history] == sorted((c.version for c in history), reverse=True)
        for commit in history:
            assert commit.expired == (not self.lives(commit.version)), commit
        for version, transactions in enumerate(self.committed_as):
            if transactions:
                matching = [c for c in history if c.version == version]
                shown = {c.transaction: (c.message, {*c.tags, *c.tagged}, set(c.dropped)) for c in matching}
                assert shown == {t[3]: t[:3] for t in transactions}

    # ---- garbage collection

    def collect(
        self, store: int, last: int | None, every: int | None, best: int | None, tag: str | None, now: bool
    ) -> None:
        chosen = self.stores[store % 2]
        ruled = last is not None or every is not None or best is not None or tag is not None
        keep = None
        if ruled:
            keep = Keep(last, every, None if best is None else (best, "loss"), None, () if tag is None else (tag,))
        abandoned = {"abandoned": datetime.timedelta(0)} if now else {}
        alive = {v for v in self.origin if v > 0 and v not in self.expired}
        tags = self.states[-1].tags
        steps = {int(t.removeprefix("step/")): v for t, v in tags.items() if t.startswith("step/")}
        kept = set(alive)
        if keep is not None:
            order = sorted(steps)
            kept = {max(alive), *(steps[s] for s in order[-1:])} if alive else set()
            kept |= {steps[s] for s in order[-last:]} if last else set()
            kept |= {steps[s] for s in order if every and s % every == 0}
            if best is not None and steps:
                rated = sorted((self.metrics[v], -v) for v in steps.values() if v in self.metrics)
                if not rated:
                    return self.refused(NotFound, chosen.collect(keep, **abandoned))
                kept |= {-v for _, v in rated[:best]}
            if tag is not None and tag not in tags:
                return self.refused(NotFound, chosen.collect(keep, **abandoned))
            kept |= {tags[tag]} if tag is not None else set()
        gone = sorted(alive - kept)
        would = self.run(chosen.collect(keep, dry_run=True, **abandoned))
        report = self.run(chosen.collect(keep, **abandoned))
        assert report.versions == would.versions == gone
        assert set(report.tags) == {t for t, v in tags.items() if v in gone}
        if not now:
            assert report.abandoned == []
        for tx in self.open:
            tx.condemned |= tx.tx.id in report.abandoned
        assert set(report.abandoned) <= {tx.tx.id for tx in (*self.open, *self.ended)}
        assert (report.version is None) == (not gone and not report.abandoned)
        if report.version is not None:
            assert report.version == self.newest + 1
            state = self.states[-1].copy()
            state.tags = {t: v for t, v in tags.items() if v not in gone}
            self.gone |= {t for t, v in tags.items() if v in gone}
            self.states.append(state)
            self.origin.append(self.origin[-1])
            self.touches.append([])
            self.committed_as.append([])
            self.expired |= set(gone)
        return None

    # ---- invariants

    @invariant()
    def the_newest_version_is_that_of_the_model(self) -> None:
        if hasattr(self, "stores"):

            async def look() -> tuple[int, list[str], dict[str, int]]:
                snapshot = await self.stores[0].snapshot()
                return snapshot.version, snapshot.paths(), snapshot.tags

            state = self.states[-1]
            assert self.run(look()) == (self.newest, sorted(state.arrays), state.tags)

    def check_all(self) -> None:
        """Check every version and the whole store, as another process would read them."""

        async def look() -> None:
            store = await tstore.open(self.url, "r")
            for version in range(len(self.states)):
                await self.see(store, version, version)
            report = await store.verify()
            assert report.ok, report.faults

        self.run(look())


async def reading(array: tstore.Array) -> Any:
    """Return the values of an array, or `NEVER` if a part was never written."""
    try:
        return await array.read()
    except NotFound as error:
        if "was never written" not in str(error):
            raise
        return NEVER


def flat(tree: Any, head: str = "") -> dict[str, Any]:
    """Return the leaves of a tree of dicts by path."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{head}{key}/") if isinstance(value, dict) else {f"{head}{key}": value}
    return leaves


@pytest.mark.timeout(10 * settings().max_examples)  # hypothesis shrinks a failure for some minutes
class TestStore(StoreMachine.TestCase):  # type: ignore[misc]
    pass


TestStore.settings = settings(
    settings(),
    max_examples=settings().max_examples * 3 // 5,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

"""A deterministic simulation of many hosts on one store, with everything going wrong that may.

    python -m tstore.testing.simulation --seeds 10000     # many runs, on all cores
    python -m tstore.testing.simulation --seed 17 --story # one run again, told step by step

The code of the protocol is the real one: stores, transactions, groups, checkpoints. Unreal are the clock (virtual
time, and each host's own is wrong), chance, and the storage (`tstore.testing.storage`). A run is determined by its
seed. When all hosts have ended and all late requests have landed, a new host looks at what stands, and the
`checker` compares that with what the hosts did and saw.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tstore.commits.records import commit_key
from tstore.errors import SnapshotExpired, TStoreError
from tstore.pool import inline
from tstore.store import Store
from tstore.testing.checker import Committed, violations
from tstore.testing.history import CELLS, History
from tstore.testing.storage import CALM, Host, HostBackend, Storage, Weather
from tstore.testing.virtual import Stuck, VirtualLoop
from tstore.testing.workload import PATHS, GroupPlan, Site, create, read_state
from tstore.world import inhabited

__all__ = ["Outcome", "Tally", "main", "simulate", "simulate_many"]

_DEADLINE = 3_600.0  # virtual seconds in which every host must come to its end
_PART = 25  # runs that a process makes at a time
_BEFORE = (0, 0, 0, 59)  # commits before the run begins: the 64th writes a root and the hint
_LATEST = 60.0  # virtual seconds after which no request is under way any more


class Outcome(NamedTuple):
    """What one run showed: the promises that were broken (none, if all is well), and its story."""

    seed: int
    violations: list[str]
    story: list[str]
    commits: int


class _Run:
    """One run of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.choice = random.Random(f"run {seed}")
        self.history = History()
        self.story: list[str] = []
        self.hosts: list[Host] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.storage = Storage({})

    async def run(self) -> tuple[list[str], int]:
        """Lets all hosts live, and then checks what is left; the violations and the number of commits."""
        loop = asyncio.get_running_loop()
        objects = _made(self.choice.choice(_BEFORE))
        self.storage = Storage(objects)
        self.history.start = start = sum(k.startswith("commits/") for k in objects)
        with self._born("witness", CALM) as host:
            first = await self._committed(Store(HostBackend(self.storage, host), "simulated", "a"), start)
        if self.choice.random() < 0.5:
            hint = self.choice.choice((b"1", str(start).encode(), str(start + 3).encode(), b"junk"))
            self.storage.objects["latest"] = hint
        weather = self._weather()
        self._tell("run", f"starts at version {start}, {weather}")
        for number in range(self.choice.randint(2, 4)):
            self._start(self._host_life(f"host{number}", weather, self.choice.randint(3, 7)))
        for number in range(self.choice.choice((0, 1, 1, 2))):
            self._start(self._group_life(number, weather))
        while pending := [t for t in self.tasks if not t.done()]:
            if loop.time() > _DEADLINE:
                self.history.faults.append(f"{len(pending)} hosts had not come to an end after {_DEADLINE:g} s")
                break
            await asyncio.wait(pending, timeout=60)
        for task in self.tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self.history.faults.append(f"a host ended with {type(error).__name__}: {error}")
        await self._bury()
        await asyncio.sleep(_LATEST)
        return await self._judge(start, first)

    def _weather(self) -> Weather:
        bad = self.choice.choice((0, 0.01, 0.05, 0.15))
        return Weather(
            bad, self.choice.choice((0, 0, 0.005)), self.choice.choice((0, 0.003)), self.choice.choice((0, 0.2))
        )

    def _tell(self, who: str, what: str) -> None:
        self.story.append(f"{asyncio.get_running_loop().time():9.3f}  {who:<12} {what}")

    def _start(self, life: object) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(life))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _born(self, name: str, weather: Weather) -> Iterator[Host]:
        """A new run of a host, in whose world the running task lives from then on."""
        skew = self.choice.choice((0, 0, -3_600, 86_400))
        host = Host(name, f"{self.seed} {name}", weather, skew, self._tell)
        self.hosts.append(host)
        with inhabited(host), inline(host.step):
            yield host

    async def _host_life(self, name: str, weather: Weather, rounds: int) -> None:
        """A host that works, and is started again after each crash."""
        for life in range(4):
            with self._born(f"{name}.{life}", weather) as host:
                site = Site(host, self.storage, self.history)
                if await _survived(host, asyncio.create_task(site.live(rounds))):
                    return
            await asyncio.sleep(host.random.uniform(0, 20))

    async def _group_life(self, number: int, weather: Weather) -> None:
        """A group whose attempts follow each other, or run at once, until one has committed or all are spent."""
        choice = random.Random(f"group {self.seed} {number}")
        hosts = choice.choice((2, 2, 3))
        step = number + 1 if choice.random() < 0.5 else None
        name = f"job{number}" if step is None else f"step/{step}"
        attempts = choice.randint(1, 3)
        together = choice.random() < 0.5
        lives = []
        for attempt in range(attempts):
            plan = GroupPlan(name, f"a{attempt}", hosts, tuple(self.history.value() for _ in range(hosts)), step)
            twice = step is not None and choice.random() < 0.2  # there, what it writes does not hang on its base
            timeout = choice.choice((3.0, 10.0, 60.0))
            for host in [*range(hosts), *([choice.randrange(hosts)] if twice else [])]:
                delay = choice.expovariate(1) if choice.random() < 0.8 else choice.uniform(0, 30)
                lives.append(asyncio.create_task(self._member_life(plan, host, timeout, delay, weather)))
            if not together:
                await asyncio.wait(lives)
                lives = []
        if lives:
            await asyncio.wait(lives)

    async def _member_life(
        self, plan: GroupPlan, number: int, timeout: float, delay: float, weather: Weather
    ) -> None:
        await asyncio.sleep(delay)
        name = f"{plan.name}.{plan.attempt}.{number}.{len(self.hosts)}"
        with self._born(name, weather) as host:
            site = Site(host, self.storage, self.history)
            await _survived(host, asyncio.create_task(site.cooperate(plan, number, timeout)))

    async def _bury(self) -> None:
        """Ends what dead and stuck hosts were about, so that none of it runs on."""
        for host in self.hosts:
            host.ended = True
        me = asyncio.current_task()
        while rest := [t for t in asyncio.all_tasks() if t is not me]:
            for task in rest:
                task.cancel()
            await asyncio.wait(rest)
            for task in rest:
                if not task.cancelled():
                    task.exception()

    async def _judge(self, start: int, first: Committed) -> tuple[list[str], int]:
        """What a host finds that knows nothing, once all is calm."""
        found: list[str] = []
        log: dict[int, Committed] = {}
        with self._born("judge", CALM) as host:
            store = Store(HostBackend(self.storage, host), "simulated", "a")
            keys = sorted(k for k in self.storage.objects if k.startswith("commits/"))
            newest = len(keys)
            if keys != [commit_key(v) for v in range(1, newest + 1)]:
                return [*self.history.faults, f"the versions are not dense: {keys}"], 0
            try:
                if (seen := await store.log.newest()) != newest:
                    found.append(f"the newest version is {newest}, and {seen} was found")
                for version in range(start + 1, newest + 1):
                    log[version] = await self._committed(store, version)
                if newest > start and log[newest].state is None:
                    found.append(f"the newest version {newest} has expired")
                report = await store.verify()
                found += report.faults
                for name in self.history.attempts:
                    self.history.told.setdefault(name, []).append(await store.outcome(name))
                async with store.transaction("after") as tx:
                    await create(tx, "after", None)
                if tx.version != newest + 1:
                    found.append(f"the next commit became version {tx.version}, and not {newest + 1}")
            except TStoreError as error:
                found.append(f"in the end: {type(error).__name__}: {error}")
                return [*self.history.faults, *found], len(log)
        return [*found, *violations(first, log, self.history)], len(log)

    @staticmethod
    async def _committed(store: Store, version: int) -> Committed:
        record = await store.log.record(version)
        try:
            snapshot = await store.snapshot(version)
        except SnapshotExpired:
            return Committed(record, None, {})
        return Committed(record, await read_state(snapshot), snapshot.tags)


async def _survived(host: Host, work: asyncio.Task[None]) -> bool:
    """Whether the work came to its end before the host crashed; its error is raised."""
    crash = asyncio.create_task(host.crashed.wait())
    await asyncio.wait([work, crash], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        crash.cancel()
        work.result()
    return work.done()


@functools.cache
def _made(commits: int) -> dict[str, bytes]:
    """The objects of a store with arrays and that many more small commits."""

    async def make() -> dict[str, bytes]:
        storage = Storage({})
        host = Host("maker", "maker", CALM, 0, lambda _who, _what: None)
        with inhabited(host), inline(host.step):
            store = Store(HostBackend(storage, host), "simulated", "a")
            async with store.transaction("begin") as tx:
                for path in PATHS[::2]:
                    await create(tx, path, None)
            for number in range(commits):
                async with store.transaction("more") as tx:
                    await (await tx.array(PATHS[2]))[number % CELLS].write(0)
        return storage.objects

    loop = VirtualLoop()
    try:
        return loop.run_until_complete(make())
    finally:
        loop.close()


def simulate(seed: int) -> Outcome:
    """The outcome of the run of a seed; the same seed gives the same, in any process."""
    for commits in _BEFORE:
        _made(commits)  # on a loop of its own, before there is another
    loop = VirtualLoop()
    run: _Run | None = None

    async def whole() -> tuple[list[str], int]:
        nonlocal run
        run = _Run(seed)
        return await run.run()

    try:
        found, commits = loop.run_until_complete(whole())
    except Stuck as error:
        found, commits = [f"the run is stuck: {error}"], 0
    except TStoreError as error:
        found, commits = [f"the store can't be read: {type(error).__name__}: {error}"], 0
    except BaseException as error:
        error.add_note(f"in the simulation of seed {seed}")
        raise
    finally:
        loop.close()
    assert run is not None
    return Outcome(seed, found, run.story, commits)


class Tally(NamedTuple):
    """How many runs there were, how many commits they made, and the outcomes that are not well."""

    runs: int
    commits: int
    broken: list[Outcome]


def simulate_many(seeds: range, processes: int) -> Iterator[Tally]:
    """The outcomes of all seeds, some at a time, from that many processes at once."""
    parts = [seeds[i : i + _PART] for i in range(0, len(seeds), _PART)]
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as executor:
        yield from executor.map(_tally, parts)


def _tally(seeds: range) -> Tally:
    outcomes = [simulate(seed) for seed in seeds]
    return Tally(len(outcomes), sum(o.commits for o in outcomes), [o for o in outcomes if o.violations])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs many seeds, or one; returns 1 where a promise was broken."""
    parser = argparse.ArgumentParser(
        "python -m tstore.testing.simulation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one run only")
    parser.add_argument("--story", action="store_true", help="tell what happened in that run")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _one(options.seed, story=options.story)
    started, runs, commits, broken = time.perf_counter(), 0, 0, 0
    for tally in simulate_many(range(options.first, options.first + options.seeds), options.processes):
        runs, commits, broken = runs + tally.runs, commits + tally.commits, broken + len(tally.broken)
        for outcome in tally.broken:
            print(f"\rseed {outcome.seed}: {outcome.violations[0]}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{runs} of {options.seeds} runs, {broken} broken", end="", file=sys.stderr)
    seconds = time.perf_counter() - started
    print(f"\r{runs} runs with {commits} commits, {broken} broken; {runs / seconds:.0f} runs/s")
    return 1 if broken else 0


def _one(seed: int, *, story: bool) -> int:
    outcome = simulate(seed)
    if story:
        print("\n".join(outcome.story))
    print(f"seed {seed}: {outcome.commits} commits, {len(outcome.violations)} violations")
    for violation in outcome.violations:
        print(violation)
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())

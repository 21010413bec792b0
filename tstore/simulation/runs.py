"""Simulated runs: many hosts on one store in virtual time, with every fault that may happen.

The code of the protocol is the real one: stores, transactions, groups, checkpoints. Unreal are the clock (virtual
time, and each host's own is wrong), chance, and the storage (`simulation.storage`). A run is determined by its
seed. When all hosts have ended and all late requests have landed, a new host reads the store, and the
`checker` compares that with what the hosts did and saw.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import random
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tstore
from tstore.errors import TStoreError
from tstore.runtime.pool import inline
from tstore.runtime.world import inhabited
from tstore.simulation.groups import GroupPlan, cooperate
from tstore.simulation.history import History
from tstore.simulation.judge import committed, judge_copy, judge_power_failure, judge_store
from tstore.simulation.miniature import reduced
from tstore.simulation.scenario import Scenario
from tstore.simulation.site import Darkroom, Site
from tstore.simulation.storage import HostStorage, SharedObjects
from tstore.simulation.virtual import Stuck, VirtualLoop
from tstore.simulation.weather import Host, Onlooker
from tstore.simulation.workload import live
from tstore.storage.cache.folder import Cache

__all__ = ["Outcome", "Tally", "simulate", "simulate_many"]

_DEADLINE = 3_600.0  # virtual seconds in which every host must come to its end
_PART = 25  # runs that a process makes at a time
_LATEST = 60.0  # virtual seconds after which no request is under way any more


class Outcome(NamedTuple):
    """What one run showed: the promises that were broken (none, if all is well), and its story."""

    seed: int
    violations: list[str]
    story: list[str]
    commits: int


class _Place:
    """A storage, and what hosts do and see there."""

    def __init__(self, storage: SharedObjects, start: int) -> None:
        self.storage = storage
        self.history = History()
        self.history.start = start
        self.darkroom = Darkroom()


class _Run:
    """One run of one seed."""

    def __init__(self, seed: int, choice: random.Random, scenario: Scenario, objects: dict[str, bytes]) -> None:
        self.seed = seed
        self.choice = choice
        self.scenario = scenario
        self.story: list[str] = []
        self.hosts: list[Host] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.start = sum(k.startswith("commits/") for k in objects)
        self.place = _Place(SharedObjects(objects, strict=scenario.strict), self.start)
        self.mirror = _Place(SharedObjects({}, "mirror", strict=scenario.strict), self.start)
        self.mirror.history.skip_values()
        for place in (self.place, self.mirror):
            place.history.lagging = scenario.weather.blind > 0
        self.caches = contextlib.ExitStack()

    async def run(self) -> tuple[list[str], int]:
        """Let all hosts live, and then check what is left; the violations and the number of commits."""
        loop, scenario = asyncio.get_running_loop(), self.scenario
        start, storage = self.start, self.place.storage
        with self._onlooker("witness") as host:
            first = await committed(await tstore.open(HostStorage(storage, host)), start)
        if self.choice.random() < 0.5:
            hint = self.choice.choice((b"1", str(start).encode(), str(start + 3).encode(), b"junk"))
            storage.objects["latest"] = hint
        self._tell("run", f"starts at version {start}, {scenario}")
        for number in range(self.choice.randint(2, 4)):
            self._start(self._host_life(f"host{number}", self.place, self.choice.randint(3, 7)))
        for number in range(self.choice.choice((0, 1, 1, 2))):
            self._start(self._group_life(number))
        if scenario.mirrored and self.choice.random() < 0.6:
            self._start(self._failover())
        while pending := [t for t in self.tasks if not t.done()]:
            if loop.time() > _DEADLINE:
                self.place.history.note(f"{len(pending)} hosts had not come to an end after {_DEADLINE:g} s")
                break
            await asyncio.wait(pending, timeout=60)
        await self._ended([task for task in self.tasks if task.done()])
        await self._bury()
        await asyncio.sleep(_LATEST)
        found, log = await judge_store(self._onlooker, storage, first, self.place.history)
        if not found and self.place.darkroom.photograph is not None:
            found = await judge_power_failure(self._onlooker, self.place.darkroom, log, self.choice)
        if not found and scenario.mirrored:
            source = storage, self.place.history, log
            found = await judge_copy(self._onlooker, self.mirror.storage, first, source, self.mirror.history)
        return found, len(log)

    def _tell(self, who: str, what: str) -> None:
        self.story.append(f"{asyncio.get_running_loop().time():9.3f}  {who:<12} {what}")

    def _start(self, life: object) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(life))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _born(self, name: str) -> Iterator[Host]:
        """A new run of a host, in whose world the running task lives from then on."""
        skew = self.choice.choice((0, 0, -3_600, 86_400))
        host = Host(name, f"{self.seed} {name}", self.scenario.weather, skew, self._tell)
        self.hosts.append(host)
        with inhabited(host), inline(host.step):
            yield host

    @contextlib.contextmanager
    def _onlooker(self, name: str) -> Iterator[Host]:
        """A host that nothing hinders, in whose world the running task lives from then on."""
        host = Onlooker(name, f"{self.seed} {name}", self._tell)
        with inhabited(host), inline(host.step):
            yield host

    async def _site(self, host: Host, place: _Place) -> Site:
        """The host with the storage open, perhaps with a cache in front."""
        cache = None
        if self.scenario.cached:
            cache = Cache(self.caches.enter_context(tempfile.TemporaryDirectory(prefix="tstore-simulation-")))
        return await Site.of(host, place.storage, place.history, place.darkroom, cache)

    async def _host_life(self, name: str, place: _Place, rounds: int) -> None:
        """A host that works, and is started again after each crash."""
        mirror = self.mirror.storage if self.scenario.mirrored and place is self.place else None
        for run in range(4):
            with self._born(f"{name}.{run}") as host:
                site = await self._site(host, place)
                if await _survived(host, asyncio.create_task(live(site, rounds, self.scenario.mood, mirror))):
                    return
            await asyncio.sleep(host.random.uniform(0, 20))

    async def _failover(self) -> None:
        """A host that goes on with the copy, once that is a store, while others still copy to it perhaps."""
        for _ in range(100):
            await asyncio.sleep(self.choice.uniform(0, 3))
            if "tstore.json" in self.mirror.storage.objects:
                await self._host_life("failover", self.mirror, 4)
                return

    async def _group_life(self, number: int) -> None:
        """A group whose attempts follow each other, or run at once, until one has committed or all are spent."""
        choice = random.Random(f"group {self.seed} {number}")
        hosts = choice.choice((2, 2, 3) if self.scenario.fan > 2 else (2, 3, 4, 6))
        step = number + 1 if choice.random() < 0.5 else None
        name = f"job{number}" if step is None else f"step/{step}"
        attempts = choice.randint(1, 3)
        together = choice.random() < 0.5
        durable = choice.random() < 0.8
        lives = []
        for attempt in range(attempts):
            values = tuple(self.place.history.value() for _ in range(hosts))
            deleting = tuple(h for h in range(hosts) if choice.random() < 0.4)
            twice = step is not None and choice.random() < 0.2  # there, what it writes does not hang on its base
            plan = GroupPlan(name, f"a{attempt}", hosts, values, step, durable, deleting, twice)
            timeout = choice.choice((3.0, 10.0, 60.0))
            for host in [*range(hosts), *([choice.randrange(hosts)] if twice else [])]:
                delay = choice.expovariate(1) if choice.random() < 0.8 else choice.uniform(0, 30)
                lives.append(asyncio.create_task(self._member_life(plan, host, timeout, delay)))
            if not together:
                await self._ended(lives)
                lives = []
        await self._ended(lives)

    async def _ended(self, lives: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the end of hosts; none of them may end with an error."""
        for error in await asyncio.gather(*lives, return_exceptions=True):
            if error is not None and not isinstance(error, asyncio.CancelledError):
                self.place.history.note(f"a host ended with {type(error).__name__}: {error}")

    async def _member_life(self, plan: GroupPlan, number: int, timeout: float, delay: float) -> None:
        await asyncio.sleep(delay)
        name = f"{plan.name}.{plan.attempt}.{number}.{len(self.hosts)}"
        with self._born(name) as host:
            site = await self._site(host, self.place)
            await _survived(host, asyncio.create_task(cooperate(site, plan, number, timeout)))

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


async def _survived(host: Host, work: asyncio.Task[None]) -> bool:
    """Whether the work came to its end before the host crashed; its error is raised."""
    crash = asyncio.create_task(host.crashed.wait())
    await asyncio.wait([work, crash], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        crash.cancel()
        work.result()
    return work.done()


def simulate(seed: int) -> Outcome:
    """The outcome of the run of a seed; the same seed gives the same, in any process."""
    choice = random.Random(f"run {seed}")
    scenario = Scenario.of(choice)
    objects = scenario.objects()  # on a loop of its own, before there is another
    loop = VirtualLoop()
    run: _Run | None = None

    async def whole() -> tuple[list[str], int]:
        nonlocal run
        run = _Run(seed, choice, scenario, objects)
        with run.caches:
            return await run.run()

    try:
        with reduced(**scenario.constants):
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

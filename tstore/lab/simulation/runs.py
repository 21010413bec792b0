"""Simulated runs: many hosts on one store in virtual time, with injected faults.

The code under test is the real one: stores, transactions, cooperative transactions, checkpoints. Only the clock
(virtual time, with a skew for each host), random numbers, threads and storage are simulated. The seed determines
the run. When all hosts have ended and all late requests are done, a new host reads the store, and `checker`
compares the result with the history of the run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import multiprocessing
import random
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

import tstore
from tstore.core.runtime.pool import without_threads
from tstore.core.runtime.world import use_world
from tstore.core.storage.cache import Cache
from tstore.errors import TStoreError
from tstore.lab.simulation.client import Client, SimulatedStore
from tstore.lab.simulation.cooperation import PlannedCommit, cooperate
from tstore.lab.simulation.history import Traits
from tstore.lab.simulation.judge import (
    count_objects,
    finish_copy,
    judge_copy,
    judge_power_failure,
    judge_store,
    read_committed,
)
from tstore.lab.simulation.repairs import Repair, misplace_once
from tstore.lab.simulation.scenario import (
    ARCHIVES,
    UNARCHIVED,
    Layout,
    Scenario,
    override_constants,
    prepare_initial_stores,
)
from tstore.lab.simulation.storage import HostStorage, SharedObjects
from tstore.lab.simulation.virtual import NO_FAULTS, FaultFreeHost, FaultRates, Host, Stuck, VirtualLoop
from tstore.lab.simulation.workload import run_workload

__all__ = ["BatchResult", "Outcome", "simulate", "simulate_many"]

_DEADLINE = 3_600.0  # virtual seconds within which every host must end, besides the pauses of one host
_BATCH = 25  # runs per task of a process
_FIRST_REPAIRED, _FIRST_ARCHIVED, _FIRST_WITH_MORE, _FIRST_HARSH = 1000, 2000, 3000, 4000
_FIRST_REPEATED = 5_000_000
_REPAIRED = 0.25  # the share of runs with a repair; before `_FIRST_WITH_MORE`, of those where nothing excludes it
_MISPLACED = 0.3  # the share of repaired runs in which a record is misplaced
_REPAIR_CRASHES = (0, 0.005, 0.02)
_REPEATED = 0.3  # the share of cooperative checkpoints whose hosts begin again
_BESIDE = 12  # operations of a host that archives while another one is stalled
_DRAIN = 60.0  # virtual seconds after which all late requests have arrived


class Outcome(NamedTuple):
    """The result of one run: the broken promises, a line of text for each event, and what it made, by kind."""

    seed: int
    violations: list[str]
    trace: list[str]
    counts: Counter[str]


class _Run:
    """One run: its scenario, its two stores, its hosts and its trace."""

    def __init__(
        self,
        seed: int,
        rng: random.Random,
        scenario: Scenario,
        objects: dict[str, bytes],
        foreign_records: list[bytes],
    ) -> None:
        lagging = scenario.rates.stale_heads > 0
        archived = scenario.archive_every < UNARCHIVED and seed < _FIRST_WITH_MORE
        self.repairs = _is_repaired(seed) and not (
            archived or scenario.mirrored or lagging or scenario.rates.stale_lists
        )
        self.seed = seed
        self.rng = rng
        self.foreign_records = foreign_records
        self.scenario = scenario
        self.trace: list[str] = []
        self.hosts: list[Host] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.start = sum(k.startswith("commits/") for k in objects)  # the newest version before the run
        strict = scenario.strict
        storages = SharedObjects(objects, strict=strict), SharedObjects({}, "mirror", strict=strict)
        traits = Traits(
            lagging, compacting=scenario.layout == "cut", wrong_roots=scenario.roots not in ("intact", "missing")
        )
        self.primary, self.mirror = (SimulatedStore(s, self.start, traits) for s in storages)
        self.mirror.history.skip_values()
        more = random.Random(f"more {seed}")
        drawn = {name: w for name, w in (("roll_back", 0.2), ("write_with_zarr", 0.6)) if more.random() < 0.4}
        self.more = drawn if seed >= _FIRST_WITH_MORE else {}
        self.caches = contextlib.ExitStack()  # the temporary folders of the hosts' caches

    async def run(self) -> tuple[list[str], Counter[str]]:
        """Run all hosts, check the result, and return the violations and what the run made (`count_objects`)."""
        loop, scenario = asyncio.get_running_loop(), self.scenario
        start, storage = self.start, self.primary.storage
        with self._fault_free_host("witness") as host:
            initial = await read_committed(await tstore.open(HostStorage(storage, host)), start)
        if self.rng.random() < 0.5:
            hint = self.rng.choice((b"1", str(start).encode(), str(start + 3).encode(), b"junk"))  # may be wrong
            storage.objects["latest"] = hint
        self._log("run", f"starts at version {start}, {scenario}")
        for number in range(self.rng.randint(2, 4)):
            self._start(self._run_host(f"host{number}", self.primary, self.rng.randint(3, 7)))
        for number in range(self.rng.choice((0, 1, 1, 2))):
            self._start(self._run_cooperation(number))
        stalled = scenario.archive_every < UNARCHIVED and random.Random(f"stalled {self.seed}").random() < 0.5
        if stalled or (self.repairs and scenario.archive_every < UNARCHIVED):
            self._start(self._run_beside("stalled", "edits", 4, scenario.rates._replace(pauses=0.05)))
            self._start(self._run_beside("compactor", "archiving", _BESIDE, scenario.rates._replace(pauses=0)))
        if scenario.mirrored and self.rng.random() < 0.6:
            self._start(self._failover())
        if self.repairs:
            self._start(self._repair())
        while pending := [t for t in self.tasks if not t.done()]:
            if loop.time() - max((host.paused for host in self.hosts), default=0.0) > _DEADLINE:
                self.primary.history.add_violation(f"{len(pending)} hosts had not ended after {_DEADLINE:g} s")
                break
            await asyncio.wait(pending, timeout=60)
        await self._wait([task for task in self.tasks if task.done()])
        await self._cancel_all()
        await asyncio.sleep(_DRAIN)
        await finish_copy(self._fault_free_host, storage, self.mirror.storage)
        violations, log = await judge_store(self._fault_free_host, storage, initial, self.primary.history)
        if not violations and not self.repairs:
            violations = await judge_power_failure(self._fault_free_host, self.primary, log, self.rng)
        if not violations and scenario.mirrored:
            violations = await judge_copy(self._fault_free_host, self.mirror, initial, self.primary, log, self.rng)
        return violations, await count_objects(self._fault_free_host, storage, log)

    def _log(self, who: str, what: str) -> None:
        self.trace.append(f"{asyncio.get_running_loop().time():9.3f}  {who:<12} {what}")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    @contextlib.contextmanager
    def _new_host(self, name: str) -> Iterator[Host]:
        """Let the running task act as a new host with faults during the block."""
        skew = self.rng.choice((0, 0, -3_600, 86_400))
        host = Host(name, f"{self.seed} {name}", self.scenario.rates, skew, self._log)
        self.hosts.append(host)
        with use_world(host), without_threads(host.step):
            yield host

    @contextlib.contextmanager
    def _fault_free_host(self, name: str) -> Iterator[Host]:
        """Let the running task act as a new host without faults during the block."""
        host = FaultFreeHost(name, f"{self.seed} {name}", self._log)
        with use_world(host), without_threads(host.step):
            yield host

    async def _open_client(self, host: Host, store: SimulatedStore) -> Client:
        cache = None
        if self.scenario.cached:
            cache = Cache(self.caches.enter_context(tempfile.TemporaryDirectory(prefix="tstore-simulation-")))
        return await Client.open(host, store, cache)

    async def _run_host(self, name: str, store: SimulatedStore, rounds: int) -> None:
        """Run a host, restarting it after each of its first three crashes."""
        mirror = self.mirror.storage if self.scenario.mirrored and store is self.primary else None
        for restart in range(4):
            with self._new_host(f"{name}.{restart}") as host:
                client = await self._open_client(host, store)
                work = run_workload(client, rounds, self.scenario.mix, mirror, self.more)
                if await _survived(host, asyncio.create_task(work)):
                    return
            await asyncio.sleep(host.random.uniform(0, 20))

    async def _run_beside(self, name: str, mix: str, rounds: int, rates: FaultRates) -> None:
        """Run a host of a run in which one host often stalls, and another archives records meanwhile."""
        with self._new_host(name) as host:
            host.rates = rates
            client = await self._open_client(host, self.primary)
            await _survived(host, asyncio.create_task(run_workload(client, rounds, mix, None, self.more)))

    async def _failover(self) -> None:
        """Run a host that writes to the mirror once it exists, perhaps while others still copy to it."""
        for _ in range(100):
            await asyncio.sleep(self.rng.uniform(0, 3))
            if "tstore.json" in self.mirror.storage.objects:
                await self._run_host("failover", self.mirror, 4)
                return

    async def _repair(self) -> None:
        """Void a version while the others work, or put a record in the place of one."""
        rng, history = random.Random(f"repair of {self.seed}"), self.primary.history
        await asyncio.sleep(rng.uniform(1, 20))
        misplaces = self.seed >= _FIRST_WITH_MORE and rng.random() < _MISPLACED
        crashes = rng.choice(_REPAIR_CRASHES) if self.seed >= _FIRST_HARSH else 0
        repair = Repair(history, rng)
        for restart in range(4):
            with self._new_host(f"repair{restart or ''}") as host:
                # the others work between its requests
                host.rates = NO_FAULTS._replace(crashes=crashes if restart < 3 and not misplaces else 0)
                storage = HostStorage(self.primary.storage, host)
                work = (
                    misplace_once(storage, self.foreign_records, history, rng)
                    if misplaces
                    else repair.run(storage)
                )
                if await _survived(host, asyncio.create_task(work)):
                    return
            await asyncio.sleep(rng.uniform(0, 20))

    async def _run_cooperation(self, number: int) -> None:
        """Run the attempts of a cooperative transaction, sequentially or concurrently."""
        rng = random.Random(f"group {self.seed} {number}")
        # a fan-in of 2 gets more hosts too, so that fragments are merged level by level
        hosts = rng.choice((2, 2, 3) if self.scenario.fan_in > 2 else (2, 3, 4, 6))
        step = number + 1 if rng.random() < 0.5 else None
        name = f"job{number}" if step is None else f"step/{step}"
        attempts = rng.randint(1, 3)
        concurrent = rng.random() < 0.5
        # the hosts of the last attempt may begin it again, after a gc has perhaps condemned it
        again = random.Random(f"again {self.seed} {number}")
        repeats = step is not None and self.seed >= _FIRST_REPEATED and again.random() < _REPEATED
        durable = rng.random() < 0.8
        members = []
        for attempt in range(attempts):
            values = tuple(self.primary.history.new_value() for _ in range(hosts))
            deleting = tuple(h for h in range(hosts) if rng.random() < 0.4)
            # one host may run twice in a checkpoint, since what it writes does not depend on the base
            twice = step is not None and (rng.random() < 0.2 or (repeats and attempt == attempts - 1))
            withdraws = step is not None and rng.random() < 0.5
            plan = PlannedCommit(name, f"a{attempt}", hosts, values, step, durable, deleting, twice, withdraws)
            timeout = rng.choice((3.0, 10.0, 60.0))
            for host in [*range(hosts), *([rng.randrange(hosts)] if twice else [])]:
                delay = rng.expovariate(1) if rng.random() < 0.8 else rng.uniform(0, 30)
                members.append(asyncio.create_task(self._run_member(plan, host, timeout, delay)))
            if not concurrent:
                await self._wait(members)
                members = []
        await self._wait(members)
        if repeats:
            rates = self.scenario.rates._replace(pauses=again.choice((0, 0.05)))
            self._start(self._run_beside(f"collector{number}", "collections", _BESIDE, rates))
            await asyncio.sleep(again.uniform(0, 150))
            values = tuple(self.primary.history.new_value() for _ in range(hosts))
            plan = plan._replace(values=values, twice=False, again=True)
            await self._wait(
                [
                    asyncio.create_task(self._run_member(plan, host, timeout, again.expovariate(1)))
                    for host in range(hosts)
                ]
            )

    async def _wait(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the tasks of hosts to end, and record their errors as violations."""
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if error is not None and not isinstance(error, asyncio.CancelledError):
                self.primary.history.add_violation(f"a host ended with {type(error).__name__}: {error}")

    async def _run_member(self, plan: PlannedCommit, number: int, timeout: float, delay: float) -> None:
        await asyncio.sleep(delay)
        name = f"{plan.name}.{plan.attempt}.{number}.{len(self.hosts)}"
        with self._new_host(name) as host:
            client = await self._open_client(host, self.primary)
            await _survived(host, asyncio.create_task(cooperate(client, plan, number, timeout)))

    async def _cancel_all(self) -> None:
        """Cancel the tasks of all hosts: some still wait because their host crashed or got stuck."""
        for host in self.hosts:
            host.cancelled = True
        current = asyncio.current_task()
        while rest := [t for t in asyncio.all_tasks() if t is not current]:
            for task in rest:
                task.cancel()
            await asyncio.wait(rest)
            for task in rest:
                if not task.cancelled():
                    task.exception()  # otherwise asyncio logs that it was never retrieved


async def _survived(host: Host, work: asyncio.Task[None]) -> bool:
    """Return whether the work ended before the host crashed; raise the error of the work if it failed."""
    crash = asyncio.create_task(host.crashed.wait())
    await asyncio.wait([work, crash], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        crash.cancel()
        work.result()
    return work.done()


def _is_repaired(seed: int) -> bool:
    """Return whether the run of a seed has a repair; drawn separately, like the layout."""
    return seed >= _FIRST_REPAIRED and random.Random(f"repair {seed}").random() < _REPAIRED


def simulate(seed: int) -> Outcome:
    """Simulate the run of a seed; its outcome is the same in any process."""
    rng = random.Random(f"run {seed}")
    # drawn separately, so that layouts and archives did not change the runs of existing seeds
    layout: Layout = random.Random(f"layout {seed}").choice(("usual", "usual", "cut"))
    archives = random.Random(f"archives {seed}")
    archive_every = (
        archives.choice(ARCHIVES) if seed >= _FIRST_ARCHIVED and archives.random() < 0.5 else UNARCHIVED
    )
    scenario = Scenario.draw(rng, layout, archive_every)
    if _is_repaired(seed) and seed >= _FIRST_WITH_MORE:
        scenario = scenario.for_repair()
    objects = scenario.objects()  # before the loop of the run exists, because `objects` runs its own loop
    foreign = scenario.foreign_records() if seed >= _FIRST_WITH_MORE else []
    loop = VirtualLoop()
    run: _Run | None = None

    async def run_all() -> tuple[list[str], Counter[str]]:
        nonlocal run
        run = _Run(seed, rng, scenario, objects, foreign)
        with run.caches:
            return await run.run()

    try:
        with override_constants(**scenario.constants):
            violations, counts = loop.run_until_complete(run_all())
    except Stuck as error:
        violations, counts = [f"the run is stuck: {error}"], Counter()
    except TStoreError as error:
        violations, counts = [f"the store can't be read: {type(error).__name__}: {error}"], Counter()
    except BaseException as error:
        error.add_note(f"in the simulation of seed {seed}")
        raise
    finally:
        loop.close()
    assert run is not None
    return Outcome(seed, violations, run.trace, counts)


class BatchResult(NamedTuple):
    """The number of runs in a batch, what they made, by kind, and the outcomes with violations."""

    runs: int
    counts: Counter[str]
    broken: list[Outcome]


def simulate_many(seeds: range, processes: int) -> Iterator[BatchResult]:
    """Simulate all seeds in parallel processes, and yield a result for each batch of seeds."""
    batches = [seeds[i : i + _BATCH] for i in range(0, len(seeds), _BATCH)]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, spawn, _start_process) as executor:
        yield from executor.map(_simulate_batch, batches)


def _start_process() -> None:
    """Exclude the objects shared by all runs from Python's garbage collection, which took a sixth of the time."""
    prepare_initial_stores()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _simulate_batch(seeds: range) -> BatchResult:
    outcomes = [simulate(seed) for seed in seeds]
    counts = sum((o.counts for o in outcomes), Counter[str]())
    return BatchResult(len(outcomes), counts, [o for o in outcomes if o.violations])

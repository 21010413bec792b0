"""One episode of a fuzzing run: a new store and rounds of random operations, each followed by a check.

1. A round has one worker, several workers in one event loop, or worker processes, one of which may be killed.
2. Then the model replays the journals of the workers, and some versions of the store, and of the copies made in
   the round, must equal the model; at the end of the episode, all versions of all of them.
3. Between two rounds, one of its copies may replace the store, as after a disaster, or a repair may void its
   newest versions; open handles and caches of the old store stay in use.

The seed determines everything in an episode, with worker processes or a server except the order of concurrent
operations.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tstore
from tests.fuzz.journal import Copying, Fault, Journal
from tests.fuzz.odd import odd_call
from tests.fuzz.processes import WorkerProcesses
from tests.fuzz.timeline import Mismatch, Timeline
from tests.fuzz.verbs import VERBS
from tests.fuzz.worker import Place, Worker
from tstore.errors import TStoreError

__all__ = ["Episode"]


class Episode:
    """One store and its random operations; `counts` has the number of operations by name, `faults` the faults."""

    def __init__(
        self,
        seed: str,
        place: Place,
        processes: int,
        *,
        tasks: int,
        replaceable: bool,
        quiesce: Callable[[], None] = lambda: None,
    ) -> None:
        self.seed = seed
        self.tasks = tasks
        self.choice = random.Random(seed)
        self.place = place
        self.processes = WorkerProcesses(processes) if processes else None
        self.replaceable = replaceable
        self._quiesce = quiesce  # ends requests of clients that were killed or gave up
        self.counts: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self.odd_faults: list[Fault] = []
        """The faults of calls with odd arguments."""
        self.last: list[str] = []
        self._timeline = Timeline()
        self._copies: dict[str, Timeline] = {}
        self._handles: list[tstore.Store] = []  # of single workers, kept from round to round
        self._outdated: list[tstore.Store] = []  # those opened before the last backup or repair
        self._rewound = 0

    async def run(self, rounds: int, operations: int, odd: int) -> None:
        """Run all rounds, or until a fault occurs. The store and its copies are not removed.

        Each worker runs `operations` operations per round; `odd` calls with odd arguments follow.
        """
        try:
            async with await tstore.open(self.place.url, storage_options=dict(self.place.options) or None):
                pass
            for number in range(rounds):
                self.last.append(f"round {number}")
                await self._round(number, operations)
                if self.faults:
                    return
                await self._odd(number, odd)
                if self.replaceable and self._copies and self.choice.random() < 0.15:
                    self._restore_from_backup()
                if not self.place.url.startswith("http") and self.choice.random() < 0.15:
                    await self._repair()
            await self._compare()
            for url in self._copies:
                await self._check_copy(url, thorough=True)
        except Mismatch as error:
            self._add_fault("model", *error.args)
        except TStoreError as error:
            self._add_fault("check", type(error).__name__, str(error))
        finally:
            for store in self._handles:
                with contextlib.suppress(TStoreError):
                    await store.close()
            if self.processes is not None:
                self.processes.close()

    def _add_fault(self, verb: str, kind: str, text: str = "") -> None:
        since = f" (after {self._rewound} backups and repairs)" if self._rewound else ""
        self.faults.append(Fault(verb, kind, text + since))

    async def _round(self, number: int, operations: int) -> None:
        name = f"r{number}"
        if self.processes is not None and self.choice.random() < 0.7:
            events = await self.processes.round(name, self.place, self.choice, operations)
            await asyncio.to_thread(self._quiesce)
            self.counts.update(self.processes.counts)
        elif self.tasks > 1 and self.choice.random() < 0.4:
            workers = [self._worker(f"{name}.{i}", alone=False) for i in range(self.tasks)]
            for each in workers:
                each.journal = workers[0].journal
            await asyncio.gather(*[each.work(VERBS, operations // self.tasks) for each in workers])
            for each in workers:
                await each.close()
            events = self._ended(workers)
        else:
            alone = self._worker(name, alone=True)
            alone.stores = self._handles
            alone.disturbed = any(store in self._outdated for store in alone.stores)
            alone.rewound = self._rewound > 0
            await alone.work(VERBS, operations)
            events = self._ended([alone])
        for fault in (e for e in events if isinstance(e, Fault)):
            self._add_fault(*fault)
        if self.faults:
            return
        async with await tstore.open(self.place.url, storage_options=dict(self.place.options) or None) as store:
            await self._synchronize(store, events)
        for url in sorted({event.url for event in events if isinstance(event, Copying)}):
            copy = await self._timeline.copied(url, events, self._copies.get(url))
            if copy is not None:
                self._copies[url] = copy
                await self._check_copy(url, thorough=False)

    async def _check_copy(self, url: str, *, thorough: bool) -> None:
        async with await tstore.open(url, "r") as store:
            await self._copies[url].check(store, self.choice, thorough=thorough)

    async def _synchronize(self, store: tstore.Store, events: Sequence[Any]) -> None:
        """Update the model and compare. A commit of unknown outcome may land in between, so retry then."""
        while True:
            await self._timeline.learn(store, events)
            try:
                return await self._timeline.check(store, self.choice, thorough=False)
            except Mismatch as error:
                landed = await store.log.reader.newest() > self._timeline.newest
                if error.args[0] != "newest" or not landed:
                    raise

    def _worker(self, name: str, *, alone: bool) -> Worker:
        return Worker(name, self.place, Journal(), random.Random(f"{self.seed} {name}"), alone=alone)

    def _ended(self, workers: Sequence[Worker]) -> list[Any]:
        for each in workers:
            self.counts.update(each.counts)
            self.last += each.log
        return workers[0].journal.events

    async def _odd(self, number: int, count: int) -> None:
        """Make calls with odd arguments, each on a new store."""
        for i in range(count):
            folder = self.place.scratch / f"odd-{number}-{i}"
            local = self.choice.random() < 0.2
            url = str(folder) if local else f"memory://{folder}"
            _, fault = await odd_call(url, self.choice)
            self.counts["odd"] += 1
            shutil.rmtree(folder, ignore_errors=True)
            if fault is not None:
                self.odd_faults.append(fault)

    async def _compare(self) -> None:
        async with await tstore.open(self.place.url, storage_options=dict(self.place.options) or None) as store:
            await self._timeline.check(store, self.choice, thorough=True)

    def _restore_from_backup(self) -> None:
        """Replace the store by a copy, as after a disaster; open handles and caches are not notified."""
        url = self.choice.choice(sorted(self._copies))
        shutil.rmtree(self.place.url)
        shutil.copytree(url, self.place.url)
        self._timeline = self._copies[url].fork(self._copies[url].newest)
        self._rewind("restore_from_backup", f"from {Path(url).name} at version {self._timeline.newest}")

    async def _repair(self) -> None:
        """Void up to three of the newest versions, but no collection; open handles and caches are not notified."""
        newest = self._timeline.newest
        first = max(1, newest - self.choice.randrange(3))
        if not all(self._timeline.is_living(version) for version in range(first, newest + 1)):
            return
        async with await tstore.open(self.place.url) as store:
            await store.repair(void_intact=range(first, newest + 1))
        self._timeline.void(first)
        async with await tstore.open(self.place.url) as store:
            await self._synchronize(store, [])
        self._rewind("repair", f"voided the versions from {first} to {newest}")

    def _rewind(self, how: str, text: str) -> None:
        """Note that the store has lost versions, which its open handles must notice and its copies may have."""
        self.counts[how] += 1
        self._outdated = list(self._handles)
        self._rewound += 1
        self.last.append(f"{how}: {text}")

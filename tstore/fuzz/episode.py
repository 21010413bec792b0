"""One episode of a fuzzing run: a new store, rounds of work on it, and after each a comparison with the model.

1. In a round workers work at once: one alone, some in one event loop, or some processes, of which some are killed.
2. Then the model takes in what they noted, and the store must be as the model has it; so must its copies.
3. Between two rounds the store may be replaced by one of its copies, as after a disaster; whoever has it open then
   goes on with its old handles and caches.

Everything an episode does follows from its seed, apart from the order of what is done at once.
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
from tstore.errors import TStoreError
from tstore.fuzz.crew import Crew
from tstore.fuzz.journal import CopyMade, Fault, Journal
from tstore.fuzz.odd import odd_call
from tstore.fuzz.timeline import Differs, Timeline
from tstore.fuzz.verbs import VERBS
from tstore.fuzz.worker import Place, Worker

__all__ = ["Episode"]


class Episode:
    """One store and all that is done to it; `counted` tells the operations by verb, `faults` what was found."""

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
        self.crew = Crew(processes) if processes else None
        self.replaceable = replaceable
        self._quiesce = quiesce  # ends what killed or impatient clients have asked for
        self.counted: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self.refused: list[Fault] = []
        """What odd calls did to stores of their own."""
        self.last: list[str] = []
        self._timeline = Timeline()
        self._copies: dict[str, Timeline] = {}
        self._handles: list[tstore.Store] = []  # of workers alone, which keep them from round to round
        self._disturbed = False
        self._replaced = 0

    async def run(self, rounds: int, operations: int, odd: int) -> None:
        """Work until a fault is found or all rounds are done; the store and its copies stay where they are.

        `operations` are those of a worker in a round, after which come so many `odd` calls.
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
            await self._compare(thorough=True)
        except Differs as error:
            self._found("model", *error.args)
        except TStoreError as error:
            self._found("check", type(error).__name__, str(error))
        finally:
            for store in self._handles:
                with contextlib.suppress(TStoreError):
                    await store.close()
            if self.crew is not None:
                self.crew.close()

    def _found(self, verb: str, kind: str, text: str = "") -> None:
        since = f" (since a backup took the store's place {self._replaced} times)" if self._replaced else ""
        self.faults.append(Fault(verb, kind, text + since))

    async def _round(self, number: int, operations: int) -> None:
        name = f"r{number}"
        if self.crew is not None and self.choice.random() < 0.7:
            events = await self.crew.round(name, self.place, self.choice, operations)
            await asyncio.to_thread(self._quiesce)
            self.counted.update(self.crew.counted)
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
            alone.stores, alone.disturbed = self._handles, self._disturbed
            alone.rewound = self._replaced > 0
            await alone.work(VERBS, operations)
            self._handles, self._disturbed = alone.stores, False
            events = self._ended([alone])
        for fault in (e for e in events if isinstance(e, Fault)):
            self._found(*fault)
        if self.faults:
            return
        async with await tstore.open(self.place.url, storage_options=dict(self.place.options) or None) as store:
            await self._take_in(store, events)
        for event in events:
            known = self._copies.get(event.url) if isinstance(event, CopyMade) else None
            if isinstance(event, CopyMade) and (known is None or known.newest < event.version):
                self._copies[event.url] = self._timeline.fork(event.version)
        for url, timeline in self._copies.items():
            async with await tstore.open(url, "r") as store:
                await timeline.check(store, self.choice, thorough=True)

    async def _take_in(self, store: tstore.Store, events: Sequence[Any]) -> None:
        """Bring the model up to date and compare; a commit of unknown outcome may land between the two."""
        while True:
            await self._timeline.learn(store, events)
            try:
                return await self._timeline.check(store, self.choice, thorough=False)
            except Differs as error:
                landed = (await store.snapshot()).version > self._timeline.newest
                if error.args[0] != "newest" or not landed:
                    raise

    def _worker(self, name: str, *, alone: bool) -> Worker:
        return Worker(name, self.place, Journal(), random.Random(f"{self.seed} {name}"), alone=alone)

    def _ended(self, workers: Sequence[Worker]) -> list[Any]:
        for each in workers:
            self.counted.update(each.counted)
            self.last += each.told
        return workers[0].journal.events

    async def _odd(self, number: int, count: int) -> None:
        """Some odd calls, each on a store of its own."""
        for i in range(count):
            folder = self.place.scratch / f"odd-{number}-{i}"
            local = self.choice.random() < 0.2
            url = str(folder) if local else f"memory://{folder}"
            _, fault = await odd_call(url, self.choice)
            self.counted["odd"] += 1
            shutil.rmtree(folder, ignore_errors=True)
            if fault is not None:
                self.refused.append(fault)

    async def _compare(self, *, thorough: bool) -> None:
        async with await tstore.open(self.place.url, storage_options=dict(self.place.options) or None) as store:
            await self._timeline.check(store, self.choice, thorough=thorough)

    def _restore_from_backup(self) -> None:
        """Put a copy in the place of the store, as after a disaster; open handles and caches are not told."""
        url = self.choice.choice(sorted(self._copies))
        shutil.rmtree(self.place.url)
        shutil.copytree(url, self.place.url)
        self._timeline = self._copies[url].fork(self._copies[url].newest)
        self.counted["restore_from_backup"] += 1
        self._disturbed = True
        self._replaced += 1
        self.last.append(f"restored from {Path(url).name} at version {self._timeline.newest}")

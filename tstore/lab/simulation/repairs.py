"""A repair during the other work of a run, and its effect on the history that the checker expects.

A repair voids one version of the run while others write, collect and copy; if later versions depend on it, it is
refused. Its host may crash at any moment; then another one begins it again. Later versions may have taken over
values that the voided one wrote, if they wrote another part of the same chunk. Everything else must be as if
the voided version had never been.

In other runs somebody puts a record where the next one belongs, one of another version or of another store. Nobody
may mistake it for a version until it is voided.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import tstore
from tstore.core.format.layout import MARKER, commit_key
from tstore.core.format.objects.encoding import decode
from tstore.core.format.objects.records import Record
from tstore.core.log.marker import Marker
from tstore.core.maintenance.repair import repair_store
from tstore.errors import InvalidArgument, TStoreError
from tstore.lab.simulation.history import History, Repaired
from tstore.lab.simulation.storage import HostStorage, SharedObjects

__all__ = ["Repair", "misplace_once"]

_TRIES = 4


class Repair:
    """A repair of a run: it is begun again, perhaps with another version, on each host that `run` gets."""

    def __init__(self, history: History, rng: random.Random) -> None:
        self._history = history
        self._random = rng
        self._tries = _TRIES
        self._wanted: list[int] = []  # to be voided, or being voided when the last host crashed
        self._former: dict[int, Record] = {}  # the former records of these versions
        self._void_first: list[int] = []  # the versions voided by a repair that crashed, in order
        self._voided: dict[int, Record] = {}

    async def run(self, storage: HostStorage) -> None:
        """Void a version of the run, and those that a concurrent commit has based on it meanwhile.

        Try another version if others depend on the first, or if its record may be archived. If the last host
        crashed, continue its repair, or let the repair of another version complete it.
        """
        history, shared = self._history, storage.storage
        history.repairing = True
        if self._wanted and self._random.random() < 0.3:
            other = self._random.randint(history.start + 1, max(shared.records()))
            self._note_ended(_decoded(shared))
            if not self._voided:  # the first repair is to be completed
                self._wanted = [other]
        try:
            while self._choose(shared):
                await self._void(storage)
        except TStoreError as error:
            history.add_violation(f"a repair failed: {type(error).__name__}: {error}")
        finally:
            history.repairing = False

    def _choose(self, shared: SharedObjects) -> bool:
        """Choose what to void next, unless that is chosen; return False if nothing is left to do."""
        newest = max(shared.records())
        if not self._wanted and self._tries and not self._voided and newest > self._history.start:
            self._tries -= 1
            self._wanted = [self._random.randint(self._history.start + 1, newest)]
        return bool(self._wanted)

    async def _void(self, storage: HostStorage) -> None:
        """Void the wanted versions, and record what else has to be voided with them."""
        history, shared, wanted = self._history, storage.storage, self._wanted
        records = _decoded(shared)
        self._void_first += [v for v in self._begun(shared) if v not in self._void_first]
        self._note_ended(records)
        self._former = {v: records[v] for v in wanted} | self._former
        try:
            log_id = Marker.decode(shared.objects[MARKER]).log_id
            report = await repair_store(storage, log_id, [], wanted)
        except InvalidArgument as error:
            storage.host.log(f"repair: {error}")
            self._wanted = self._begun(shared)
            if self._voided or self._wanted == wanted:
                history.add_violation(f"what was damaged by a repair could not be voided: {error}")
                self._wanted, self._tries = [], 0
            return
        storage.host.log(f"voids {wanted} by version {report.version}: {report}, restated {report.restated}")
        self._note_ended(_decoded(shared))
        self._wanted = [damage.version for damage in report.damaged if damage.version not in self._voided]

    def _note_ended(self, records: Mapping[int, Record]) -> None:
        """Record the versions voided by repairs whose commits are among these records."""
        for version, record in records.items():
            if record.voids:
                in_order = dict.fromkeys(v for v in (*self._void_first, *record.voids) if v in record.voids)
                self._voided |= {v: self._former[v] for v in in_order}
                self._history.repaired = Repaired(self._voided, version)

    def _begun(self, shared: SharedObjects) -> list[int]:
        """Return the void versions whose repair has not ended."""
        records = shared.records()
        begun = {v for v, former in self._former.items() if not former.void and decode(records[v], Record).void}
        return sorted(begun.difference(self._voided))


def _decoded(shared: SharedObjects) -> dict[int, Record]:
    return {version: decode(data, Record) for version, data in shared.records().items()}


async def misplace_once(storage: HostStorage, foreign: list[bytes], history: History, rng: random.Random) -> None:
    """Put a record of the store, or a `foreign` one, at the next number; after a while, void it."""
    shared = storage.storage
    records = shared.records()
    number = max(records) + 1
    data = rng.choice(foreign if rng.random() < 0.5 else [*records.values()])
    shared.create(commit_key(number), data)
    shared.make_durable(commit_key(number))
    storage.host.log(f"misplaces a record as version {number}")
    history.misplaced = number
    history.repairing = True
    try:
        await asyncio.sleep(rng.uniform(0, 5))
        if await _is_readable(storage, number):
            history.add_violation(f"version {number} is read, where a record was misplaced")
        log_id = Marker.decode(shared.objects[MARKER]).log_id
        report = await repair_store(storage, log_id, [number], [])
        assert report.version is not None
        history.repaired = Repaired({number: Record("misplaced", number - 1, 0.0, void=True)}, report.version)
    except TStoreError as error:
        history.add_violation(f"a misplaced record could not be voided: {type(error).__name__}: {error}")
    finally:
        history.repairing = False


async def _is_readable(storage: HostStorage, number: int) -> bool:
    store = await tstore.open(storage, "r")
    try:
        return (await store.verify()).ok or (await store.snapshot(number)).version == number
    except TStoreError:
        return False

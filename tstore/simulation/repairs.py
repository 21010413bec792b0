"""A repair beside the other work of a run, and what it changes in the history that the checker expects.

A repair voids one version of the run while others write, collect and copy; if later versions depend on it, it is
refused. Later versions may have taken over values that the voided one wrote: those of a chunk of which they wrote
another part. Everything else must be as if the voided version had never been.

In other runs somebody puts a record where the next one belongs, one of another version or of another store. Nobody
may take it for a version, until it is voided.
"""

from __future__ import annotations

import asyncio
import random

import tstore
from tstore.errors import InvalidArgument, TStoreError
from tstore.format.layout import MARKER, commit_key
from tstore.format.objects.encoding import decode
from tstore.format.objects.records import Record
from tstore.log.marker import Marker
from tstore.maintenance.repair import repair_store
from tstore.simulation.history import History, Repaired
from tstore.simulation.storage import HostStorage

__all__ = ["misplace_once", "repair_once"]

_TRIES = 4


async def repair_once(storage: HostStorage, history: History, rng: random.Random) -> None:
    """Void a version of the run, and those that a concurrent commit has based on it meanwhile.

    Try another version if others depend on the first, or if its record may be archived.
    """
    history.repairing = True
    try:
        for _ in range(_TRIES):
            newest = max(storage.storage.records())
            if newest <= history.start or await _void(storage, history, rng.randint(history.start + 1, newest)):
                return
    except TStoreError as error:
        history.add_violation(f"a repair failed: {type(error).__name__}: {error}")
    finally:
        history.repairing = False


async def _void(storage: HostStorage, history: History, version: int) -> bool:
    """Void a version and those that depend on it meanwhile; return False if it can't be voided."""
    wanted, voided = [version], dict[int, Record]()
    while wanted:
        records = storage.storage.records()
        former = {v: decode(records[v], Record) for v in wanted}
        try:
            log_id = Marker.decode(storage.storage.objects[MARKER]).log_id
            report = await repair_store(storage, log_id, [], wanted)
        except InvalidArgument as error:
            storage.host.log(f"repair: {error}")
            if voided:
                history.add_violation(f"what was damaged by a repair could not be voided: {error}")
            return bool(voided)
        storage.host.log(f"voids {wanted} by version {report.version}: {report}, restated {report.restated}")
        assert report.version is not None
        voided |= former
        history.repaired = Repaired(voided, report.version)
        wanted = [damage.version for damage in report.damaged if damage.version not in voided]
    return True


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

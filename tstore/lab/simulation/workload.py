"""The random work of a simulated host: transactions, checkpoints, rollbacks, reads, gc, copies and replication."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta

import tstore
from tstore.core.copying.copy import copy_to
from tstore.core.format.tree.retention import Keep
from tstore.core.steps import step_tag
from tstore.core.tags import remove_steps_after
from tstore.errors import (
    AlreadyExists,
    CommitOutcomeUnknown,
    Conflict,
    NotFound,
    SnapshotExpired,
    TStoreError,
    Unavailable,
)
from tstore.lab.simulation.client import Client, read_state
from tstore.lab.simulation.cooperation import METRIC, checkpoint, finish
from tstore.lab.simulation.edits import burst, transact
from tstore.lab.simulation.history import Attempt, CompletedGc, CopyVersion, Read, cells_of
from tstore.lab.simulation.storage import HostStorage, SharedObjects
from tstore.lab.simulation.zarr_edits import write_with_zarr

__all__ = ["run_workload"]

_RETENTION_RULES = (
    None,
    Keep(last=1),
    Keep(every=2),
    Keep(newer_than=timedelta(seconds=5)),
    Keep(tags=("best",)),
    Keep(best=(1, METRIC)),
    Keep(last=1, best=(2, METRIC, "max")),
    Keep(last=2, copies=1),
    Keep(last=1, copies=0),
)


async def _read(client: Client, fraction: float | None = None) -> None:
    """Read the newest version; with a fraction, an older version of the run: 0 is the oldest, 1 the newest."""
    began = client.loop.time()
    with client.expecting("read", Unavailable, SnapshotExpired):
        snapshot = await client.store.snapshot()
        if fraction is not None:
            low = max(client.history.start, 1)
            snapshot = await client.store.snapshot(low + int(fraction * (snapshot.version - low + 1)))
        await asyncio.sleep(client.random.expovariate(2))
        state = await read_state(snapshot)
        if client.history.traits.lagging and snapshot.version < client.history.start:
            return  # stale listings or sizes hid the versions of the run
        client.host.log(f"reads version {snapshot.version}")
        newest = fraction is None and not client.history.traits.lagging
        client.history.reads.append(Read(client.host.name, began, snapshot.version, state, newest=newest))


async def _restore(client: Client) -> None:
    """Restore the newest step."""
    with client.expecting("restore", Unavailable, SnapshotExpired):
        steps = await tstore.steps(client.store)
        if not steps:
            return
        try:
            tree = await tstore.restore(client.store, steps[-1])
        except NotFound as error:
            if "has no step" in str(error):  # the step was collected after a newer one was saved
                return
            raise
        state = {path: cells_of(path, values) for path, values in tree.items()}
        client.history.reads.append(Read(client.host.name, 0, None, state, tag=step_tag(steps[-1])))


async def _verify(client: Client) -> None:
    """Verify the store, which must be valid at any time, except for roots that the scenario damaged."""
    history, repairing, repaired = client.history, client.history.repairing, client.history.repaired
    with client.expecting("verify", Unavailable):
        for fault in (await client.store.verify()).faults:
            beside = repairing or history.repairing or repaired is not history.repaired
            # stale sizes make objects seem absent
            if "roots/" not in fault and not (history.traits.lagging or beside):
                history.add_violation(f"{client.host.name} verified: {fault}")


async def _collect(client: Client) -> None:
    """Collect garbage by a random rule; slow transactions may count as abandoned."""
    keep = client.random.choice(_RETENTION_RULES)
    abandoned = timedelta(seconds=client.random.choice((1, 10, 100)))
    with client.expecting("collect", Unavailable, CommitOutcomeUnknown):
        try:
            report = await client.store.collect(keep, abandoned=abandoned)
        except NotFound as error:
            if "Keep(" in str(error):  # no version has the tag or the metric
                return
            raise
        client.host.log(f"gc by {keep} is version {report.version}: removes {report.versions}, {report.abandoned}")
        if report.version is not None:
            client.acknowledge(report.version, "gc", durable=True)
            if keep is not None:
                client.history.gcs.append(CompletedGc(report.version, keep))


async def _quantize(client: Client) -> None:
    """Quantize a step or a copy; its values stay the same: integers, and floats that are powers of two."""
    number = client.history.new_value()
    # AlreadyExists: a create was repeated after its response was lost
    outcomes = (Unavailable, AlreadyExists, CommitOutcomeUnknown, Conflict, SnapshotExpired)
    with client.expecting("quantize", *outcomes):
        tags = await client.store.tags()
        sources = sorted(tag for tag in tags if tag.startswith(("step/", "quantized/")))
        if not sources:
            return
        source = tags[client.random.choice(sources)]
        message, tag = f"quantized copy {number}", f"quantized/{number}"
        attempt = Attempt(message, (tag,), 1)
        attempt.message = message
        attempt.ops[0] = [CopyVersion(source)]
        client.history.attempts_by_message[message] = attempt
        report = await tstore.quantize(client.store, "e4m3", at=source, tag=tag, message=message)
        client.host.log(f"quantized version {source} as version {report.version}")
        attempt.outcomes.append(report.version)
        client.acknowledge(report.version, message, durable=True)


async def _roll_back(client: Client) -> None:
    """Make an earlier step the newest, as a restarted job does."""
    with client.expecting("roll back", Unavailable, CommitOutcomeUnknown, NotFound, SnapshotExpired):
        steps = await tstore.steps(client.store)
        if len(steps) > 1:
            step = client.random.choice(steps[:-1])
            version = await remove_steps_after(client.store, step)
            client.host.log(f"rolls back to step {step} by version {version}")


async def _copy_to_mirror(client: Client, mirror: SharedObjects) -> None:
    """Copy the store, or update an older copy unless it has diverged."""
    stale = (TStoreError,) if client.host.rates.stale_heads else ()  # stale sizes make objects seem absent
    with client.expecting("copy", Unavailable, Conflict, AlreadyExists, *stale):
        report = await copy_to(client.store, HostStorage(mirror, client.host))
        client.host.log(f"copies up to version {report.version}")


async def _read_history(client: Client) -> None:
    """Record the transaction of each version in the log, because a version must never change its transaction."""
    with client.expecting("read the history", Unavailable):
        transactions = {c.version: c.transaction async for c in client.store.history()}
        for version, transaction in transactions.items():
            if version > client.history.start:
                client.history.reported.setdefault(transaction, []).append(version)


_OPERATIONS: dict[str, tuple[Callable[[Client], Awaitable[None]], float]] = {
    "transact": (transact, 0.46),
    "burst": (burst, 0.04),
    "read": (_read, 0.14),
    "collect": (_collect, 0.1),
    "read_older": (lambda client: _read(client, client.random.random()), 0.06),
    "checkpoint": (checkpoint, 0.08),
    "restore": (_restore, 0.05),
    "read_history": (_read_history, 0.03),
    "verify": (_verify, 0.01),
    "finish": (finish, 0.03),
    "quantize": (_quantize, 0.02),
    "roll_back": (_roll_back, 0),
    "write_with_zarr": (write_with_zarr, 0),
}
"""The operations, with their relative frequencies in the mix "all"; those with 0 occur only in `more`."""

_ALL = {name: weight for name, (_, weight) in _OPERATIONS.items()}
_MIXES: dict[str, Mapping[str, float]] = {
    "all": _ALL,
    "edits": {**_ALL, "burst": 0.3, "checkpoint": 0, "quantize": 0, "restore": 0},
    "checkpoints": {**_ALL, "transact": 0.05, "checkpoint": 0.4, "collect": 0.25},
    "archiving": {"transact": 0.6, "collect": 0.4},
    "collections": {"collect": 1},
    "upkeep": {**_ALL, "transact": 0.2, "collect": 0.2, "quantize": 0.1, "finish": 0.15, "checkpoint": 0.15},
}
"""The relative frequencies of the operations, by the workload mix of the run (`Scenario.mix`)."""


async def run_workload(
    client: Client, rounds: int, mix: str, mirror: SharedObjects | None, more: Mapping[str, float]
) -> None:
    """Run up to `rounds` random operations in each of 1 to 5 tasks; with a `mirror`, also copies to it.

    `more` has the frequencies of further operations.
    """
    operations = {name: operation for name, (operation, _) in _OPERATIONS.items()}
    weights = {**_MIXES[mix], **more}
    if mirror is not None:
        operations["copy"] = functools.partial(_copy_to_mirror, mirror=mirror)
        weights["copy"] = 0.1
    tasks = client.random.choice((1, 1, 2, 5))  # many tasks cause group commits

    async def run_task() -> None:
        for _ in range(min(rounds, 12 // tasks)):
            await asyncio.sleep(client.random.expovariate(2))
            await client.follow_repair()
            [name] = client.random.choices(list(weights), list(weights.values()))
            await operations[name](client)

    await asyncio.gather(*[run_task() for _ in range(tasks)])

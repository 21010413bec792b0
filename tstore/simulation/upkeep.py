"""Operations of simulated hosts on a whole store: reads, gc, quantized copies, replication, verification."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import tstore
from tstore.copying.copy import copy_to
from tstore.errors import (
    AlreadyExists,
    CommitOutcomeUnknown,
    Conflict,
    NotFound,
    SnapshotExpired,
    TStoreError,
    Unavailable,
)
from tstore.format.retention import Keep
from tstore.simulation.groups import METRIC
from tstore.simulation.history import Attempt, Collected, Copied, Read, cells_of
from tstore.simulation.site import Site, read_state
from tstore.simulation.storage import HostStorage, SharedObjects
from tstore.steps import step_tag

__all__ = ["collect", "copy_to_mirror", "count_history", "quantize", "read", "read_older", "restore", "verify"]

_RULES = (
    None,
    Keep(last=1),
    Keep(every=2),
    Keep(newer_than=timedelta(seconds=5)),
    Keep(tags=("best",)),
    Keep(best=(1, METRIC)),
    Keep(last=1, best=(2, METRIC, "max")),
)


async def read(site: Site) -> None:
    """Read the newest state."""
    await _read_version(site, None)


async def read_older(site: Site) -> None:
    """Read the state of an earlier version."""
    await _read_version(site, site.random.random())


async def _read_version(site: Site, part: float | None) -> None:
    after = site.loop.time()
    try:
        snapshot = await site.store.snapshot()
        if part is not None:
            low = max(site.history.start, 1)
            snapshot = await site.store.snapshot(low + int(part * (snapshot.version - low + 1)))
        await asyncio.sleep(site.random.expovariate(2))
        state = await read_state(snapshot)
    except (Unavailable, SnapshotExpired):
        return
    except TStoreError as error:
        site.fault("read", error)
        return
    if site.history.lagging and snapshot.version < site.history.start:
        return  # stale metadata hid the versions of the run
    site.host.tell(f"reads version {snapshot.version}")
    newest = part is None and not site.history.lagging
    site.history.reads.append(Read(site.host.name, after, snapshot.version, state, newest=newest))


async def restore(site: Site) -> None:
    """Restore the newest checkpoint, if there is one."""
    try:
        steps = await tstore.steps(site.store)
        if not steps:
            return
        tree = await tstore.restore(site.store, steps[-1])
    except Unavailable:
        return
    except NotFound as error:  # the step was collected after a newer one was saved
        if isinstance(error, SnapshotExpired) or "has no step" in str(error):
            return
        raise
    except TStoreError as error:
        site.fault("restore", error)
        return
    state = {path: cells_of(path, values) for path, values in tree.items()}
    site.history.reads.append(Read(site.host.name, 0, None, state, tag=step_tag(steps[-1])))


async def verify(site: Site) -> None:
    """Verify the whole store, which must be valid at any time, except for roots that the scenario damaged."""
    try:
        report = await site.store.verify()
    except Unavailable:
        return
    except TStoreError as error:
        site.fault("verify", error)
        return
    for fault in [] if site.history.lagging else report.faults:  # stale sizes make objects seem absent
        if "roots/" not in fault:
            site.history.note(f"{site.host.name} verified: {fault}")


async def collect(site: Site) -> None:
    """Collect garbage by a random rule; slow transactions may count as abandoned."""
    keep = site.random.choice(_RULES)
    abandoned = timedelta(seconds=site.random.choice((1, 10, 100)))
    try:
        report = await site.store.collect(keep, abandoned=abandoned)
    except (Unavailable, CommitOutcomeUnknown) as error:
        site.host.tell(f"gc: {type(error).__name__}")
    except NotFound as error:  # no version has the tag or the metric
        if "Keep(" not in str(error):
            site.fault("collect", error)
    except TStoreError as error:
        site.fault("collect", error)
    else:
        site.host.tell(
            f"gc by {keep} is version {report.version}: {report.versions} and {report.abandoned} are removed"
        )
        if report.version is not None:
            site.acknowledge(report.version, "gc", durable=True)
            if keep is not None:
                site.history.collected.append(Collected(report.version, keep))


async def quantize(site: Site) -> None:
    """Make a quantized copy of a step, whose values the format represents exactly."""
    number = site.history.value()
    try:
        tags = (await site.store.snapshot()).tags
        steps = sorted(tag for tag in tags if tag.startswith("step/"))
        if not steps:
            return
        source = tags[site.random.choice(steps)]
        message, tag = f"quantized copy {number}", f"quantized/{number}"
        attempt = Attempt(message, (tag,), 1)
        attempt.message = message
        attempt.ops[0] = [Copied(source)]
        site.history.unnamed[message] = attempt
        report = await tstore.quantize(site.store, "e4m3", at=source, tag=tag, message=message)
    except (Unavailable, CommitOutcomeUnknown, Conflict, SnapshotExpired) as error:
        site.host.tell(f"quantize: {type(error).__name__}")
    except TStoreError as error:
        site.fault("quantize", error)
    else:
        site.host.tell(f"quantized version {source} as version {report.version}")
        attempt.outcomes.append(report.version)
        site.acknowledge(report.version, message, durable=True)


async def copy_to_mirror(site: Site, mirror: SharedObjects) -> None:
    """Copy the store, or update an older copy, which fails if the copy has diverged."""
    try:
        report = await copy_to(site.store, HostStorage(mirror, site.host))
    except (Unavailable, Conflict, AlreadyExists) as error:
        site.host.tell(f"copy: {type(error).__name__}: {error}")
    except TStoreError as error:
        if not site.host.weather.blind:  # stale sizes make objects seem absent
            site.fault("copy", error)
    else:
        site.host.tell(f"copies up to version {report.version}")


async def count_history(site: Site) -> None:
    """Read every commit of the log, which must never change."""
    try:
        seen = {c.version: c.transaction async for c in site.store.history()}
    except Unavailable:
        return
    except TStoreError as error:
        site.fault("list", error)
        return
    for version, transaction in seen.items():
        if version > site.history.start:
            site.history.reported.setdefault(transaction, []).append(version)

"""Cooperative transactions of simulated hosts: checkpoints, and writes into shared arrays."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import numpy as np

import tstore
from tstore.checkpoint.shards import Shards
from tstore.errors import (
    CommitOutcomeUnknown,
    Conflict,
    DeadlineExceeded,
    Inconsistent,
    NotFound,
    TStoreError,
    Unavailable,
)
from tstore.simulation.edits import create, write
from tstore.simulation.history import CELLS, PER_CHUNK, Attempt, Create, Delete, Op, Put, Replace, width_of
from tstore.simulation.site import Site
from tstore.transactions.membership import Membership
from tstore.transactions.transaction import Transaction, staging_of

__all__ = ["METRIC", "GroupPlan", "checkpoint", "cooperate", "finish"]

METRIC = "loss"
_FROZEN = 1_000_000  # the value of an array that is the same in every second checkpoint, and so is stored once
_CHUNKS = CELLS // PER_CHUNK


class GroupPlan(NamedTuple):
    """A cooperative transaction that several hosts are to make: a checkpoint, or writes into shared arrays.

    `values[h]` is what host `h` writes; those in `deleting` delete an array; with `twice` one host runs twice.
    """

    name: str
    attempt: str
    hosts: int
    values: tuple[int, ...]
    step: int | None
    durable: bool = True
    deleting: tuple[int, ...] = ()
    twice: bool = False

    @property
    def transactions(self) -> tuple[str, ...]:
        """The ids of the transaction, and of its repetition where a gc took what a checkpoint re-used."""
        again = () if self.step is None else (f"{self.attempt}.anew",)
        return tuple(
            Membership.from_arguments(self.name, 0, self.hosts, a).transaction for a in (self.attempt, *again)
        )

    def part(self, host: int) -> str:
        """The key of a host's fragment; "" where another run of the host may just deliver it."""
        if self.twice:
            return ""
        return Membership.from_arguments(self.name, host, self.hosts, self.attempt).fragment_key(0, host)

    @property
    def loss(self) -> float:
        """The metric of a checkpoint."""
        return float(self.values[0] % 7)


async def cooperate(site: Site, plan: GroupPlan, host: int, timeout: float) -> None:
    """This host's part of a group's transaction."""
    attempt = site.history.begin(plan.transactions, (plan.name,), plan.hosts)
    attempt.durable = plan.durable
    await asyncio.sleep(site.random.expovariate(1))
    if plan.step is not None:
        attempt.message = f"saved {plan.values[0]}"
        attempt.metadata = {"metrics": {METRIC: plan.loss}}
        await site.end(None, attempt, host, _save(site, plan, attempt, host, timeout), plan.part(host))
        return
    attempt.message, attempt.metadata = "together", {"values": list(plan.values)}
    tx = site.store.transaction(
        attempt.message,
        plan.name,
        durability="fsync" if plan.durable else "none",
        name=plan.name,
        host=host,
        hosts=plan.hosts,
        attempt=plan.attempt,
        metadata=dict(attempt.metadata),
    )
    await site.end(tx, attempt, host, _share(tx, plan, attempt, host, timeout), plan.part(host))


async def checkpoint(site: Site) -> None:
    """A checkpoint of one of some steps, by two hosts that live and die together; one of them may be late."""
    step, values = site.random.randint(3, 15), (site.history.value(), site.history.value())
    plan = GroupPlan(f"step/{step}", f"at {values[0]}", 2, values, step, durable=site.random.random() > 0.1)
    late = site.random.choice((0, 0, 12))  # s, in which a gc may take what the other host re-uses

    async def member(host: int) -> None:
        await asyncio.sleep(host * late)
        await cooperate(site, plan, host, 40.0)

    await asyncio.gather(*[member(host) for host in range(2)])


async def finish(site: Site) -> None:
    """Commit a transaction of other hosts, if all of them have delivered."""
    try:
        under_way = await site.store.pending()
        if not under_way:
            return
        name = site.random.choice(under_way).transaction
        version = await site.store.finish(name)
    except (Unavailable, Conflict, Inconsistent, NotFound, CommitOutcomeUnknown, DeadlineExceeded) as error:
        site.host.tell(f"finish: {type(error).__name__}")
        return
    except TStoreError as error:
        site.fault("finish a group", error)
        return
    site.host.tell(f"finishes {name} as version {version}")
    attempt = site.history.attempts[name]
    attempt.outcomes.append(version)
    site.acknowledge(version, name, durable=attempt.durable)


async def _save(site: Site, plan: GroupPlan, attempt: Attempt, host: int, timeout: float) -> int:
    assert plan.step is not None
    for h, value in enumerate(plan.values):
        attempt.ops[h] = _saved_ops(plan, h, value)
    lines = CELLS // plan.hosts
    mine = slice(host * lines * width_of("w"), (host + 1) * lines * width_of("w"))
    part = np.full(lines * width_of("w"), plan.values[host], np.int64)
    tree = {
        "w": Shards((CELLS * width_of("w"),), "int64", [((mine,), part)]),
        "b": np.full(CELLS, plan.values[0], np.int64),
        "wfrozen": np.full(CELLS * width_of("w"), _frozen(plan), np.int64),
        "wscale": np.full(CELLS * width_of("w"), _scale(plan), np.float32),
    }
    options: dict[str, Any] = {"host": host, "hosts": plan.hosts, "attempt": plan.attempt}
    options |= {"durability": "fsync" if plan.durable else "none", "message": attempt.message}
    return await tstore.save(site.store, tree, plan.step, metrics={METRIC: plan.loss}, timeout=timeout, **options)


async def _share(tx: Transaction, plan: GroupPlan, attempt: Attempt, host: int, timeout: float) -> int:
    """Write one chunk of an array that is there, one of an array that the group makes, and perhaps delete one."""
    base = await staging_of(tx).base()
    attempt.bases[host] = min(base.version, attempt.bases.get(host, base.version))
    paths = await tx.paths()
    made = f"small/{plan.name}.{host // _CHUNKS}"
    start = PER_CHUNK * (host % _CHUNKS)
    ops: list[Op] = [Create(made), Put(made, start, start + PER_CHUNK, plan.values[host])]
    if host < _CHUNKS and "big/0" in paths:
        ops.append(Put("big/0", start, start + PER_CHUNK, plan.values[host]))
    gone = f"small/{host}"
    if host in plan.deleting and gone in paths:
        ops.append(Delete(gone))
    attempt.ops[host] = ops
    await create(tx, made, None)
    for op in ops:
        if isinstance(op, Put):
            await write(tx, op)
        elif isinstance(op, Delete):
            await tx.delete(op.path)
    return await tx.commit(timeout)


def _saved_ops(plan: GroupPlan, host: int, value: int) -> list[Op]:
    """What a host contributes to a checkpoint, as the model has it."""
    lines = CELLS // plan.hosts
    ops: list[Op] = [Replace(), *map(Create, ("w", "b", "wfrozen", "wscale"))]
    if host == 0:
        ops += [Put("b", 0, CELLS, value), Put("wfrozen", 0, CELLS, _frozen(plan))]
        ops.append(Put("wscale", 0, CELLS, _scale(plan)))
    return [*ops, Put("w", host * lines, (host + 1) * lines, value)]


def _frozen(plan: GroupPlan) -> int:
    assert plan.step is not None
    return _FROZEN + plan.step % 2


def _scale(plan: GroupPlan) -> int:
    """A value that every format of some bits holds exactly, so that a quantized copy equals its source."""
    assert plan.step is not None
    return 1 << plan.step % 4

"""Cooperative transactions of several simulated hosts: checkpoints, and writes to shared arrays."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import numpy as np

from tstore.checkpoint.leaves import Shards
from tstore.checkpoint.save import checkpoint_to_save
from tstore.core.transactions import attempts
from tstore.core.transactions.membership import Membership
from tstore.core.transactions.transaction import Transaction
from tstore.errors import CommitOutcomeUnknown, Conflict, Inconsistent, NotFound, Unavailable
from tstore.lab.simulation.client import Client
from tstore.lab.simulation.edits import create, write
from tstore.lab.simulation.history import CELLS, PER_CHUNK, Attempt, Clear, Create, Delete, Op, Put, width_of

__all__ = ["METRIC", "PlannedCommit", "checkpoint", "cooperate", "finish"]

METRIC = "loss"
_FROZEN = 1_000_000  # above all other values of a run; `_frozen` adds 0 or 1, so that later steps reuse chunks
_CHUNKS = CELLS // PER_CHUNK


class PlannedCommit(NamedTuple):
    """A planned cooperative transaction: the checkpoint of a `step`, or writes to shared arrays if `step` is None.

    Host `h` writes `values[h]`. The hosts in `deleting` also delete an array. If `twice`, one host runs twice. If
    `withdraws`, hosts that give up withdraw the checkpoint, as those of a `Checkpointer` do. If `again`, these are
    other hosts than those that have used the attempt first.
    """

    name: str
    attempt: str
    hosts: int
    values: tuple[int, ...]
    step: int | None
    durable: bool = True
    deleting: tuple[int, ...] = ()
    twice: bool = False
    withdraws: bool = False
    again: bool = False

    @property
    def transactions(self) -> tuple[str, ...]:
        """The transaction's id and, for a checkpoint, the id of its retry if a gc condemns referenced chunks."""
        return tuple(member.transaction for member in self._members(0))

    def _members(self, host: int) -> list[Membership]:
        retry = () if self.step is None else (str(attempts.Attempt(self.attempt, rewrites=True)),)
        return [Membership.from_arguments(self.name, host, self.hosts, a) for a in (self.attempt, *retry)]

    def fragment_keys(self, host: int) -> list[str]:
        """Return the keys that a host's fragment may have."""
        return [member.fragment_key(0, host) for member in self._members(host)]

    def fragment_key(self, host: int) -> str:
        """Return the key of a host's fragment; "" if the host runs twice, because the other run may write it."""
        return "" if self.twice else self.fragment_keys(host)[0]

    @property
    def message(self) -> str:
        """The message of a checkpoint."""
        return f"saved {self.values[0]}"

    @property
    def loss(self) -> float:
        """The metric of a checkpoint."""
        return float(self.values[0] % 7)


async def cooperate(client: Client, plan: PlannedCommit, host: int, timeout: float) -> None:
    """Run one host of a cooperative transaction."""
    attempt = client.history.begin(plan.transactions, (plan.name,), plan.hosts)
    if plan.again:
        attempt = client.history.begin_again(plan.message, attempt)
    attempt.durable = plan.durable
    if plan.twice:
        attempt.parts_of_two_runs[host] = plan.fragment_keys(host)
    await asyncio.sleep(client.random.expovariate(1))
    if plan.step is not None:
        attempt.message = plan.message
        attempt.metadata = {"metrics": {METRIC: plan.loss}}
        work = _save(client, plan, attempt, host, timeout)
        # a host that withdraws when it gives up does not rely on its fragment: others may have committed it
        fragment = "" if plan.withdraws else plan.fragment_key(host)
        await client.conclude(None, attempt, host, work, fragment)
        return
    attempt.message, attempt.metadata = "together", {"values": list(plan.values)}
    tx = client.store.transaction(
        attempt.message,
        plan.name,
        durability="fsync" if plan.durable else "none",
        name=plan.name,
        host=host,
        hosts=plan.hosts,
        attempt=plan.attempt,
        metadata=dict(attempt.metadata),
    )
    work = _write_shared(tx, plan, attempt, host, timeout)
    await client.conclude(tx, attempt, host, work, plan.fragment_key(host))


async def checkpoint(client: Client) -> None:
    """Save a checkpoint of a random step from two hosts in one process; the second host may be late."""
    step, values = client.random.randint(3, 15), (client.history.new_value(), client.history.new_value())
    durable, withdraws = client.random.random() > 0.1, client.random.random() < 0.5
    plan = PlannedCommit(f"step/{step}", f"at {values[0]}", 2, values, step, durable, withdraws=withdraws)
    timeout = client.random.choice((5.0, 40.0)) if withdraws else 40.0
    late = client.random.choice((0, 0, 12))  # in 12 s a gc may condemn chunks that the other host references

    async def member(host: int) -> None:
        await asyncio.sleep(host * late)
        await cooperate(client, plan, host, timeout)

    await asyncio.gather(*[member(host) for host in range(2)])


async def finish(client: Client) -> None:
    """Commit a cooperative transaction for its hosts, if all fragments are present."""
    with client.expecting("finish", Unavailable, Conflict, Inconsistent, NotFound, CommitOutcomeUnknown):
        pending = await client.store.pending()
        if not pending:
            return
        transaction = client.random.choice(pending).transaction
        version = await client.store.finish(transaction)
        client.host.log(f"finishes {transaction} as version {version}")
        [attempt] = client.history.committed_by(await client.store.log.reader.record(version))
        attempt.outcomes.append(version)
        client.acknowledge(version, transaction, durable=attempt.durable)


async def _save(client: Client, plan: PlannedCommit, attempt: Attempt, host: int, timeout: float) -> int:
    assert plan.step is not None
    for h, value in enumerate(plan.values):
        attempt.ops[h] = _saved_ops(plan, h, value)
    size = CELLS // plan.hosts * width_of("w")
    part = np.full(size, plan.values[host], np.int64)
    tree = {
        "w": Shards((CELLS * width_of("w"),), "int64", [((slice(host * size, (host + 1) * size),), part)]),
        "b": np.full(CELLS, plan.values[0], np.int64),
        "wfrozen": np.full(CELLS * width_of("w"), _frozen(plan), np.int64),
        "wscale": np.full(CELLS * width_of("w"), _scale(plan), np.float32),
    }
    checkpoint = await checkpoint_to_save(
        tree,
        plan.step,
        host=host,
        hosts=plan.hosts,
        attempt=plan.attempt,
        metrics={METRIC: plan.loss},
        message=attempt.message,
        durability="fsync" if plan.durable else "none",
        timeout=timeout,
    )
    return (await checkpoint._replace(withdraws=plan.withdraws).save(client.store)).version


async def _write_shared(tx: Transaction, plan: PlannedCommit, attempt: Attempt, host: int, timeout: float) -> int:
    """Write one chunk of an existing array and one of a new array, perhaps delete an array, and commit."""
    base = await tx.staging.base()
    attempt.bases[host] = min(base.version, attempt.bases.get(host, base.version))
    paths = await tx.paths()
    created = f"small/{plan.name}.{host // _CHUNKS}"
    start = PER_CHUNK * (host % _CHUNKS)
    ops: list[Op] = [Create(created), Put(created, start, start + PER_CHUNK, plan.values[host])]
    if host < _CHUNKS and "big/0" in paths:
        ops.append(Put("big/0", start, start + PER_CHUNK, plan.values[host]))
    if host in plan.deleting and (deleted := f"small/{host}") in paths:
        ops.append(Delete(deleted))
    attempt.ops[host] = ops
    await create(tx, created, None)
    for op in ops:
        if isinstance(op, Put):
            await write(tx, op)
        elif isinstance(op, Delete):
            await tx.delete(op.path)
    return await tx.commit(timeout)


def _saved_ops(plan: PlannedCommit, host: int, value: int) -> list[Op]:
    """Return the operations of one host of a checkpoint, for the model."""
    cells = CELLS // plan.hosts
    ops: list[Op] = [Clear(), *map(Create, ("w", "b", "wfrozen", "wscale"))]
    if host == 0:
        ops += [Put("b", 0, CELLS, value), Put("wfrozen", 0, CELLS, _frozen(plan))]
        ops.append(Put("wscale", 0, CELLS, _scale(plan)))
    return [*ops, Put("w", host * cells, (host + 1) * cells, value)]


def _frozen(plan: PlannedCommit) -> int:
    assert plan.step is not None
    return _FROZEN + plan.step % 2


def _scale(plan: PlannedCommit) -> int:
    """Return a value that every format represents exactly, so that a quantized copy equals its source."""
    assert plan.step is not None
    return 1 << plan.step % 4

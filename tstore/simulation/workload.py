"""The random work of a simulated host: transactions, cooperative transactions, checkpoints, reads and upkeep."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping

from tstore.simulation.edits import burst, transact
from tstore.simulation.groups import checkpoint, finish
from tstore.simulation.site import Site
from tstore.simulation.storage import SharedObjects
from tstore.simulation.upkeep import (
    collect,
    copy_to_mirror,
    count_history,
    quantize,
    read,
    read_older,
    restore,
    verify,
)

__all__ = ["MIXES", "live"]

_WORK: dict[str, Callable[[Site], Awaitable[None]]] = {
    "transact": transact,
    "burst": burst,
    "read": read,
    "collect": collect,
    "read_older": read_older,
    "checkpoint": checkpoint,
    "restore": restore,
    "count_history": count_history,
    "verify": verify,
    "finish": finish,
    "quantize": quantize,
}

_ALL = {
    "transact": 0.46,
    "burst": 0.04,
    "read": 0.14,
    "collect": 0.1,
    "read_older": 0.06,
    "checkpoint": 0.08,
    "restore": 0.05,
    "count_history": 0.03,
    "verify": 0.01,
    "finish": 0.03,
    "quantize": 0.02,
}
MIXES: dict[str, Mapping[str, float]] = {
    "all": _ALL,
    "edits": {**_ALL, "burst": 0.3, "checkpoint": 0, "quantize": 0, "restore": 0},
    "checkpoints": {**_ALL, "transact": 0.05, "checkpoint": 0.4, "collect": 0.25},
    "upkeep": {**_ALL, "transact": 0.2, "collect": 0.2, "quantize": 0.1, "finish": 0.15, "checkpoint": 0.15},
}
"""The weight of each operation, by the workload mix of the run."""


async def live(site: Site, rounds: int, mix: str, mirror: SharedObjects | None) -> None:
    """Run a host's work in one or several tasks that share the store; with a `mirror`, also copy to it."""
    work, chances = dict(_WORK), dict(MIXES[mix])
    if mirror is not None:
        work["copy"] = functools.partial(copy_to_mirror, mirror=mirror)
        chances["copy"] = 0.1
    tasks = site.random.choice((1, 1, 2, 5))  # many tasks cause group commits

    async def some() -> None:
        for _ in range(min(rounds, 12 // tasks)):
            await asyncio.sleep(site.random.expovariate(2))
            [name] = site.random.choices(list(chances), list(chances.values()))
            await work[name](site)

    await asyncio.gather(*[some() for _ in range(tasks)])

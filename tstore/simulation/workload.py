"""What the hosts of a simulation do: transactions, groups, checkpoints, reads and upkeep, chosen at random."""

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
    look_back,
    quantize,
    read,
    restore,
    verify,
)

__all__ = ["MOODS", "live"]

_WORK: dict[str, Callable[[Site], Awaitable[None]]] = {
    "transact": transact,
    "burst": burst,
    "read": read,
    "collect": collect,
    "look_back": look_back,
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
    "look_back": 0.06,
    "checkpoint": 0.08,
    "restore": 0.05,
    "count_history": 0.03,
    "verify": 0.01,
    "finish": 0.03,
    "quantize": 0.02,
}
MOODS: dict[str, Mapping[str, float]] = {
    "all": _ALL,
    "edits": {**_ALL, "burst": 0.3, "checkpoint": 0, "quantize": 0, "restore": 0},
    "checkpoints": {**_ALL, "transact": 0.05, "checkpoint": 0.4, "collect": 0.25},
    "upkeep": {**_ALL, "transact": 0.2, "collect": 0.2, "quantize": 0.1, "finish": 0.15, "checkpoint": 0.15},
}
"""How often each kind of work is done in runs of one mood."""


async def live(site: Site, rounds: int, mood: str, mirror: SharedObjects | None) -> None:
    """The work of a host, in one task or in several that share the store; with a mirror it copies to it too."""
    work, chances = dict(_WORK), dict(MOODS[mood])
    if mirror is not None:
        work["copy"] = functools.partial(copy_to_mirror, mirror=mirror)
        chances["copy"] = 0.1
    tasks = site.random.choice((1, 1, 2, 5))  # of which some commit together, where there are many

    async def some() -> None:
        for _ in range(min(rounds, 12 // tasks)):
            await asyncio.sleep(site.random.expovariate(2))
            [name] = site.random.choices(list(chances), list(chances.values()))
            await work[name](site)

    await asyncio.gather(*[some() for _ in range(tasks)])

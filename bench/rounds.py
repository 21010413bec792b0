"""Interleaved rounds: the order of contenders, their figures by piece of work, and why one has none."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench import machine
from bench.contender import Contender
from bench.cost import Cost
from bench.figures import Figures
from bench.processes import HostError

LIMIT = 240.0
"""Seconds of a piece of work after which a peer gets no more rounds of it."""

Results = dict[str, dict[str, Figures]]
"""The figures by piece of work and contender; the measures of most are the fields of `Cost`."""

T = TypeVar("T")


class Skipped(Exception):
    """A contender cannot do the work, or not within the limits."""


def rotated(items: Iterable[T], turn: int) -> list[T]:
    """Return the items in the order of a round: each begins one later than the round before."""
    order = list(items)
    by = turn % len(order) if order else 0
    return order[by:] + order[:by]


class Rounds:
    """The figures of contenders in a folder; `optional` ones run only if they are among the `peers`."""

    contenders: Mapping[str, type[Contender]] = {}
    """Which have titles; others are called by their names."""

    def __init__(
        self, folder: Path, log: Callable[[str], None], optional: Sequence[str] = (), peers: Sequence[str] = ()
    ) -> None:
        self.folder, self.log, self.optional, self.peers = folder, log, optional, peers
        self.results: Results = {}
        self.reserve = machine.Reserve()
        self._spent: defaultdict[tuple[str, str], float] = defaultdict(float)  # seconds by work and contender

    def names(self, contenders: Iterable[str], turn: int, work: str) -> list[str]:
        """Return the names in the order of a round, without those that failed at this work or are too slow."""
        names = [name for name in contenders if name not in self.optional or name in self.peers]
        slow = {name for name in self.optional if self._spent[work, name] > LIMIT}
        return [n for n in rotated(names, turn) if n not in slow and not self.figures(work, n).error]

    @contextlib.contextmanager
    def attempt(self, work: str, name: str) -> Iterator[None]:
        """Note why a contender cannot do a piece of work; the others go on."""
        self.log(f"{work}: {name}")
        start = time.monotonic()
        try:
            yield
        except (HostError, Skipped, RuntimeError) as error:
            absent = any(kind in str(error) for kind in ("ModuleNotFoundError", "ImportError"))
            kind = "absent" if absent else "skipped" if isinstance(error, Skipped) else "failed"
            self.figures(work, name).error = f"{kind}: {error}"
            self.log(f"{work}: {name} {kind}: {error}")
        self._spent[work, name] += time.monotonic() - start

    def figures(self, work: str, name: str) -> Figures:
        """Return the figures of a contender, which are empty at first."""
        title = self.contenders[name].title if name in self.contenders else name
        return self.results.setdefault(work, {}).setdefault(name, Figures(title))

    def add(self, work: str, name: str, turn: int, measures: Mapping[str, float] | Cost) -> None:
        """Add the measures of a round."""
        values: Mapping[str, Any] = measures._asdict() if isinstance(measures, Cost) else measures
        for measure, value in values.items():
            self.figures(work, name).add(measure, turn, value)

    def make_room(self, nbytes: int) -> None:
        """Provide free memory: see `machine.Reserve`."""
        self.reserve.acquire(nbytes)
        self.reserve.release()

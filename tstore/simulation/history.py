"""What the hosts of a simulation did and saw, and the trivial model that it is checked against.

A model state maps the path of each array to its cells, and each tag to its version. A cell is a stretch of equal
values, so that a few numbers stand for an array; every written value is used once, so that a state tells whose
writes it holds. Committed attempts, replayed in the order of the log, give the state of every version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy.typing as npt

from tstore.format.retention import Keep

__all__ = [
    "CELLS",
    "PER_CHUNK",
    "Attempt",
    "Collected",
    "Copied",
    "Create",
    "Delete",
    "History",
    "Look",
    "Op",
    "Put",
    "Read",
    "Replace",
    "Resize",
    "Seen",
    "State",
    "apply",
    "cells_of",
    "width_of",
]

CELLS = 12
"""Cells of every array, unless it is resized."""
PER_CHUNK = 4
"""Cells of one chunk."""
_WIDE, _NARROW = 160, 1

Cells = tuple[int, ...]
State = Mapping[str, Cells]


class Create(NamedTuple):
    """A new array of zeros."""

    path: str


class Put(NamedTuple):
    """Cells [start, stop) of an array become `value`."""

    path: str
    start: int
    stop: int
    value: int

    @property
    def whole(self) -> set[int]:
        """The numbers of the chunks that it covers wholly."""
        return set(range(-(-self.start // PER_CHUNK), self.stop // PER_CHUNK))

    @property
    def touched(self) -> set[int]:
        """The numbers of the chunks in which it writes."""
        return set(range(self.start // PER_CHUNK, -(-self.stop // PER_CHUNK)))


class Delete(NamedTuple):
    """An array goes."""

    path: str


class Resize(NamedTuple):
    """An array gets so many cells; what is cut off is gone, and new ones are zeros."""

    path: str
    cells: int


class Replace(NamedTuple):
    """Nothing stays of what was there."""


class Copied(NamedTuple):
    """Everything becomes as it was at an earlier version."""

    version: int


Op = Create | Put | Delete | Resize | Replace | Copied


def width_of(path: str) -> int:
    """The values in one cell of the array at a path: wide ones fill packs, narrow ones travel in records."""
    return _WIDE if path.startswith(("big", "w")) else _NARROW


def cells_of(path: str, values: npt.NDArray[Any]) -> Cells:
    """The cells of the values of the array at a path; a cell that is not all of one value becomes -1."""
    rows = values.reshape(-1, width_of(path))
    firsts = rows[:, 0].tolist()
    if rows.shape[1] == 1:
        return tuple(firsts)
    whole = (rows == rows[:, :1]).all(axis=1)
    return tuple(v if ok else -1 for v, ok in zip(firsts, whole.tolist(), strict=True))


def apply(state: State, ops: Iterable[Op], earlier: Mapping[int, State] | None = None) -> dict[str, Cells]:
    """The state after the operations, one after the other; `earlier` has those of the versions before."""
    arrays = dict(state)
    for op in ops:
        match op:
            case Create(path):
                arrays[path] = (0,) * CELLS
            case Put(path, start, stop, value):
                cells = arrays.get(path, (-1,) * CELLS)
                arrays[path] = (*cells[:start], *([value] * (stop - start)), *cells[stop:])
            case Delete(path):
                arrays.pop(path, None)
            case Resize(path, count):
                arrays[path] = (*arrays.get(path, ())[:count], *(0,) * (count - len(arrays.get(path, ()))))
            case Replace():
                arrays.clear()
            case Copied(version):
                arrays = dict((earlier or {}).get(version, {}))
    return arrays


class Seen(NamedTuple):
    """What a transaction saw after `own` operations: the cells of an array, or (no `path`) the paths of all."""

    own: tuple[Op, ...]
    path: str | None
    found: Cells | frozenset[str]


class Attempt:
    """One transaction: what its hosts did in it, and what each was told in the end.

    The outcomes are the versions and the errors that its hosts were told; who crashed was told nothing.
    `tags` name the version it becomes, of which `created` were free before; `dropped` name none any more.
    The history must tell its `message`, and among its metadata those of `metadata`.
    """

    def __init__(self, transaction: str, tags: tuple[str, ...], hosts: int) -> None:
        self.transaction = transaction
        self.transactions: tuple[str, ...] = (transaction,)
        self.tags = tags
        self.created: tuple[str, ...] = ()
        self.dropped: tuple[str, ...] = ()
        self.message = ""
        self.metadata: dict[str, Any] = {}
        self.durable = True
        self.serializable = False
        self.seen: list[Seen] = []
        self.hosts = hosts
        self.ops: dict[int, list[Op]] = {h: [] for h in range(hosts)}
        self.bases: dict[int, int] = {}
        self.outcomes: list[int | BaseException] = []
        self.given_up = False

    @property
    def all_ops(self) -> list[Op]:
        """What all hosts did; a replacement comes before the rest."""
        found = [op for ops in self.ops.values() for op in ops]
        created = list(dict.fromkeys(op for op in found if isinstance(op, Create | Replace)))
        if self.hosts == 1:
            return found
        return [*created, *(op for op in found if not isinstance(op, Create | Replace))]


class Read(NamedTuple):
    """What a host saw: the state of a version, with `own` operations of its transaction on top.

    `version` is None for a checkpoint that was restored by its tag `tag`. A state that is `partly` read lacks
    arrays. `after` is when the host began to look; what is told to be the `newest` must not be older than that.
    """

    host: str
    after: float
    version: int | None
    state: State
    tag: str | None = None
    own: tuple[Op, ...] = ()
    partly: bool = False
    newest: bool = False


class Look(NamedTuple):
    """The paths that a transaction found when it began; `after` is when it began to look."""

    host: str
    after: float
    base: int
    paths: frozenset[str]


class Collected(NamedTuple):
    """A gc that came to its end: the version it became, and the rule by which it collected."""

    version: int
    keep: Keep


class History:
    """Everything that was observed in one run."""

    def __init__(self) -> None:
        self.attempts: dict[str, Attempt] = {}
        self.reads: list[Read] = []
        self.acknowledged: list[tuple[float, int, str]] = []
        self.told: dict[str, list[int | None]] = {}
        self.collected: list[Collected] = []
        self.faults: list[str] = []
        self.looks: list[Look] = []
        self.start = 0  # the version from which the run began
        self.unnamed: dict[str, Attempt] = {}  # by their message, as their ids are not told
        self.lagging = False  # whether who looks for the newest version may find an older one
        self._values = 0

    def value(self) -> int:
        """A number that was never written before."""
        self._values += 1
        return self._values

    def skip_values(self) -> None:
        """Begin to count at numbers that no other history of the run comes to."""
        self._values = 500_000

    def note(self, what: str) -> None:
        """Note a promise that was broken."""
        self.faults.append(what)

    def begin(self, transactions: tuple[str, ...], tags: tuple[str, ...] = (), hosts: int = 1) -> Attempt:
        """The attempt of these ids, of which one may be committed; the hosts of a group share it."""
        found = self.attempts.get(transactions[0])
        if found is None:
            found = Attempt(transactions[0], tags, hosts)
            found.transactions = transactions
            self.attempts.update(dict.fromkeys(transactions, found))
        return found

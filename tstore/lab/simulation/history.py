"""The recorded actions and observations of simulated hosts, and the model to check them against.

A model state maps the path of each array to its cells. A cell is a run of equal values, so that a few numbers
represent an array. Every written value is unique, so that a state identifies the writes it contains. Replaying
committed attempts in the order of the log yields the state of every version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy.typing as npt

from tstore.core.format.objects.records import Record
from tstore.core.format.tree.retention import Keep

__all__ = [
    "CELLS",
    "PER_CHUNK",
    "ROLLBACK",
    "Append",
    "Attempt",
    "Cells",
    "Clear",
    "CompletedGc",
    "CopyVersion",
    "Create",
    "Delete",
    "History",
    "Listing",
    "Look",
    "Op",
    "Put",
    "Read",
    "Repaired",
    "Resize",
    "State",
    "Traits",
    "TransactionRead",
    "apply",
    "cells_of",
    "width_of",
]

CELLS = 12
"""The cells of every array before a resize."""
PER_CHUNK = 4
"""The cells per chunk."""
ROLLBACK = "remove the steps after "
"""The beginning of the message of a rollback, before the step."""
_WIDE, _NARROW = 160, 1  # values per cell

Cells = tuple[int, ...]
State = Mapping[str, Cells]


class Create(NamedTuple):
    """Create an array of zeros."""

    path: str


class Put(NamedTuple):
    """Set cells [start, stop) of an array to `value`."""

    path: str
    start: int
    stop: int
    value: int

    @property
    def whole_chunks(self) -> set[int]:
        """The numbers of the chunks that the cells cover entirely."""
        return set(range(-(-self.start // PER_CHUNK), self.stop // PER_CHUNK))

    @property
    def touched_chunks(self) -> set[int]:
        """The numbers of the chunks that the cells cover, entirely or in part."""
        return set(range(self.start // PER_CHUNK, -(-self.stop // PER_CHUNK)))


class Delete(NamedTuple):
    """Delete an array."""

    path: str


class Resize(NamedTuple):
    """Resize an array: cells cut off are lost, and new ones are zeros."""

    path: str
    cells: int


class Append(NamedTuple):
    """Append cells of `value` to an array."""

    path: str
    cells: int
    value: int


class Clear(NamedTuple):
    """Delete all arrays."""


class CopyVersion(NamedTuple):
    """Become a copy of an earlier version, which leaves the head unchanged."""

    version: int


Op = Create | Put | Delete | Resize | Append | Clear | CopyVersion


def width_of(path: str) -> int:
    """Return the number of values per cell: many for the names "big…" and "w…", whose chunks go to packs."""
    return _WIDE if path.startswith(("big", "w")) else _NARROW


def cells_of(path: str, values: npt.NDArray[Any]) -> Cells:
    """Return the cells of an array's values; a cell with different values is -1."""
    rows = values.reshape(-1, width_of(path))
    firsts = rows[:, 0].tolist()
    if rows.shape[1] == 1:
        return tuple(firsts)
    are_uniform = (rows == rows[:, :1]).all(axis=1)
    return tuple(v if uniform else -1 for v, uniform in zip(firsts, are_uniform.tolist(), strict=True))


def apply(state: State, ops: Iterable[Op], earlier: Mapping[int, State] | None = None) -> dict[str, Cells]:
    """Return the state after the operations; `earlier` has the states of earlier versions."""
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
            case Append(path, cells, value):
                arrays[path] = (*arrays.get(path, ()), *([value] * cells))
            case Clear():
                arrays.clear()
            case CopyVersion(version):
                arrays = dict((earlier or {}).get(version, {}))
    return arrays


class TransactionRead(NamedTuple):
    """A read of a transaction after its operations `own_ops`: an array, or all paths if `path` is None."""

    own_ops: tuple[Op, ...]
    path: str | None
    result: Cells | frozenset[str]


class Look(NamedTuple):
    """A lookup by a transaction that found nothing, after its operations `own_ops`.

    It was for chunks of an array, by number, or for the array itself if `chunks` is None.
    """

    own_ops: tuple[Op, ...]
    path: str
    chunks: frozenset[int] | None

    def agrees(self, state: State) -> bool:
        """Return whether these may be absent in a state: a chunk with values other than zeros exists."""
        cells = apply(state, self.own_ops).get(self.path)
        if cells is None or self.chunks is None:
            return cells is None or self.chunks is not None
        return not any(any(cells[n * PER_CHUNK : (n + 1) * PER_CHUNK]) for n in self.chunks)


class Attempt:
    """One transaction: the operations of its hosts, and its outcomes.

    The transaction may be committed under any of `ids`, the first of which is `transaction`. `outcomes` are the
    versions returned to its hosts and the errors raised in them; a crashed host has no outcome. The transaction
    drops `dropped_tags`. It sets `tags` (`created_tags` among them must not exist before) on its own version or on
    `target`. `message` and `metadata` are those of its commit.
    """

    def __init__(self, transaction: str, tags: tuple[str, ...], hosts: int) -> None:
        self.transaction = transaction
        self.ids: tuple[str, ...] = (transaction,)
        self.tags = tags
        self.created_tags: tuple[str, ...] = ()
        self.dropped_tags: tuple[str, ...] = ()
        self.target: int | None = None
        self.message = ""
        self.metadata: dict[str, Any] = {}
        self.durable = True
        self.serializable = False
        self.transaction_reads: list[TransactionRead] = []
        self.looks: list[Look] = []
        self.hosts = hosts
        self.ops: dict[int, list[Op]] = {h: [] for h in range(hosts)}  # by host
        self.bases: dict[int, int] = {}  # by host: the version on which it based its operations
        self.parts_of_two_runs: dict[
            int, list[str]
        ] = {}  # by host, if it may run twice: the keys of its fragments
        self.outcomes: list[int | BaseException] = []
        self.aborted = False

    @property
    def all_ops(self) -> list[Op]:
        """The operations of all hosts; with several hosts, those that clear or create come first, once each."""
        ops = [op for host_ops in self.ops.values() for op in host_ops]
        if self.hosts == 1:
            return ops
        first = dict.fromkeys(op for op in ops if isinstance(op, Create | Clear))
        return [*first, *(op for op in ops if not isinstance(op, Create | Clear))]


class Read(NamedTuple):
    """A read by a host: the `state` of a version with `own_ops` of the reader's transaction applied to it.

    `version` is None for a checkpoint restored by its `tag`. With `partial`, `state` does not have all arrays.
    `began` is the time when the read began. With `newest`, the host read the newest version, which must not be
    older than any version that was acknowledged before that time.
    """

    host: str
    began: float
    version: int | None
    state: State
    tag: str | None = None
    own_ops: tuple[Op, ...] = ()
    partial: bool = False
    newest: bool = False


class Listing(NamedTuple):
    """The paths that a transaction listed in version `base`; `began` is the time when the transaction began."""

    host: str
    began: float
    base: int
    paths: frozenset[str]


class CompletedGc(NamedTuple):
    """A completed gc: its version, and its retention rule."""

    version: int
    keep: Keep


class Repaired(NamedTuple):
    """A completed repair: the versions that it voided, with their former records, and its commit.

    The versions are in the order in which they became void: at different times if the repair crashed between them.
    """

    voided: dict[int, Record]
    version: int

    def rests(self, version: int) -> bool:
        """Return whether a version is one of those that may have been based on what was voided."""
        return min(self.voided) <= version < self.version

    def attempts(self, history: History) -> dict[int, list[Attempt]]:
        """Return the attempts that the voided versions had committed, by version."""
        return {version: history.committed_by(record) for version, record in self.voided.items()}


class Traits(NamedTuple):
    """Effects that only the interference of a run can cause."""

    lagging: bool
    """An older version may be returned as the newest."""
    compacting: bool
    """The references of short arrays may be compacted too, not only those of long ones."""
    wrong_roots: bool
    """Roots were damaged, or replaced by those of another store."""


class History:
    """Everything recorded in one run."""

    def __init__(self, start: int, traits: Traits) -> None:
        self.attempts: dict[str, Attempt] = {}
        self.reads: list[Read] = []
        self.acknowledged: list[tuple[float, int, str]] = []  # time, version and transaction
        self.reported: dict[str, list[int | None]] = {}  # by transaction: the versions that the store reported
        self.gcs: list[CompletedGc] = []
        self.violations: list[str] = []
        self.listings: list[Listing] = []
        self.looks: list[tuple[str, int, Look]] = []  # the host, its base, the lookup
        self.start = start  # the version from which the run began
        self.attempts_by_message: dict[str, Attempt] = {}  # those whose ids are not known, or were used before
        self.traits = traits
        self.repairing = False  # whether a repair is under way, during which versions may be damaged
        self.repaired: Repaired | None = None
        self.misplaced = 0  # the number where somebody put a record of another version
        self._values = 0

    def new_value(self) -> int:
        """Return a value that no array has yet."""
        self._values += 1
        return self._values

    def skip_values(self) -> None:
        """Continue with values above those of the run's other history, so that the two share none."""
        self._values = 500_000

    def add_violation(self, violation: str) -> None:
        """Record a broken promise."""
        self.violations.append(violation)

    def committed_by(self, record: Record) -> list[Attempt]:
        """Return the attempts that a record commits: several in a group commit, none if it is void."""
        if record.void:
            return []
        if record.message in self.attempts_by_message:
            return [self.attempts_by_message[record.message]]
        return [self.attempts[name] for name in record.transactions if name in self.attempts]

    def begin(self, ids: tuple[str, ...], tags: tuple[str, ...] = (), hosts: int = 1) -> Attempt:
        """Return the attempt with these transaction ids, of which at most one commits; all its hosts share it."""
        attempt = self.attempts.get(ids[0])
        if attempt is None:
            attempt = Attempt(ids[0], tags, hosts)
            attempt.ids = ids
            self.attempts.update(dict.fromkeys(ids, attempt))
        return attempt

    def begin_again(self, message: str, first: Attempt) -> Attempt:
        """Return the attempt whose hosts use the ids of an earlier one again; its commits have this message."""
        attempt = self.attempts_by_message.get(message)
        if attempt is None:
            attempt = Attempt(first.transaction, first.tags, first.hosts)
            attempt.ids = first.ids
            self.attempts_by_message[message] = attempt
        return attempt

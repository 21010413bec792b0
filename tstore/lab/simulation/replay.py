"""The states that the versions of a run must have: the log replayed on the model, even across a repair.

Voided versions have no effect after the repair, with one exception. A later version that was committed before the
repair, and wrote a part of a chunk, has the whole chunk as it was then; one that resized an array or
compacted its segments has all its chunks. So each version has an expected state, and the state that it had before
the repair, which is the source of the chunks that it or an earlier version took over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tstore.core.format.objects.records import Record
from tstore.lab.simulation.history import (
    PER_CHUNK,
    ROLLBACK,
    Append,
    Attempt,
    Cells,
    Clear,
    CopyVersion,
    Create,
    Delete,
    History,
    Op,
    Put,
    Resize,
    State,
    apply,
)

__all__ = ["CommittedVersion", "Expected", "Replay", "rolled_back_to", "show"]

RESTATED = "repair: the state of version "


class CommittedVersion(NamedTuple):
    """A version at the end of a run: its record, its state (None if it has expired), and its snapshot's tags."""

    record: Record
    state: State | None
    tags: Mapping[str, int]


class Expected(NamedTuple):
    """The expected state of a version, and the alternatives that a repair permits.

    `before` are its states at earlier times: before the repair, and between two of the versions that it voided. It
    may have their chunks `taken`, by path, and if these are all, their number of cells. If the version `existed`
    then, hosts may have seen these states. In a run `compacting` segments, a write takes over all chunks.
    """

    state: State
    before: tuple[State, ...]
    taken: Mapping[str, frozenset[int]]
    existed: bool = False
    compacting: bool = False

    def exactly(self, state: State) -> Expected:
        """Return the expectation of this state, and no other."""
        return self._replace(state=state, before=(state,) * len(self.before), taken={}, existed=False)

    def matches(self, actual: State) -> bool:
        """Return whether a version may have this state after the repair."""
        return actual.keys() == self.state.keys() and all(self._matches(path, actual[path]) for path in actual)

    def agrees(self, seen: State, own_ops: Sequence[Op], *, partial: bool) -> bool:
        """Return whether a host may have seen this, with its own operations; all arrays, unless `partial`."""

        def known(world: State) -> State:
            after = apply(world, own_ops)
            return {path: after.get(path, ()) for path in seen} if partial else after

        before = tuple(map(known, self.before))
        return self._replace(state=known(self.state), before=before).matches(seen) or (
            self.existed and seen in before
        )

    @property
    def worlds(self) -> tuple[State, ...]:
        """The states that a host may have seen, but for chunks taken over."""
        return (self.state, *self.before) if self.existed else (self.state,)

    def after(self, ops: Sequence[Op], states: Mapping[int, Expected], *, takes_over: bool) -> Expected:
        """Return the expectation of the next version; one before a repair `takes_over` chunks that it patches."""
        taken, whole = dict(self.taken), set[str]()
        extended: dict[str, int] = {}  # the first cell of the chunk in which an append begins, by path
        for op in ops:
            match op:
                case CopyVersion(version):
                    return states[version]._replace(existed=self.existed)
                case Clear():
                    taken.clear()
                case Create(path) | Delete(path):
                    taken.pop(path, None)
                case Put(path) | Append(path) | Resize(path) if takes_over:
                    end = len(self.state.get(path, ()))
                    chunks = op.touched_chunks if isinstance(op, Put) else {end // PER_CHUNK}
                    taken[path] = taken.get(path, frozenset()) | chunks
                    beside = [o for o in ops if getattr(o, "path", "") == path]
                    appends = any(isinstance(o, Append) for o in beside)  # with other changes, it is a resize
                    if self.compacting or isinstance(op, Resize) or (appends and len(beside) > 1):
                        whole.add(path)
                    elif appends:
                        first = min(end, len(self.before[0].get(path, ())))
                        extended[path] = first - first % PER_CHUNK
        state, before = apply(self.state, ops), tuple(apply(world, ops) for world in self.before)
        for path in whole & before[0].keys():
            taken[path] = frozenset(range(len(before[0][path])))
            if len(state.get(path, ())) != len(before[0][path]):  # the metadata is the former one too
                state[path] = before[0][path]
        for path, first in extended.items():
            if path in before[0] and len(state[path]) != len(before[0][path]):  # the same case
                state[path] = (*state[path][:first], *before[0][path][first:])
        return self._replace(state=state, before=before, taken=taken)

    def _matches(self, path: str, actual: Cells) -> bool:
        expected = self.state[path]
        if actual == expected:
            return True
        chunks = self.taken.get(path, frozenset())
        return len(actual) == len(expected) and all(
            cell == mine
            or (
                number // PER_CHUNK in chunks
                and any(world.get(path, ())[number : number + 1] == (cell,) for world in self.before)
            )
            for number, (cell, mine) in enumerate(zip(actual, expected, strict=True))
        )


class Replay:
    """The expected states and the tags of all versions of a run, and their faults (`violations`)."""

    def __init__(self, initial: CommittedVersion, log: Mapping[int, CommittedVersion], history: History) -> None:
        self._history = history
        self._repaired = history.repaired
        state = initial.state or {}
        worlds = 1 if history.repaired is None else len(history.repaired.voided)
        # the tags of the newest version that is not a copy
        self._head = Expected(state, (state,) * worlds, {}, compacting=history.traits.compacting)
        self._expired: set[int] = set()
        self.states = {history.start: self._head}
        self.tags: dict[int, Mapping[str, int]] = {history.start: initial.tags}
        self.violations: list[str] = []
        for version, commit in log.items():
            self._add(version, commit)

    def _add(self, version: int, commit: CommittedVersion) -> None:
        repaired, record = self._repaired, commit.record
        former = None if repaired is None else repaired.voided.get(version)
        existed = repaired is not None and repaired.rests(version)
        expected = self._head._replace(existed=existed)
        tags = dict(self.tags[version - 1])
        for attempt in self._history.committed_by(record):
            self.violations += _changed_since_read(version, expected, attempt)
            expected = expected.after(attempt.all_ops, self.states, takes_over=existed)
            self._set_tags(version, attempt, tags)
        if former is not None and repaired is not None:
            expected = self._at_first(expected, former, list(repaired.voided).index(version))
        if record.by_repair and record.replaces:
            expected = self._restated(record)
        self._check_rollback(version, record, tags)
        if record.collection is not None:
            self._expired = set(range(1, version)) - record.collection.versions
            tags = {t: v for t, v in tags.items() if v not in self._expired}
        if commit.state is not None:
            is_copy = bool(record.source) and existed and commit.state in expected.before  # made before the repair
            if not (is_copy or expected.matches(commit.state)):
                self.violations.append(
                    f"version {version} is {show(commit.state)}, expected {show(expected.state)}"
                )
            if commit.tags != tags:
                self.violations.append(f"version {version} has the tags {commit.tags}, expected {tags}")
            expected = expected._replace(state=commit.state, taken={})
        self.states[version], self.tags[version] = expected, tags
        if not record.source:
            self._head = self._head if former is not None and former.source else expected

    def _at_first(self, expected: Expected, former: Record, voided_before: int) -> Expected:
        """Return the expectation of a version voided after others: its record had changed the earlier states."""
        before = list(expected.before)
        for world in range(voided_before + 1):
            for attempt in self._history.committed_by(former):
                alone = expected.exactly(before[world])
                before[world] = alone.after(attempt.all_ops, self.states, takes_over=False).before[world]
        return expected._replace(before=tuple(before))

    def _set_tags(self, version: int, attempt: Attempt, tags: dict[str, int]) -> None:
        faults = [f"created the tag {t}, which exists" for t in attempt.created_tags if t in tags]
        faults += [f"dropped the missing tag {t}" for t in attempt.dropped_tags if t not in tags]
        if self._repaired is None and (
            attempt.serializable or not attempt.dropped_tags
        ):  # concurrent drops of one tag do not conflict
            self.violations += [f"version {version} {fault}" for fault in faults]
        for tag in attempt.dropped_tags:
            tags.pop(tag, None)
        tags.update(dict.fromkeys(attempt.tags, attempt.target or version))
        if attempt.target in self._expired:
            self.violations.append(f"version {version} tags version {attempt.target}, which had expired")

    def _check_rollback(self, version: int, record: Record, tags: dict[str, int]) -> None:
        """Drop the tags that a rollback, or a repair, drops."""
        if (step := rolled_back_to(record)) is not None:
            dropped, later = set(record.dropped), set(_later_steps(tags, step))
            if later - dropped or dropped != set(_later_steps(dropped, step)):
                self.violations.append(
                    f"version {version} rolls back to step {step}, but dropped {dropped} of {later}"
                )
        if step is not None or record.by_repair:
            for tag in record.dropped:
                tags.pop(tag, None)

    def _restated(self, record: Record) -> Expected:
        """Return the expectation of a version by which a repair commits an older state again."""
        number = record.message.removeprefix(RESTATED).partition(" ")[0]
        return self.states[int(number)]._replace(existed=False) if number.isdigit() else self._head.exactly({})


def _changed_since_read(version: int, expected: Expected, attempt: Attempt) -> Iterator[str]:
    """Yield a violation for each read of a serializable attempt whose result differs in the version before it."""
    for ops, path, result in attempt.transaction_reads if attempt.serializable else ():
        if path is None or isinstance(result, frozenset):
            same = any(result == frozenset(apply(world, ops)) for world in expected.worlds)
        else:
            same = expected.agrees({path: result}, ops, partial=True)
        if not same:
            yield f"version {version} is serializable, but {path or 'the paths'} changed after it read {result}"
    for look in attempt.looks if attempt.serializable else ():
        if not any(map(look.agrees, expected.worlds)):
            yield f"version {version} is serializable, but what it saw as absent exists: {look}"


def rolled_back_to(record: Record) -> int | None:
    """Return the step to which a commit rolls back, None if it does something else."""
    before, found, step = record.message.partition(ROLLBACK)
    return int(step) if found and not before and not record.void else None


def show(state: Mapping[str, object]) -> str:
    """Return a state as text."""
    return "{" + ", ".join(f"{path}: {cells}" for path, cells in sorted(state.items())) + "}"


def _later_steps(tags: Iterable[str], step: int) -> list[str]:
    return [tag for tag in tags if tag.startswith("step/") and int(tag[5:]) > step]

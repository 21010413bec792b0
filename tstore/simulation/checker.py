"""Whether the history of a simulation could have come from a store that keeps its promises.

    dense          versions are numbered from 1 without a gap, and no transaction is there twice
    acknowledged   a version that a host was told is that of its transaction
    nothing else   an attempt that was given up, or failed with anything but "the outcome is unknown", is not there
                   (a host of a group may fail where the others go on)
    whole          every version has the state that its attempts, replayed on the model, give: no part of an
                   attempt without the rest, no two attempts mixed, no update lost
    isolated       no two commits that ran at once wrote the same chunk, node or tag (but for parts of a chunk)
    serializable   what such a transaction read is the same in the version before the one it became
    readers        what was read is the state of the version that was read, and that was not older than what
                   anybody had been told before
    once           a step is saved by one attempt at most, unless it has expired in between
    collected      what a gc left alive is whole, and is just what its rule keeps (`retained`)
    told alike     `outcome` agrees with the log, and the history tells each transaction's message and metadata

The model is `tstore.simulation.history`; it knows nothing of chunks in packs, of records or of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tstore.errors import CommitOutcomeUnknown
from tstore.format.records import Record
from tstore.log.history import Commit
from tstore.simulation.history import (
    Attempt,
    Copied,
    Create,
    Delete,
    History,
    Look,
    Op,
    Put,
    Read,
    Replace,
    Resize,
    State,
    apply,
)
from tstore.simulation.retained import retention_faults

__all__ = ["Committed", "violations"]


class Committed(NamedTuple):
    """A version as it stands in the end: its record, and its state as a reader finds it, None once expired."""

    record: Record
    state: State | None
    tags: Mapping[str, int]


class _Touched(NamedTuple):
    whole: dict[str, set[int]]
    parts: dict[str, set[int]]
    fresh: set[str]
    deleted: set[str]
    replaces: bool

    @staticmethod
    def by(ops: Iterable[Op]) -> _Touched:
        touched = _Touched({}, {}, set(), set(), any(isinstance(op, Replace | Copied) for op in ops))
        for op in ops:
            match op:
                case Create(path):
                    touched.fresh.add(path)
                case Resize(path):
                    touched.fresh.add(path)
                case Delete(path):
                    touched.deleted.add(path)
                    touched.fresh.discard(path)
                    touched.whole.pop(path, None)
                    touched.parts.pop(path, None)
                case Put(path):
                    touched.whole.setdefault(path, set()).update(op.whole)
                    touched.parts.setdefault(path, set()).update(op.touched - op.whole)
        return touched

    def nodes(self) -> set[str]:
        return self.fresh | self.whole.keys() | self.parts.keys()

    def meets(self, newer: _Touched, *, patched: bool) -> str | None:
        """What this commit should have been refused for, as `newer` came before it; `patched`: parts may meet."""
        if self.replaces:
            return None
        if newer.replaces:
            return "the whole tree" if self.nodes() | self.deleted else None
        nodes = (self.nodes() & (newer.fresh | newer.deleted)) | (newer.nodes() & (self.fresh | self.deleted))
        if nodes:
            return f"the nodes {sorted(nodes)}"
        for path in self.nodes() & newer.nodes():
            theirs = newer.whole.get(path, set()) | newer.parts.get(path, set())
            whole, parts = self.whole.get(path, set()), self.parts.get(path, set())
            both = (whole if patched else whole | parts) & theirs
            if both:
                return f"the chunks {sorted(both)} of {path}"
        return None


def violations(
    first: Committed, log: Mapping[int, Committed], told: Sequence[Commit], history: History
) -> list[str]:
    """One sentence for each promise that was broken; `first` is the version from which the run began.

    `log` holds every version above it, in order, `told` what the history tells of them.
    """
    found = list(history.faults)
    by_transaction = _committed(log, history, found)
    states, tags = _replayed(first, log, history, found)
    attempts = {version: _attempts(commit, history) for version, commit in log.items()}
    found += retention_faults(log, attempts, tags, history)
    _check_history(told, history, found)
    _check_told(by_transaction, history, found)
    _check_isolation(log, history, found)
    _check_steps(log, found)
    for read in history.reads:
        _check_read(read, states, tags, history.acknowledged, found)
    known = [] if history.lagging else history.acknowledged  # else an older version may be seen as the newest
    for look in history.looks:
        _check_look(look, states, known, found)
    return found


def _committed(log: Mapping[int, Committed], history: History, found: list[str]) -> dict[str, int]:
    by_transaction: dict[str, int] = {}
    for version, commit in log.items():
        if commit.record.void:
            continue
        for name in commit.record.transactions:
            if name in by_transaction:
                found.append(f"transaction {name} is version {by_transaction[name]} and again version {version}")
            ours = name in history.attempts or commit.record.message in history.unnamed
            if not ours and commit.record.collection is None:
                found.append(f"version {version} is of transaction {name}, which nobody began")
            by_transaction.setdefault(name, version)
    return by_transaction


def _attempts(commit: Committed, history: History) -> list[Attempt]:
    """The attempts that became a version: one as a rule, or several that were committed together."""
    if commit.record.message in history.unnamed:
        return [history.unnamed[commit.record.message]]
    names = () if commit.record.void else commit.record.transactions
    return [history.attempts[name] for name in names if name in history.attempts]


def _replayed(
    first: Committed, log: Mapping[int, Committed], history: History, found: list[str]
) -> tuple[dict[int, State], dict[int, Mapping[str, int]]]:
    start = history.start
    states: dict[int, State] = {start: first.state or {}}
    tags: dict[int, Mapping[str, int]] = {start: first.tags}
    for version, commit in log.items():
        state, names = states[version - 1], dict(tags[version - 1])
        for attempt in _attempts(commit, history):
            found += _changed_since_read(version, state, attempt)
            wrong = [f"created the tag {t}, which was there" for t in attempt.created if t in names]
            wrong += [f"dropped the tag {t}, which was not there" for t in attempt.dropped if t not in names]
            if attempt.serializable or not attempt.dropped:  # two may drop one tag at once
                found += [f"version {version} {what}" for what in wrong]
            state = apply(state, attempt.all_ops, states)
            names = {t: v for t, v in names.items() if t not in attempt.dropped}
            names.update(dict.fromkeys(attempt.tags, version))
        if commit.record.collection is not None:
            gone = commit.record.collection.expired
            names = {tag: named for tag, named in names.items() if named not in gone}
        if commit.state is not None and commit.state != state:
            found.append(f"version {version} is {_short(commit.state)}, and should be {_short(state)}")
        if commit.state is not None and commit.tags != names:
            found.append(f"version {version} has the tags {commit.tags}, and should have {names}")
        states[version], tags[version] = state, names
    return states, tags


def _changed_since_read(version: int, before: State, attempt: Attempt) -> list[str]:
    """What a serializable attempt read and would not have read had it begun just before its commit."""
    if not attempt.serializable:
        return []
    changed = []
    for own, path, found in attempt.seen:
        view = apply(before, own)
        if found != (frozenset(view) if path is None else view.get(path)):
            changed.append(f"version {version} is serializable, and read {path or 'the paths'} as {found} before")
    return changed


def _check_told(by_transaction: Mapping[str, int], history: History, found: list[str]) -> None:
    for name, attempt in history.attempts.items():
        version = next((by_transaction[t] for t in attempt.transactions if t in by_transaction), None)
        if attempt.given_up and version is not None:
            found.append(f"{name} was given up, and is version {version}")
        for outcome in attempt.outcomes:
            if isinstance(outcome, int) and outcome != version:
                found.append(f"{name} was acknowledged as version {outcome}, and is {version} in the log")
            failed = isinstance(outcome, BaseException) and not isinstance(outcome, CommitOutcomeUnknown)
            if failed and attempt.hosts == 1 and version is not None:
                found.append(f"{name} failed with {type(outcome).__name__}, and is version {version}: {outcome}")
        for told in history.told.get(name, ()):
            if told != by_transaction.get(name):
                found.append(f"the outcome of {name} was told as {told}, and is {by_transaction.get(name)}")


def _check_history(told: Sequence[Commit], history: History, found: list[str]) -> None:
    for commit in told:
        attempt = history.attempts.get(commit.transaction)
        if attempt is None:
            continue
        metadata = {key: commit.metadata.get(key) for key in attempt.metadata}
        if (commit.message, metadata) != (attempt.message, attempt.metadata):
            found.append(
                f"the history tells of {commit.transaction} {commit.message!r} with {metadata}, "
                f"and it was {attempt.message!r} with {attempt.metadata}"
            )


def _check_isolation(log: Mapping[int, Committed], history: History, found: list[str]) -> None:
    touched: dict[int, list[tuple[Attempt, _Touched]]] = {}
    for version, commit in log.items():
        touched[version] = []
        for attempt in _attempts(commit, history):
            mine = _Touched.by(attempt.all_ops)
            base = min(attempt.bases.values(), default=version - 1)
            for newer in range(base + 1, version + 1):
                for other, theirs in touched.get(newer, ()):
                    both = mine.meets(theirs, patched=attempt.hosts == 1 and newer < version)
                    if set(attempt.tags) & {*other.tags, *other.dropped} or set(attempt.dropped) & set(other.tags):
                        both = f"the tags {(*attempt.tags, *attempt.dropped)}"
                    if both:
                        found.append(f"version {version}, based on {base}, and {newer} both changed {both}")
            touched[version].append((attempt, mine))


def _check_steps(log: Mapping[int, Committed], found: list[str]) -> None:
    saved: set[str] = set()
    for commit in log.values():
        if commit.record.collection is not None:
            saved -= commit.record.collection.tags.keys()  # a step that has expired may be saved again
        steps = [tag for tag in commit.record.tags if tag.startswith("step/")]
        found += [f"{tag} was saved twice" for tag in steps if tag in saved]
        saved.update(steps)


def _check_read(
    read: Read,
    states: Mapping[int, State],
    tags: Mapping[int, Mapping[str, int]],
    acknowledged: Sequence[tuple[float, int, str]],
    found: list[str],
) -> None:
    version = read.version
    if read.tag is not None:  # a step that was saved again after it had expired has been several versions
        named = sorted({names[read.tag] for names in tags.values() if read.tag in names})
        version = next((v for v in named if states.get(v) == read.state), named[-1] if named else None)
    if version is None or version not in states:
        found.append(f"{read.host} read version {version} (tag {read.tag}), which is not there")
        return
    expected = apply(states[version], read.own)
    seen = {p: expected.get(p) for p in read.state} if read.partly else expected
    if read.state != seen:
        found.append(
            f"{read.host} read {_short(read.state)} at version {version} (with {list(read.own)} of its own), "
            f"which is {_short(expected)}"
        )
    if read.newest:
        _check_newest(read.host, version, read.after, acknowledged, found)


def _check_look(
    look: Look, states: Mapping[int, State], acknowledged: Sequence[tuple[float, int, str]], found: list[str]
) -> None:
    if look.paths != states.get(look.base, {}).keys():
        found.append(f"{look.host} found the paths {sorted(look.paths)} at version {look.base}")
    _check_newest(look.host, look.base, look.after, acknowledged, found)


def _check_newest(
    host: str, version: int, after: float, acknowledged: Sequence[tuple[float, int, str]], found: list[str]
) -> None:
    known = max((v for time, v, _ in acknowledged if time <= after), default=0)
    if version < known:
        found.append(f"{host} saw version {version} as the newest, though {known} was acknowledged before")


def _short(state: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{path}: {cells}" for path, cells in sorted(state.items())) + "}"

"""Checks that a correct store could have produced the history of a simulation.

    unique         no transaction is committed twice (`tstore.simulation.judge` checks that no version is missing)
    acknowledged   the version acknowledged to a host is the version of its transaction
    failed         an attempt that was aborted, or failed with any error but `CommitOutcomeUnknown`, is not
                   committed (though one host of a cooperative transaction may fail while the others succeed)
    withdrawn      a cooperative transaction that one of its hosts has withdrawn is not committed (checked by
                   `tstore.simulation.judge`)
    atomic         every version has the state that replaying its attempts on the model yields: none is applied
                   in part, no two are mixed, no update is lost, and no copy is in the head
    isolated       no two concurrent commits wrote the same chunk, node or tag (except that a write of a part of a
                   chunk, and an append, are re-applied to the newer version)
    serializable   the values that a serializable transaction read are unchanged in the version before its own
    readers        a read returns the state of its version; a read of the newest version never misses a version
                   that was acknowledged before the read began
    once           at most one attempt saves a step, unless the step has expired in between
    collected      the versions that a gc leaves alive are complete, and exactly those that its rule keeps
    rolled back    a rollback drops the tags of all later steps; no commit saves a step after it that one of its
                   hosts had delivered before it (checked by `tstore.simulation.judge`)
    tagged         a version is alive when a commit tags it, and a gc based on a version before that commit does
                   not expire it
    in place       no host reads a record that was put at the number of another
    consistent     `Store.outcome` agrees with the log, and `Store.history` with the message and metadata of each
                   transaction

The model is in `tstore.simulation.history`; it has no packs, records or requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tstore.errors import CommitOutcomeUnknown, DeadlineExceeded, Inconsistent
from tstore.format.objects.records import Record
from tstore.format.tree.retention import Keep
from tstore.log.history import Commit
from tstore.simulation.history import (
    ROLLBACK,
    Attempt,
    History,
    Listing,
    Op,
    Put,
    Read,
    Repaired,
    State,
    apply,
)
from tstore.simulation.repairs import agrees
from tstore.simulation.write_sets import WriteSet

__all__ = ["CommittedVersion", "find_violations", "rolled_back_to", "versions_to_keep"]

Acknowledged = Sequence[tuple[float, int, str]]
"""The time, version and transaction of each acknowledged commit."""


class CommittedVersion(NamedTuple):
    """A version at the end of a run: its record, its state (None if it has expired), and its snapshot's tags."""

    record: Record
    state: State | None
    tags: Mapping[str, int]


def find_violations(
    initial: CommittedVersion, log: Mapping[int, CommittedVersion], commits: Sequence[Commit], history: History
) -> list[str]:
    """Return one sentence for each broken promise.

    `initial` is the version from which the run began, `log` has every later version in order, and `commits` are
    what `Store.history` returns for the later versions.
    """
    violations = list(history.violations)
    by_transaction = _versions_by_transaction(log, history, violations)
    states, tags = _replay(initial, log, history, violations)
    if history.repaired is None:  # it also decides what expires
        violations += _check_retention(log, tags, history)
    else:
        violations += _check_bases(log, history, history.repaired)
    violations += _check_descriptions(commits, history)
    violations += _check_outcomes(by_transaction, history)
    violations += _check_isolation(log, states, history)
    violations += _check_steps(log)
    # a version that was voided may have been a copy too
    copies = {version for version, commit in log.items() if commit.record.source or commit.record.was_voided}
    of_heads = [(time, version, name) for time, version, name in history.acknowledged if version not in copies]
    for read in history.reads:
        violations += _check_read(read, states, tags, of_heads, history)
    acknowledged = [] if history.lagging else of_heads
    for host, head, look in history.looks:
        if not (history.repaired is not None and history.repaired.rests(head)) and head in states:
            violations += [] if look.agrees(states[head]) else [f"{host} saw nothing in version {head}: {look}"]
    for listing in history.listings:
        if history.repaired is not None and history.repaired.rests(listing.base):
            continue
        violations += _check_listing(listing, states, acknowledged)
    return violations


def _versions_by_transaction(
    log: Mapping[int, CommittedVersion], history: History, violations: list[str]
) -> dict[str, int]:
    """Return the version of each transaction.

    Append to `violations` if a transaction has two versions, or was begun by no host.
    """
    by_transaction: dict[str, int] = {}
    for version, commit in log.items():
        if commit.record.void:
            continue
        for name in commit.record.transactions:
            if name in by_transaction:
                violations.append(f"transaction {name} is both version {by_transaction[name]} and {version}")
            is_known = name in history.attempts or commit.record.message in history.attempts_by_message
            is_known = is_known or rolled_back_to(commit.record) is not None
            if not is_known and commit.record.collection is None and not commit.record.by_repair:
                violations.append(f"version {version} commits transaction {name}, which no host began")
            by_transaction.setdefault(name, version)
    return by_transaction


def _attempts(commit: CommittedVersion, history: History) -> list[Attempt]:
    """Return the attempts that a version commits: one, several (a group commit), or none (void records, gcs)."""
    if commit.record.message in history.attempts_by_message:
        return [history.attempts_by_message[commit.record.message]]
    names = () if commit.record.void else commit.record.transactions
    return [history.attempts[name] for name in names if name in history.attempts]


def _replay(
    initial: CommittedVersion, log: Mapping[int, CommittedVersion], history: History, violations: list[str]
) -> tuple[dict[int, State], dict[int, Mapping[str, int]]]:
    """Replay all versions on the model; return the state and tags of each, and append to `violations`."""
    start = history.start
    head = initial.state or {}  # the state of the newest version that is not a copy
    states: dict[int, State] = {start: head}
    tags: dict[int, Mapping[str, int]] = {start: initial.tags}
    expired: set[int] = set()
    repaired = history.repaired
    voided = set() if repaired is None else repaired.values(history)
    reshaped = set() if repaired is None else repaired.reshaped(history)
    for version, commit in log.items():
        state, current_tags = head, dict(tags[version - 1])
        rests = repaired is not None and repaired.rests(version)
        for attempt in _attempts(commit, history):
            if not rests:
                violations += _changed_since_read(version, state, attempt)
            faults = [f"created the tag {t}, which exists" for t in attempt.created_tags if t in current_tags]
            faults += [f"dropped the missing tag {t}" for t in attempt.dropped_tags if t not in current_tags]
            if repaired is None and (
                attempt.serializable or not attempt.dropped_tags
            ):  # concurrent drops of one tag do not conflict
                violations += [f"version {version} {fault}" for fault in faults]
            state = apply(state, attempt.all_ops, states)
            current_tags = {t: v for t, v in current_tags.items() if t not in attempt.dropped_tags}
            current_tags.update(dict.fromkeys(attempt.tags, attempt.target or version))
            if attempt.target in expired:
                violations.append(f"version {version} tags version {attempt.target}, which had expired")
        if (step := rolled_back_to(commit.record)) is not None:
            dropped, later = set(commit.record.dropped), set(_later_steps(current_tags, step))
            if later - dropped or dropped != set(_later_steps(dropped, step)):
                violations.append(f"version {version} rolls back to step {step}, but dropped {dropped} of {later}")
            current_tags = {t: v for t, v in current_tags.items() if t not in dropped}
        if commit.record.collection is not None:
            expired.update(commit.record.collection.expired)
            current_tags = {t: v for t, v in current_tags.items() if v not in expired}
        restates = commit.record.by_repair and commit.record.replaces  # an older state, or none
        if repaired is not None and (restates or any(map(repaired.copies, _attempts(commit, history)))):
            state = dict(commit.state or {})
        remains = reshaped if rests else set()
        if commit.state is not None and not agrees(commit.state, state, voided, remains):
            violations.append(f"version {version} is {_format(commit.state)}, expected {_format(state)}")
        if commit.state is not None and repaired is not None:
            state, current_tags = dict(commit.state), dict(commit.tags)
        if commit.state is not None and commit.tags != current_tags:
            violations.append(f"version {version} has the tags {commit.tags}, expected {current_tags}")
        states[version], tags[version] = state, current_tags
        head = head if commit.record.source else state
    return states, tags


def _changed_since_read(version: int, before: State, attempt: Attempt) -> Iterator[str]:
    """Yield a violation for each read of a serializable attempt whose result differs in `before`.

    `before` is the state to which the attempt was applied.
    """
    for ops, path, result in attempt.transaction_reads if attempt.serializable else ():
        view = apply(before, ops)
        if result != (frozenset(view) if path is None else view.get(path)):
            yield f"version {version} is serializable, but {path or 'the paths'} changed after it read {result}"
    for look in attempt.looks if attempt.serializable else ():
        if not look.agrees(before):
            yield f"version {version} is serializable, but what it saw as absent exists: {look}"


def rolled_back_to(record: Record) -> int | None:
    """Return the step to which a commit rolls back, None if it does something else."""
    before, found, step = record.message.partition(ROLLBACK)
    return int(step) if found and not before and not record.void else None


def _later_steps(tags: Iterable[str], step: int) -> list[str]:
    return [tag for tag in tags if tag.startswith("step/") and int(tag[5:]) > step]


def _check_bases(log: Mapping[int, CommittedVersion], history: History, repaired: Repaired) -> Iterator[str]:
    """Check that nothing was committed after the repair that may depend on what it voided, or be that."""
    for version, commit in log.items():
        for attempt in _attempts(commit, history) if version > repaired.version else ():
            if any(map(repaired.rests, attempt.bases.values())):
                yield f"version {version} is based on {attempt.bases}, but {repaired.voided.keys()} were voided"
            if attempt in repaired.attempts(history):
                yield f"version {version} commits {attempt.transaction} again, which was voided"


def _check_outcomes(by_transaction: Mapping[str, int], history: History) -> Iterator[str]:
    voided = [] if history.repaired is None else history.repaired.attempts(history)
    for name, attempt in history.attempts.items():
        if attempt in voided:
            continue
        version = next((by_transaction[t] for t in attempt.ids if t in by_transaction), None)
        if attempt.aborted and version is not None:
            yield f"{name} was aborted, but is version {version}"
        for outcome in attempt.outcomes:
            if isinstance(outcome, int) and outcome != version:
                yield f"{name} was acknowledged as version {outcome}, but is {version} in the log"
            undecided: tuple[type[BaseException], ...] = (CommitOutcomeUnknown,)
            if attempt.hosts > 1:  # others may commit after the deadline of one, or of another start of it
                undecided += (DeadlineExceeded, Inconsistent)
            failed = isinstance(outcome, BaseException) and not isinstance(outcome, undecided)
            if failed and version is not None:
                yield f"{name} failed, but is version {version}: {type(outcome).__name__}: {outcome}"
        for reported in history.reported.get(name, ()):
            if reported != (actual := by_transaction.get(name)):
                yield f"the outcome of {name} was reported as {reported}, but is {actual}"


def _check_descriptions(commits: Sequence[Commit], history: History) -> Iterator[str]:
    for commit in commits:
        attempt = history.attempts.get(commit.transaction)
        if attempt is None:
            continue
        metadata = {key: commit.metadata.get(key) for key in attempt.metadata}
        if (commit.message, metadata) != (attempt.message, attempt.metadata):
            yield (
                f"the history has {commit.transaction} as {commit.message!r} with {metadata}, "
                f"expected {attempt.message!r} with {attempt.metadata}"
            )


def _check_isolation(
    log: Mapping[int, CommittedVersion], states: Mapping[int, State], history: History
) -> Iterator[str]:
    write_sets: dict[int, list[tuple[Attempt, WriteSet]]] = {}
    for version, commit in log.items():
        write_sets[version] = []
        for attempt in _attempts(commit, history):
            base = min(attempt.bases.values(), default=version - 1)
            mine = WriteSet.from_ops(_changing(attempt.all_ops, states.get(base, {})))
            tags, dropped = set(attempt.tags), set(attempt.dropped_tags)
            for newer in range(base + 1, version + 1):
                for other, theirs in write_sets.get(newer, ()):
                    # within a group commit (newer == version), no write is re-applied
                    conflict = mine.conflict(theirs, reapplied=attempt.hosts == 1 and newer < version)
                    if tags & {*other.tags, *other.dropped_tags} or dropped & set(other.tags):
                        conflict = f"the tags {(*attempt.tags, *attempt.dropped_tags)}"
                    if conflict:
                        yield f"version {version}, based on {base}, and {newer} both changed {conflict}"
            write_sets[version].append((attempt, mine))


def _changing(ops: Sequence[Op], state: State) -> Iterator[Op]:
    """Yield the operations without writes of the values that are there: two of these do not conflict."""
    for op in ops:
        after = apply(state, [op])
        if after != state or not isinstance(op, Put):
            yield op
        state = after


def _check_steps(log: Mapping[int, CommittedVersion]) -> Iterator[str]:
    saved: set[str] = set()
    for commit in log.values():
        if commit.record.collection is not None:
            saved -= commit.record.collection.tags.keys()  # an expired step may be saved again
        saved -= set(commit.record.dropped)
        steps = [tag for tag in commit.record.tags if tag.startswith("step/")]
        yield from (f"{tag} was saved twice" for tag in steps if tag in saved)
        saved.update(steps)


def versions_to_keep(
    keep: Keep,
    alive: set[int],
    tags: Mapping[str, int],
    metrics: Mapping[int, Mapping[str, float]],
    sources: Mapping[int, int],
) -> set[int]:
    """Return the living versions that a rule without `newer_than` keeps, including the head and the newest step.

    `sources` has the version from which each copy was made.
    """
    steps = {int(tag[5:]): v for tag, v in tags.items() if tag.startswith("step/") and v in alive}
    order = sorted(steps)
    result = {max(alive - sources.keys()), *(steps[s] for s in order[-1:])}
    if keep.last is not None:
        result |= {steps[s] for s in order[-keep.last :]}
    if keep.every is not None:
        result |= {steps[s] for s in order if s % keep.every == 0}
    if keep.best is not None:
        count, name, *direction = keep.best
        sign = -1 if direction == ["max"] else 1
        rated = {v: metrics[v][name] for v in steps.values() if name in metrics.get(v, {})}
        result |= set(sorted(rated, key=lambda v: (sign * rated[v], -v))[:count])
    result |= {v for tag in keep.tags if (v := tags.get(tag, 0)) in alive}
    for version in sorted(alive):  # its copies come after it
        copies = sorted(v for v in alive if sources.get(v) == version)
        if version in result:
            result |= set(copies if keep.copies is None else copies[::-1][: keep.copies])
    return result


def _check_retention(
    log: Mapping[int, CommittedVersion], tags: Mapping[int, Mapping[str, int]], history: History
) -> Iterator[str]:
    """Check that each gc expired exactly the versions that its rule does not keep."""
    rules = {gc.version: gc.keep for gc in history.gcs}
    alive_as_of = {history.start: set(range(1, history.start + 1))}
    metrics: dict[int, Mapping[str, float]] = {}
    sources = {version: commit.record.source for version, commit in log.items() if commit.record.source}
    for version, commit in log.items():
        alive = set(alive_as_of[version - 1])
        collection = commit.record.collection
        if collection is None:
            alive |= set() if commit.record.void else {version}
            attempts = _attempts(commit, history)
            metrics[version] = {k: v for a in attempts for k, v in a.metadata.get("metrics", {}).items()}
        else:
            alive -= set(collection.expired)
            keep, base = rules.get(version), commit.record.base
            newer = [a for v in range(base + 1, version) if v in log for a in _attempts(log[v], history)]
            for target in set(collection.expired).intersection(a.target for a in newer if a.target is not None):
                yield f"version {version}, based on {base}, expired version {target}, which had been tagged since"
            if keep is not None and keep.newer_than is None and base >= history.start:
                kept = versions_to_keep(keep, alive_as_of[base], tags[base], metrics, sources)
                expired, expected = sorted(set(collection.expired)), sorted(alive_as_of[base] - kept)
                if expired != expected:
                    yield f"version {version} expired {expired} by {keep}, expected {expected}"
        alive_as_of[version] = alive


def _check_read(
    read: Read,
    states: Mapping[int, State],
    tags: Mapping[int, Mapping[str, int]],
    acknowledged: Acknowledged,
    history: History,
) -> Iterator[str]:
    version, repaired = read.version, history.repaired
    if version and version == history.misplaced and not read.partial and read.state != states.get(version):
        yield f"{read.host} read version {version}, a misplaced record"
    if repaired is not None and (read.tag is not None or repaired.rests(read.version or 0)):
        return  # it may have been read before the repair
    if read.tag is not None:  # a step saved again after it expired has several versions
        tagged = sorted({names[read.tag] for names in tags.values() if read.tag in names})
        version = next((v for v in tagged if states.get(v) == read.state), tagged[-1] if tagged else None)
    if version is None or version not in states:
        yield f"{read.host} read version {version} (tag {read.tag}), which does not exist"
        return
    expected = apply(states[version], read.own_ops)
    expected_part = {p: expected.get(p, ()) for p in read.state} if read.partial else expected
    voided = set() if repaired is None else repaired.values(history)
    if not agrees(read.state, expected_part, voided):
        yield (
            f"{read.host} read {_format(read.state)} at version {version} (with {list(read.own_ops)}), "
            f"expected {_format(expected)}"
        )
    if read.newest:
        yield from _check_newest(read.host, version, read.began, acknowledged)


def _check_listing(listing: Listing, states: Mapping[int, State], acknowledged: Acknowledged) -> Iterator[str]:
    if listing.paths != states.get(listing.base, {}).keys():
        yield f"{listing.host} listed the paths {sorted(listing.paths)} at version {listing.base}"
    yield from _check_newest(listing.host, listing.base, listing.began, acknowledged)


def _check_newest(host: str, version: int, began: float, acknowledged: Acknowledged) -> Iterator[str]:
    newest = max((v for time, v, _ in acknowledged if time <= began), default=0)
    if version < newest:
        yield f"{host} saw version {version} as the newest, though {newest} was acknowledged before"


def _format(state: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{path}: {cells}" for path, cells in sorted(state.items())) + "}"

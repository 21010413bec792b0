"""Checks that a correct store could have produced the history of a simulation.

    unique         no attempt is committed twice (`judge` checks that no version is missing)
    acknowledged   the version acknowledged to a host is the version of its transaction
    failed         an attempt that was aborted, or failed with any error but `CommitOutcomeUnknown`, is not
                   committed (though one host of a cooperative transaction may fail while the others succeed)
    withdrawn      a cooperative transaction that one of its hosts has withdrawn is not committed (checked by
                   `tstore.lab.simulation.judge`)
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
                   hosts had delivered before it (checked by `tstore.lab.simulation.judge`)
    tagged         a version is alive when a commit tags it, and a gc based on a version before that commit does
                   not expire it
    in place       no host reads a record that was stored under the number of another
    consistent     `Store.outcome` agrees with the log, and `Store.history` with the message and metadata of each
                   transaction

The model is in `tstore.lab.simulation.history`; it has no packs, records or requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tstore.core.format.tree.retention import Keep
from tstore.core.log.history import Commit
from tstore.errors import CommitOutcomeUnknown, Conflict, DeadlineExceeded, Inconsistent, TimelineChanged
from tstore.lab.simulation.history import Attempt, History, Listing, Op, Put, Read, Repaired, State, apply
from tstore.lab.simulation.replay import CommittedVersion, Expected, Replay, rolled_back_to, show
from tstore.lab.simulation.write_sets import WriteSet

__all__ = ["find_violations", "versions_to_keep"]

Acknowledged = Sequence[tuple[float, int, str]]
"""The time, version and transaction of each acknowledged commit."""


def find_violations(
    initial: CommittedVersion, log: Mapping[int, CommittedVersion], commits: Sequence[Commit], history: History
) -> list[str]:
    """Return one sentence for each broken promise.

    `initial` is the version from which the run began, `log` has every later version in order, and `commits` are
    what `Store.history` returns for the later versions.
    """
    violations = list(history.violations)
    by_attempt = _versions_by_attempt(log, history, violations)
    replay = Replay(initial, log, history)
    states, tags = replay.states, replay.tags
    violations += replay.violations
    violations += _check_retention(log, tags, history)
    if history.repaired is not None:
        violations += _check_bases(log, history, history.repaired)
    violations += _check_descriptions(commits, history)
    violations += _check_outcomes(by_attempt, log, history)
    violations += _check_isolation(log, states, history)
    violations += _check_steps(log, history)
    # a version that was voided may have been a copy too
    copies = {version for version, commit in log.items() if commit.record.source or commit.record.was_voided}
    of_heads = [(time, version, name) for time, version, name in history.acknowledged if version not in copies]
    for read in history.reads:
        violations += _check_read(read, states, tags, of_heads, history)
    acknowledged = [] if history.traits.lagging else of_heads
    for host, head, look in history.looks:
        if head in states and not any(map(look.agrees, states[head].worlds)):
            violations.append(f"{host} saw nothing in version {head}: {look}")
    for listing in history.listings:
        violations += _check_listing(listing, states, acknowledged)
    return violations


def _versions_by_attempt(
    log: Mapping[int, CommittedVersion], history: History, violations: list[str]
) -> dict[Attempt, int]:
    """Return the version of each attempt.

    Append to `violations` if an attempt has two versions, or a transaction was begun by no host.
    """
    by_attempt: dict[Attempt, int] = {}
    for version, commit in log.items():
        if commit.record.void:
            continue
        for attempt in history.committed_by(commit.record):
            if (first := by_attempt.setdefault(attempt, version)) != version:
                violations.append(f"transaction {attempt.transaction} is both version {first} and {version}")
        for name in commit.record.transactions:
            is_known = name in history.attempts or commit.record.message in history.attempts_by_message
            is_known = is_known or rolled_back_to(commit.record) is not None
            if not is_known and commit.record.collection is None and not commit.record.by_repair:
                violations.append(f"version {version} commits transaction {name}, which no host began")
    return by_attempt


def _check_bases(log: Mapping[int, CommittedVersion], history: History, repaired: Repaired) -> Iterator[str]:
    """Check that no commit after the repair depends on the voided versions, or is one of them."""
    for version, commit in log.items():
        for attempt in history.committed_by(commit.record) if version > repaired.version else ():
            if any(map(repaired.rests, attempt.bases.values())):
                yield f"version {version} is based on {attempt.bases}, but {repaired.voided.keys()} were voided"
            if any(attempt in attempts for attempts in repaired.attempts(history).values()):
                yield f"version {version} commits {attempt.transaction} again, which was voided"


def _check_outcomes(
    by_attempt: Mapping[Attempt, int], log: Mapping[int, CommittedVersion], history: History
) -> Iterator[str]:
    voided = {} if history.repaired is None else history.repaired.attempts(history)
    was = {attempt: version for version, attempts in voided.items() for attempt in attempts}
    for attempt in dict.fromkeys((*history.attempts.values(), *history.attempts_by_message.values())):
        name, version = attempt.transaction, by_attempt.get(attempt, was.get(attempt))
        if attempt.aborted and version is not None:
            yield f"{name} was aborted, but is version {version}"
        for outcome in attempt.outcomes:
            if isinstance(outcome, int) and outcome != version:
                yield f"{name} was acknowledged as version {outcome}, but is {version} in the log"
            undecided: tuple[type[BaseException], ...] = (CommitOutcomeUnknown,)
            if attempt.hosts > 1:  # others may commit after the deadline of one, or of another start of it
                undecided += (DeadlineExceeded, Inconsistent)
            if attempt in was:
                undecided += (Conflict, TimelineChanged)
            failed = isinstance(outcome, BaseException) and not isinstance(outcome, undecided)
            # a host that runs again gets the version of its step, which may be damaged, or removed since
            if failed and version is not None and f"as version {version}," not in str(outcome):
                yield f"{name} failed, but is version {version}: {type(outcome).__name__}: {outcome}"
    for name, attempt in history.attempts.items():
        versions: list[int | None] = [v for v, commit in log.items() if commit.record.commits(name)]
        for reported in history.reported.get(name, ()):
            if reported not in (versions or [None]) and reported != was.get(attempt):
                yield f"the outcome of {name} was reported as {reported}, but is {versions or None}"


def _check_descriptions(commits: Sequence[Commit], history: History) -> Iterator[str]:
    for commit in commits:
        attempt = history.attempts_by_message.get(commit.message, history.attempts.get(commit.transaction))
        if attempt is None:
            continue
        metadata = {key: commit.metadata.get(key) for key in attempt.metadata}
        if (commit.message, metadata) != (attempt.message, attempt.metadata):
            yield (
                f"the history has {commit.transaction} as {commit.message!r} with {metadata}, "
                f"expected {attempt.message!r} with {attempt.metadata}"
            )


def _check_isolation(
    log: Mapping[int, CommittedVersion], states: Mapping[int, Expected], history: History
) -> Iterator[str]:
    write_sets: dict[int, list[tuple[Attempt, WriteSet]]] = {}
    for version, commit in log.items():
        write_sets[version] = []
        for attempt in history.committed_by(commit.record):
            base = min(attempt.bases.values(), default=version - 1)
            state = states[base].state if base in states else {}
            mine = WriteSet.from_ops(_changing(attempt.all_ops, state))
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
    """Yield the operations except writes of existing values, since two of these do not conflict."""
    for op in ops:
        after = apply(state, [op])
        if after != state or not isinstance(op, Put):
            yield op
        state = after


def _check_steps(log: Mapping[int, CommittedVersion], history: History) -> Iterator[str]:
    saved: set[str] = set()
    voided = {} if history.repaired is None else history.repaired.voided
    for version, commit in log.items():
        for record in (commit.record, voided.get(version, commit.record)):
            if record.collection is not None:
                saved -= record.collection.tags.keys()  # an expired step may be saved again
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
    """Check that each gc below the voided versions expired exactly the versions that its rule does not keep."""
    end = max(log, default=0) + 1 if history.repaired is None else min(history.repaired.voided)
    rules = {gc.version: gc.keep for gc in history.gcs}
    alive_as_of = {history.start: set(range(1, history.start + 1))}
    metrics: dict[int, Mapping[str, float]] = {}
    sources = {version: commit.record.source for version, commit in log.items() if commit.record.source}
    for version, commit in log.items():
        if version >= end:
            return
        alive = set(alive_as_of[version - 1])
        collection = commit.record.collection
        if collection is None:
            alive |= set() if commit.record.void else {version}
            attempts = history.committed_by(commit.record)
            metrics[version] = {k: v for a in attempts for k, v in a.metadata.get("metrics", {}).items()}
        else:
            alive -= set(collection.expired)
            keep, base = rules.get(version), commit.record.base
            newer = [a for v in range(base + 1, version) if v in log for a in history.committed_by(log[v].record)]
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
    states: Mapping[int, Expected],
    tags: Mapping[int, Mapping[str, int]],
    acknowledged: Acknowledged,
    history: History,
) -> Iterator[str]:
    if read.tag is None:
        versions = {version for version in states if version == read.version}
    else:  # a step saved again after it expired, or was voided, has several versions
        versions = {names[read.tag] for names in tags.values() if read.tag in names} & states.keys()
        voided = {} if history.repaired is None else history.repaired.attempts(history)
        versions |= {v for v, attempts in voided.items() if any(read.tag in a.tags for a in attempts)}
    if not versions:
        yield f"{read.host} read version {read.version} (tag {read.tag}), which does not exist"
    elif not any(states[v].agrees(read.state, read.own_ops, partial=read.partial) for v in versions):
        expected = show(apply(states[max(versions)].state, read.own_ops))
        yield (
            f"{read.host} read {show(read.state)} at version {max(versions)} (tag {read.tag}, with "
            f"{list(read.own_ops)}), expected {expected}"
        )
    elif read.newest:
        yield from _check_newest(read.host, max(versions), read.began, acknowledged)


def _check_listing(listing: Listing, states: Mapping[int, Expected], acknowledged: Acknowledged) -> Iterator[str]:
    worlds = states[listing.base].worlds if listing.base in states else ({},)
    if listing.paths not in [world.keys() for world in worlds]:
        yield f"{listing.host} listed the paths {sorted(listing.paths)} at version {listing.base}"
    yield from _check_newest(listing.host, listing.base, listing.began, acknowledged)


def _check_newest(host: str, version: int, began: float, acknowledged: Acknowledged) -> Iterator[str]:
    newest = max((v for time, v, _ in acknowledged if time <= began), default=0)
    if version < newest:
        yield f"{host} saw version {version} as the newest, though {newest} was acknowledged before"

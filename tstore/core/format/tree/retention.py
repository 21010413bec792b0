"""Retention: which versions to keep, and what a garbage collection may condemn; pure, no I/O.

1. A collection reads the `Ledger` of living versions in the last collection's record and adds the records since.
2. It keeps the versions that `Keep` selects.
3. A commit compares itself with the collections above its base (`refuse_condemned`).
4. A server accepts only a collection that follows from the ledger (`check_collection`).

Only roots and the objects of transactions are ever deleted, even if a record lists other objects: every deletion
is filtered by `layout.is_collectable`.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from exmy.user_warnings import Place, users_place, warn
from msgspec.structs import replace

from tstore.core.format.arguments import checked_duration, quote, step_number
from tstore.core.format.layout import is_transaction_object, owner_of
from tstore.core.format.objects.records import Collection, LivingVersion, Record
from tstore.core.format.tree.tree import Tree
from tstore.errors import Conflict, Corrupt, InvalidArgument, NotFound, SnapshotExpired, SourceCondemned

__all__ = [
    "ABANDONED_AFTER",
    "Best",
    "Condemned",
    "Keep",
    "Ledger",
    "check_collection",
    "checked_keep",
    "packs_of",
    "refuse_condemned",
    "step_of",
]

ABANDONED_AFTER = datetime.timedelta(days=7)
"""The default time without a write after which a garbage collection considers a transaction abandoned."""

Best = tuple[int, str] | tuple[int, str, Literal["min", "max"]]


@dataclass(frozen=True)
class Keep:
    """Which versions to keep: those that match any rule, and always the head and the highest step.

    `last`: this number of the highest steps. `every`: the steps that are multiples of this number. `best`: this
    number of steps with the lowest value of a metric, `(3, "loss")`, or the highest, `(3, "accuracy", "max")`.
    `newer_than`: the versions younger than this, by the clocks of their writers and of this host; add another rule
    if any of these clocks may be wrong. `tags`: the versions that these tags name.
    A copy, such as a quantized checkpoint, is kept with the version of which it was made. `copies`: this number of
    the newest copies of each kept version, by default all; other copies are kept only if they match a rule.
    Raise `InvalidArgument` for an invalid rule, or without any rule.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> for step in range(5):
    ...     _ = tstore.save("memory://of-keep", {"w": np.full(4, step)}, step)
    >>> report = tstore.open("memory://of-keep").collect(tstore.Keep(last=1, every=2))
    >>> tstore.steps("memory://of-keep")
    [0, 2, 4]
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None
    newer_than: datetime.timedelta | None = None
    tags: tuple[str, ...] = ()
    copies: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 1), ("copies", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InvalidArgument(f"Keep({name}={quote(value)}): expected an integer of at least {least}")
        match self.best:
            case None:
                pass
            case (int(count), str(metric)) | (int(count), str(metric), "min" | "max") if count > 0 and metric:
                pass
            case _:
                raise InvalidArgument(
                    f"Keep(best={quote(self.best)}): expected a tuple such as (3, 'loss') or (3, 'loss', 'max')"
                )
        if self.newer_than is not None:
            checked_duration("Keep: newer_than", self.newer_than)
        if not isinstance(self.tags, tuple | list) or not all(isinstance(tag, str) for tag in self.tags):
            raise InvalidArgument(f"Keep(tags={quote(self.tags)}): expected a tuple of tags, such as ('best',)")
        rules = (self.last, self.every, self.best, self.newer_than)
        if all(rule is None for rule in rules) and not self.tags:
            raise InvalidArgument("Keep() has no rule; to keep the newest step only, pass Keep(last=1)")

    def select(self, alive: Mapping[int, LivingVersion], now: float) -> set[int]:
        """Return which of the living versions to keep; a rule without candidates selects none."""
        tags = ((tag, version) for version, entry in alive.items() for tag in entry.tags)
        # no dict by step: a writer could choose steps whose hashes collide
        steps = sorted((step, version) for tag, version in tags if (step := step_number(tag)) is not None)
        versions = {max((version for version, entry in alive.items() if not entry.source), default=0)} - {0}
        versions |= {version for _, version in steps[-(self.last or 1) :]}  # at least the highest step
        if self.every is not None:
            versions |= {version for step, version in steps if step % self.every == 0}
        if self.best is not None:
            versions |= _best(self.best, [alive[version] for _, version in steps])
        if self.newer_than is not None:
            oldest = now - self.newer_than.total_seconds()
            versions |= {version for version, entry in alive.items() if entry.time > oldest}
        named = set(self.tags)
        versions |= {version for version, entry in alive.items() if not named.isdisjoint(entry.tags)}
        return versions | self._copies_of(versions, alive)

    def _copies_of(self, versions: Set[int], alive: Mapping[int, LivingVersion]) -> set[int]:
        """Return the copies of these versions that are kept with them, and the copies of these copies."""
        copies: dict[int, list[int]] = {}  # by source, the newest first
        for version in sorted(alive, reverse=True):
            copies.setdefault(alive[version].source, []).append(version)
        kept = set(versions)
        for source in sorted(copies):  # a copy comes after its source, which may be a copy too
            if source in kept:
                kept.update(copies[source][: self.copies])
        return kept

    def check(self, alive: Mapping[int, LivingVersion]) -> None:
        """Raise `NotFound` for a tag that no living version has, or a metric that no step has: a misspelt name."""
        if missing := self._missing(alive):
            raise NotFound(f"{missing}; nothing was collected")

    def _missing(self, alive: Mapping[int, LivingVersion]) -> str:
        """Say which tag or metric is missing; "" if there are candidates for every rule."""
        steps = [entry for entry in alive.values() if step_of(entry.tags) is not None]
        metrics = {name for entry in steps for name in entry.metrics}
        if self.best is not None and steps and self.best[1] not in metrics:
            known = ", ".join(sorted(metrics)) or "none"
            return f"Keep(best=…): no step has the metric {self.best[1]!r}; the metrics are: {known}"
        tags = {tag for entry in alive.values() for tag in entry.tags}
        missing = next((tag for tag in self.tags if tag not in tags), None)
        return "" if missing is None else f"Keep(tags=…): no living version has the tag {missing!r}"


@dataclass(frozen=True)
class JobKeep(Keep):
    """The rules of a running job: a missing tag or metric may come later, so there is one warning and no error."""

    warned: list[str] = field(default_factory=list, repr=False, compare=False)
    place: Place = field(default_factory=users_place, repr=False, compare=False)

    def check(self, alive: Mapping[int, LivingVersion]) -> None:
        """Warn of a missing tag or metric, unless there was a warning already."""
        if not self.warned and (missing := self._missing(alive)):
            self.warned.append(missing)
            with contextlib.suppress(UserWarning):  # a filter may raise it, but it must not stop the job
                warn(f"{missing}; until one has it, this rule keeps no version", place=self.place)


def _best(best: Best, steps: Iterable[LivingVersion]) -> set[int]:
    count, metric, order = (*best, "min")[:3]
    values = [(entry.metrics[metric], entry.version) for entry in steps if metric in entry.metrics]
    values.sort(key=lambda pair: pair[1], reverse=True)  # of equal values the newest is the best
    ranked = sorted(values, key=lambda pair: pair[0] if order == "min" else -pair[0])
    return {version for _, version in ranked[:count]}


def step_of(tags: Iterable[str]) -> int | None:
    """Return the step of the first tag of the form `step/<number>`, without leading zeros, or None."""
    return next((step for tag in tags if (step := step_number(tag)) is not None), None)


class Ledger:
    """The living versions by number, without those of void records and garbage collections."""

    def __init__(self, alive: Iterable[LivingVersion] = ()) -> None:
        self.alive = {entry.version: entry for entry in alive}
        self._tags = {tag: entry.version for entry in self.alive.values() for tag in entry.tags}

    def add(self, version: int, record: Record) -> None:
        """Add a newer commit, other than a garbage collection; ignore a void record.

        A tag that names a version that is not living is ignored: a repair may have voided the version.
        """
        if record.void:
            return
        self._drop_tags((*record.tags, *record.dropped, *record.tagged))
        self._set_tags({tag: number for tag, number in record.tagged.items() if number in self.alive})
        self._tags |= dict.fromkeys(record.tags, version)
        metrics = _metrics(record.metadata)
        standalone = record.replaces or record.source > 0
        self.alive[version] = LivingVersion(
            version,
            record.transaction,
            record.time,
            record.tags,
            standalone,
            metrics,
            record.reused,
            record.source,
        )

    def _drop_tags(self, tags: Iterable[str]) -> None:
        dropped: dict[int, set[str]] = {}  # dropped tags by version; a version may have 10^5 of them
        for tag in tags:
            if tag in self._tags:
                dropped.setdefault(self._tags.pop(tag), set()).add(tag)
        for number, names in dropped.items():
            entry = self.alive[number]
            self.alive[number] = replace(entry, tags=tuple(tag for tag in entry.tags if tag not in names))

    def _set_tags(self, tagged: Mapping[str, int]) -> None:
        added: dict[int, list[str]] = {}
        for tag, number in tagged.items():
            added.setdefault(number, []).append(tag)
        for number, names in added.items():
            entry = self.alive[number]
            self.alive[number] = replace(entry, tags=(*entry.tags, *names))
        self._tags |= tagged

    def inherit(self, version: int, objects: Iterable[str], *, standalone: bool) -> None:
        """Add objects of older versions to the dependencies of a version, so that the older versions may expire.

        `standalone`: whether the version then needs only its own objects and its dependencies.
        """
        entry = self.alive[version]
        dependencies = tuple(dict.fromkeys((*entry.dependencies, *objects)))
        self.alive[version] = replace(entry, standalone=standalone, dependencies=dependencies)

    def without(self, expired: Iterable[int]) -> Ledger:
        """Return the ledger after these versions have expired."""
        removed = set(expired)
        return Ledger(entry for version, entry in self.alive.items() if version not in removed)

    @property
    def copies(self) -> set[int]:
        """The living versions that are copies of others."""
        return {version for version, entry in self.alive.items() if entry.source}

    @property
    def transactions(self) -> set[str]:
        """The transactions whose commits are the living versions."""
        return {entry.transaction for entry in self.alive.values()}

    @property
    def dependencies(self) -> set[str]:
        """The objects of other transactions that living versions need."""
        return {key for entry in self.alive.values() for key in entry.dependencies}


def _metrics(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics in the metadata of a commit, which other programs may have written."""
    metrics = metadata.get("metrics")
    if not isinstance(metrics, Mapping):
        return {}
    numbers = {k: v for k, v in metrics.items() if isinstance(k, str) and isinstance(v, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def refuse_condemned(url: str, record: Record, version: int, collection: Collection) -> None:
    """Raise `Conflict` if the garbage collection recorded as `version` condemned a record's transaction.

    Raise `SourceCondemned` if it condemned packs that the transaction reuses, `SnapshotExpired` if it removed a
    version that the transaction tags, or copies.
    """
    if record.transaction in collection.transactions:
        raise Conflict(
            f"{url}: transaction {record.transaction} looked abandoned, or its version had expired, and it was "
            f"removed by the garbage collection recorded as version {version}, so it cannot be committed; repeat "
            "it as a new transaction, with a new attempt",
            [],
        )
    whole, single = set(collection.transactions), set(collection.objects)
    removed = [key for key in record.reused if key in single or owner_of(key) in whole]
    if removed:
        raise SourceCondemned(
            f"{url}: the garbage collection recorded as version {version} removed chunks that this "
            "transaction reuses, so it cannot be committed; read again and repeat it",
            removed,
        )
    if expired := record.named_versions.intersection(collection.expired):
        raise SnapshotExpired(
            f"{url}: version {min(expired)} was removed by the garbage collection recorded as version "
            f"{version}, so it cannot be tagged or copied; choose a living version (tstore log lists them)"
        )


class Condemned(NamedTuple):
    """What one garbage collection condemned: transactions with all of their objects, and single objects."""

    transactions: frozenset[str]
    objects: frozenset[str]

    @staticmethod
    def from_collection(collection: Collection) -> Condemned:
        """Return what a collection condemned."""
        return Condemned(frozenset(collection.transactions), frozenset(collection.objects))

    def includes(self, key: str) -> bool:
        """Return whether an object, or the folder of a transaction, is condemned."""
        return key in self.objects or owner_of(key) in self.transactions


def packs_of(tree: Tree) -> set[str]:
    """Return the packs that a tree refers to; of segments, only those that lie over older rows are read."""
    return set().union(*[node.packs for node in tree.nodes.values()])


def check_collection(record: Record, ledger: Ledger, used: Iterable[str], voided: Set[int] = frozenset()) -> None:
    """Raise `Corrupt` if a garbage collection does not follow from the versions alive before it.

    `ledger` has these versions, and `used` are the packs to which the newest of them refers. `voided` are versions
    that the record names and a repair has voided since. Their tags and objects are no longer known, so if there
    are such versions, tags and inherited objects are not compared. Nor are the objects that a repair makes living
    versions inherit: it may have lost the record of the transaction that wrote them.
    """
    collection, before = record.collection, ledger.alive.keys()
    assert collection is not None
    expired = set(collection.expired)
    if len(expired) < len(collection.expired) or not expired <= before | voided:
        raise Corrupt("it expires a version that is not alive, or one twice")
    # If a repair voids a garbage collection, the versions that this collection expired are alive again in the
    # ledger. A record written before that repair lacks them.
    forgotten = before - expired - collection.versions if record.collected in voided else set()
    copies = {entry.version for entry in (*ledger.alive.values(), *collection.alive) if entry.source}
    head = max(((before - voided) | (collection.versions & voided)) - copies, default=0)
    if head in expired or head in forgotten:
        raise Corrupt(f"it expires the head, version {head}")
    expected = (before | (collection.versions & voided)) - expired - forgotten
    # a repair that voids the newest living version may make the version before it alive again
    revived = collection.versions - expected
    if record.by_repair and len(revived) == 1 and max(revived) < max(voided, default=0):
        expected |= revived
    _check_living(collection, ledger, expected, voided | set(record.voids))
    tags = {} if voided else {tag: version for version in expired for tag in ledger.alive[version].tags}
    # the collection may also list tags that were moved away from an expired version in the meantime
    if not set(collection.tags.values()) <= expired or not tags.items() <= collection.tags.items():
        raise Corrupt("its expired tags are not those of the expired versions")
    # in a copy of a history, the state before a version voided since may have been collected while that was alive
    _check_unneeded(collection, set() if head in voided else set(used))


def _check_living(collection: Collection, ledger: Ledger, expected: Set[int], voided: Set[int]) -> None:
    """Raise `Corrupt` unless the expected versions stay alive, with at least their former objects."""
    if collection.versions != expected:
        raise Corrupt("its living versions are not the previous ones minus those that it expires")
    removed = [entry for version, entry in ledger.alive.items() if version not in expected]
    released = {key for entry in removed for key in entry.dependencies}
    owners = {entry.transaction for entry in removed}
    for entry in collection.alive:
        known = ledger.alive.get(entry.version)
        if known is None:  # it was voided, or is alive again
            continue
        if not _is_same_entry(entry, replace(known, tags=entry.tags) if voided else known):
            raise Corrupt(f"its entry for version {entry.version} contradicts the log")
        inherited = () if voided else set(entry.dependencies) - set(known.dependencies)
        if not all(is_transaction_object(k) and (k in released or owner_of(k) in owners) for k in inherited):
            raise Corrupt(f"version {entry.version} inherits an object that no expired version wrote or needed")


def _is_same_entry(entry: LivingVersion, known: LivingVersion) -> bool:
    """Return whether an entry equals the `known` entry of the log; it may have inherited objects since.

    With the inherited objects it may have become standalone.
    """
    same = replace(entry, standalone=known.standalone, dependencies=known.dependencies) == known
    return same and entry.standalone >= known.standalone and set(known.dependencies) <= set(entry.dependencies)


def _check_unneeded(collection: Collection, used: set[str]) -> None:
    """Raise `Corrupt` if an object or transaction is condemned but still needed."""
    living = {entry.transaction for entry in collection.alive}
    needed = used.union(*(entry.dependencies for entry in collection.alive))
    owners = {owner_of(key) for key in needed}
    for transaction in collection.transactions:
        if transaction in living or transaction in owners:
            raise Corrupt(f"it condemns the transaction {transaction!r}, which a living version needs")
    for key in collection.objects:
        if owner_of(key) in living or key in needed:
            raise Corrupt(f"it condemns {key!r}, which a living version needs")


def checked_keep(keep: Any) -> JobKeep | None:
    """Return the rules of a job that an argument stands for, such as a number of steps; None keeps all."""
    if keep is None:
        return None
    if isinstance(keep, int) and not isinstance(keep, bool):
        return JobKeep(last=keep)
    if isinstance(keep, Keep):
        return JobKeep(**vars(keep))
    raise InvalidArgument(f"keep={quote(keep)}: expected a number of steps, a tstore.Keep, or None")

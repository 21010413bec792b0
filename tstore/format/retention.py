"""Which versions stay: rules, and the ledger of the versions that live; pure, no I/O."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from tstore.errors import Conflict, Corrupt, InvalidArgument, NotFound, SourceCondemned
from tstore.format.arguments import STEP_TAG, checked_duration, shown
from tstore.format.layout import is_root, is_written, owner_of
from tstore.format.records import Alive, Collection, Record
from tstore.format.tree import Tree

__all__ = [
    "Best",
    "Condemned",
    "Keep",
    "Ledger",
    "check_collection",
    "check_condemned",
    "is_collectable",
    "packs_of",
    "step_of",
]

Best = tuple[int, str] | tuple[int, str, Literal["min", "max"]]


@dataclass(frozen=True)
class Keep:
    """Which versions stay: those that any of the rules keeps, always the newest version and the newest step.

    `last`: so many of the highest steps. `every`: the steps that it divides. `best`: so many steps of the least
    value of a metric, `(3, "loss")`, or of the greatest, `(3, "accuracy", "max")`. `newer_than`: all versions
    committed within that time, by their writers' clocks and this host's: where one may be wrong, keep by another
    rule too. `tags`: the versions that these tags name.
    Raises `InvalidArgument` for a rule that can't be, and where there is none.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None
    newer_than: datetime.timedelta | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidArgument(f"Keep({name}={shown(value)}): expected a whole number from 1 on")
        match self.best:
            case None:
                pass
            case (int(count), str(metric)) | (int(count), str(metric), "min" | "max") if count > 0 and metric:
                pass
            case _:
                raise InvalidArgument(
                    f"Keep(best={shown(self.best)}): expected as (3, 'loss') or (3, 'loss', 'max')"
                )
        if self.newer_than is not None:
            checked_duration("Keep: newer_than", self.newer_than)
        if not isinstance(self.tags, tuple | list) or not all(isinstance(tag, str) for tag in self.tags):
            raise InvalidArgument(f"Keep(tags={shown(self.tags)}): expected a tuple of tags, as ('best',)")
        rules = (self.last, self.every, self.best, self.newer_than)
        if all(rule is None for rule in rules) and not self.tags:
            raise InvalidArgument("Keep() names nothing to keep; to keep the newest step alone, say Keep(last=1)")

    def chosen(self, alive: Mapping[int, Alive], now: float) -> set[int]:
        """The versions that stay, of those that live.

        Raises `NotFound` for a tag or a metric that none of them has, since it may be misspelt.
        """
        steps = {step: a for a in alive.values() for tag in a.tags if (step := step_of([tag])) is not None}
        order = sorted(steps)
        kept = {max(alive), *(steps[s].version for s in order[-1:])} if alive else set()
        if self.last:
            kept |= {steps[s].version for s in order[-self.last :]}
        if self.every is not None:
            kept |= {steps[s].version for s in order if s % self.every == 0}
        if self.best is not None and steps:
            kept |= _best(self.best, steps.values())
        if self.newer_than is not None:
            kept |= {v for v, a in alive.items() if a.time > now - self.newer_than.total_seconds()}
        named = {tag: a.version for a in alive.values() for tag in a.tags}
        for tag in self.tags:
            if tag not in named:
                raise NotFound(f"Keep(tags=…): no version that lives has the tag {tag!r}; nothing was collected")
            kept.add(named[tag])
        return kept


def _best(best: Best, steps: Iterable[Alive]) -> set[int]:
    count, metric, order = (*best, "min")[:3]
    found = [(a.metrics[metric], a.version) for a in steps if metric in a.metrics]
    if not found:
        known = ", ".join(sorted({name for a in steps for name in a.metrics})) or "none"
        raise NotFound(
            f"Keep(best=…): no step has the metric {metric!r}, they have: {known}; nothing was collected"
        )
    sign = -1 if order == "max" else 1
    ranked = sorted((sign * value, -version) for value, version in found)  # of equal ones the newer
    return {-version for _, version in ranked[:count]}


def step_of(tags: Iterable[str]) -> int | None:
    """The step that the first of the tags names that names one; None where none does, as with `step/007`."""
    return next((int(m[1]) for tag in tags if (m := STEP_TAG.fullmatch(tag))), None)


class Ledger:
    """The versions that live, by number; void commits and those of a gc are none of them."""

    def __init__(self, alive: Iterable[Alive] = ()) -> None:
        self.alive = {a.version: a for a in alive}
        self._tags = {tag: a.version for a in self.alive.values() for tag in a.tags}

    def add(self, version: int, record: Record) -> None:
        """Takes in a newer commit, no gc's."""
        if record.void:
            return
        lost: dict[int, set[str]] = {}
        for tag in (*record.tags, *record.dropped):
            if tag in self._tags:
                lost.setdefault(self._tags.pop(tag), set()).add(tag)
        for number, tags in lost.items():
            other = self.alive[number]
            self._put(other, tags=tuple(t for t in other.tags if t not in tags))
        self._tags |= dict.fromkeys(record.tags, version)
        self.alive[version] = Alive(
            version,
            record.transaction,
            record.time,
            record.tags,
            record.replaces,
            _metrics(record.metadata),
            record.reused,
        )

    def inherit(self, version: int, objects: Iterable[str], *, replaces: bool) -> None:
        """Lets a version hold what older ones wrote or held and it is made of; then these may expire.

        `replaces` tells that one of them replaced all before it.
        """
        heir = self.alive[version]
        self._put(heir, replaces=replaces, holds=tuple(dict.fromkeys((*heir.holds, *objects))))

    def without(self, expired: Iterable[int]) -> Ledger:
        """The ledger once these have expired."""
        gone = set(expired)
        return Ledger(a for v, a in self.alive.items() if v not in gone)

    @property
    def transactions(self) -> set[str]:
        """The transactions that became a version that lives."""
        return {a.transaction for a in self.alive.values()}

    @property
    def held(self) -> set[str]:
        """The objects of other transactions that living versions need."""
        return {key for a in self.alive.values() for key in a.holds}

    def _put(self, entry: Alive, **changes: object) -> None:
        self.alive[entry.version] = msgspec.structs.replace(entry, **changes)


def _metrics(metadata: Mapping[str, Any]) -> dict[str, float]:
    """The finite metrics of a commit; metadata may hold anything under that name, as other programs write them."""
    metrics = metadata.get("metrics")
    if not isinstance(metrics, Mapping):
        return {}
    numbers = {k: v for k, v in metrics.items() if isinstance(k, str) and isinstance(v, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def check_condemned(url: str, record: Record, version: int, collection: Collection) -> None:
    """Raises `Conflict` where the gc of a version condemned the record's transaction, or `SourceCondemned` where
    it condemned what that re-uses.
    """
    if record.transaction in collection.transactions:
        raise Conflict(
            f"{url}: transaction {record.transaction} was taken for abandoned, and collected by version "
            f"{version}; nothing of it was committed. Repeat it as a new one, with a new attempt",
            [],
        )
    whole, single = set(collection.transactions), set(collection.objects)
    gone = [key for key in record.reused if key in single or owner_of(key) in whole]
    if gone:
        raise SourceCondemned(
            f"{url}: this transaction re-uses chunks that version {version}, a gc that was committed since then, "
            "condemned; nothing of it was committed. Read again and repeat it",
            gone,
        )


class Condemned(NamedTuple):
    """What one garbage collection condemned: transactions with all their objects, and single objects."""

    transactions: frozenset[str]
    objects: frozenset[str]

    @staticmethod
    def from_collection(collection: Collection) -> Condemned:
        """What a collection condemned."""
        return Condemned(frozenset(collection.transactions), frozenset(collection.objects))

    def covers(self, key: str) -> bool:
        """Whether an object, or the folder of a transaction, is condemned."""
        return key in self.objects or owner_of(key) in self.transactions


def packs_of(tree: Tree) -> set[str]:
    """The packs that a tree refers to."""
    tables = [node.chunks for node in tree.nodes.values()]
    used = [t.packs[p] for t in tables for p in np.unique(t.pack).tolist()]
    return {key for key in used if isinstance(key, str)}


def is_collectable(key: str) -> bool:
    """Whether an object is of a kind that a garbage collection deletes."""
    return is_root(key) or is_written(key)


def check_collection(record: Record, ledger: Ledger, used: Iterable[str], voided: Set[int] = frozenset()) -> None:
    """Raise `Corrupt` where a garbage collection does not follow from what lived before it.

    `ledger` has the versions that live until then; `used` are the packs that the newest one is made of. `voided`
    are versions that the record names and that a repair has voided since. What those were is not known any more,
    so tags and inherited objects are not compared then.
    """
    gone = record.collection
    assert gone is not None
    expired = set(gone.expired)
    if len(expired) < len(gone.expired) or not expired <= ledger.alive.keys() | voided:
        raise Corrupt("it lets versions expire that do not live, or one twice")
    forgotten: set[int] = set()  # expired by a garbage collection that was voided
    if record.collected in voided:
        forgotten = ledger.alive.keys() - expired - gone.versions
    newest = max(ledger.alive.keys() - voided, default=0)
    if newest in expired or newest in forgotten:
        raise Corrupt(f"it lets the newest version expire, {newest}")
    _check_alive(gone, ledger, expired | forgotten, voided)
    _check_tags(gone.tags, ledger, expired, voided)
    _check_condemned(gone, set(used))


def _check_alive(gone: Collection, ledger: Ledger, expired: set[int], voided: Set[int]) -> None:
    """Raise `Corrupt` unless those live on that do not expire, and hold at least what they held."""
    kept = (ledger.alive.keys() | (gone.versions & voided)) - expired
    if gone.versions != kept:
        raise Corrupt("the versions that it says live are not those that lived and do not expire")
    known_gone = [ledger.alive[version] for version in expired & ledger.alive.keys()]
    given = {key for entry in known_gone for key in entry.holds}
    owners = {entry.transaction for entry in known_gone}
    for entry in gone.alive:
        known = ledger.alive.get(entry.version)
        if known is None:
            continue
        if not _same(entry, replace(known, tags=entry.tags) if voided else known):
            raise Corrupt(f"it says something else of version {entry.version} than the log")
        inherited = () if voided else set(entry.holds) - set(known.holds)
        if not all(is_written(key) and (key in given or owner_of(key) in owners) for key in inherited):
            raise Corrupt(f"it lets version {entry.version} hold what no version that expires wrote or held")


def _same(entry: Alive, known: Alive) -> bool:
    """Whether an entry is that of the log, but that it may have inherited from versions that expire."""
    alike = replace(entry, replaces=known.replaces, holds=known.holds) == known
    return alike and entry.replaces >= known.replaces and set(known.holds) <= set(entry.holds)


def _check_tags(tags: Mapping[str, int], ledger: Ledger, expired: set[int], voided: Set[int]) -> None:
    """Raise `Corrupt` unless the tags are those of versions that expire; one may have been moved on meanwhile."""
    needed = {} if voided else {tag: version for version in expired for tag in ledger.alive[version].tags}
    if not set(tags.values()) <= expired or any(tags.get(tag) != version for tag, version in needed.items()):
        raise Corrupt("the tags that it says expire are not those of the versions that do")


def _check_condemned(gone: Collection, used: set[str]) -> None:
    """Raise `Corrupt` where what it condemns can't be collected, or is still needed."""
    living = {entry.transaction for entry in gone.alive}
    needed = used.union(*(entry.holds for entry in gone.alive))
    owners = {owner_of(key) for key in needed}
    for transaction in gone.transactions:
        if transaction in living or transaction in owners:
            raise Corrupt(f"it condemns the transaction {transaction!r}, of which a version that lives is made")
    for key in gone.objects:
        if owner_of(key) in living or key in needed:
            raise Corrupt(f"it condemns {key!r}, of which a version that lives is made")

"""Which versions stay: rules, and the ledger of the versions that live; pure, no I/O."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tstore.errors import Conflict, InvalidArgument, NotFound, SourceCondemned
from tstore.format.arguments import STEP_TAG, checked_duration, shown
from tstore.format.layout import owner_of
from tstore.format.records import Alive, Collection, Record

__all__ = ["Best", "Keep", "Ledger", "check_condemned", "step_of"]

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

"""The decisions of a garbage collection, as stored in its record; pure, no I/O."""

from __future__ import annotations

import functools
import math
from typing import Annotated

import msgspec
import numpy as np

from tstore.core.format.bounds import MAX_LIVING, MAX_NAMES
from tstore.core.format.layout import is_collectable, is_transaction_object, owner_of
from tstore.core.format.objects.references import Body, Names, Natural
from tstore.core.format.objects.wellformed import (
    check_ascending,
    check_keys,
    check_tags,
    check_time,
    check_transactions,
)
from tstore.errors import Corrupt

__all__ = ["Collection", "LivingVersion"]


class LivingVersion(Body, frozen=True):
    """The entry of a living version in the record of a garbage collection.

    `dependencies` are objects of other transactions that the version needs: packs that its record reuses, and
    objects inherited from expired versions. A `standalone` version needs only its own objects and these. `source`
    is that of its record.
    """

    version: Natural
    transaction: str
    time: float
    tags: Names
    standalone: bool
    metrics: dict[str, float]
    dependencies: Names
    source: Natural = 0


class Collection(Body, dict=True, frozen=True):
    """The decisions of a garbage collection: the versions that stay alive, and the objects that it condemned.

    `expired` are the versions that it removed, `tags` their tags. `transactions` are condemned with all of their
    objects; `objects` are condemned one by one. A condemned object may be deleted once the record exists. A
    transaction that is condemned or reuses a condemned pack can no longer be committed.
    """

    alive: Annotated[tuple[LivingVersion, ...], msgspec.Meta(max_length=MAX_LIVING)]
    expired: Annotated[tuple[Natural, ...], msgspec.Meta(max_length=MAX_NAMES)]
    tags: Annotated[dict[str, Natural], msgspec.Meta(max_length=MAX_NAMES)]
    transactions: Names
    objects: Names

    def validate(self) -> None:
        """Raise `Corrupt` for invalid values."""
        versions = [entry.version for entry in self.alive]
        check_ascending(versions, "living")
        check_ascending(self.expired, "expired")
        expired = np.array(self.expired, np.int64)  # no set: the numbers could be chosen so that hashes collide
        if len(np.intersect1d(versions, expired, assume_unique=True)):
            raise Corrupt("a version is both alive and expired")
        living = {entry.transaction for entry in self.alive}
        check_transactions((*living, *self.transactions))
        check_tags(tag for entry in self.alive for tag in entry.tags)
        for entry in self.alive:
            check_time(entry.time)
            if entry.source and entry.source >= entry.version:
                raise Corrupt(f"version {entry.version} is a copy of a later one")
            if entry.dependencies:
                check_keys(entry.dependencies, is_transaction_object, "an object of a transaction")
            if entry.metrics and not all(map(math.isfinite, entry.metrics.values())):
                raise Corrupt(f"a metric of version {entry.version} is not finite")
        check_tags(self.tags)
        tagged = np.array(list(self.tags.values()), np.int64)
        if (np.searchsorted(expired, tagged) == np.searchsorted(expired, tagged, "right")).any():
            raise Corrupt("a tag expired although its version did not")
        check_keys(self.objects, is_collectable, "an object that a garbage collection may delete")
        if not living.isdisjoint((*self.transactions, *map(owner_of, self.objects))):
            raise Corrupt("it condemns an object of a living version")

    @functools.cached_property
    def versions(self) -> frozenset[int]:
        """The living versions."""
        return frozenset(a.version for a in self.alive)

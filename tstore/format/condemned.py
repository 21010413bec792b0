"""What a garbage collection may decide: which versions expire, what lives on, and which objects go; pure.

Only what a transaction wrote, and roots, can be collected. Markers, records and hints never are, whatever a record
says: `is_collectable` is asked where something is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from tstore.errors import Corrupt
from tstore.format.layout import is_root, is_written, owner_of
from tstore.format.records import Alive, Collection, Record
from tstore.format.retention import Ledger
from tstore.format.tree import Tree

__all__ = ["Condemned", "check_collection", "is_collectable", "packs_of"]


class Condemned(NamedTuple):
    """What one garbage collection condemned: transactions with all their objects, and single objects."""

    transactions: frozenset[str]
    objects: frozenset[str]

    @staticmethod
    def by(collection: Collection) -> Condemned:
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

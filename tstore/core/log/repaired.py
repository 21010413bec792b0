"""What a commit may not depend on after a repair has voided versions."""

from __future__ import annotations

from collections.abc import Sequence

from tstore.core.format.objects.records import Record
from tstore.core.log.reader import LogReader
from tstore.errors import Conflict, NotFound

__all__ = ["check_unaffected", "refuse_voided"]


def refuse_voided(url: str, record: Record, voided: Sequence[int]) -> None:
    """Raise `Conflict` if a repair voided versions that a record may depend on, or be.

    A garbage collection, and another repair, begin again by themselves.
    """
    if voided and record.collection is None and not record.voids:
        raise Conflict(
            f"{url}: a repair voided version {min(voided)}, on which transaction {record.transaction} is based or "
            "which it had become, so it is not committed; read again and repeat it",
            [],
        )


async def check_unaffected(log: LogReader, record: Record, version: int, repair: Record) -> None:
    """Raise `Conflict` if a repair voided a version that the record names, or if data of the record is gone.

    Data is gone if the repair voided the garbage collection that had deleted it.
    """
    if voided := record.named_versions.intersection(repair.voids):
        raise Conflict(
            f"{log.storage.url}: the repair recorded as version {version} voided version {min(voided)}, which "
            "therefore cannot be tagged or copied; choose another version",
            [],
        )
    try:
        manifests = await log.objects.manifests(version, record)
        packs = {pack for manifest in manifests for pack in manifest.packs if pack}
        missing = len(await log.storage.sizes(packs)) < len(packs)
    except NotFound:
        missing = True
    if missing:
        raise Conflict(
            f"{log.storage.url}: data of transaction {record.transaction} was deleted, probably by a garbage "
            f"collection whose record was voided by the repair in version {version}, so the transaction cannot be "
            "committed; repeat it as a new transaction (if it is cooperative, with a new attempt)",
            [],
        )

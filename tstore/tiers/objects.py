"""What the hosts of a job tell each other through the durable store, and what a local commit says of itself.

Each object is one line of JSON after its xxh3-128 in hexadecimal, and is created once:

    tiers/offers/<round>/<host>        an `Offer`
    tiers/decisions/<20 digits>        a `Decision`
    tiers/pushes/<decision>-<number>   the step that all hosts push next
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import xxhash

from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Durability
from tstore.errors import Corrupt

__all__ = [
    "DECISIONS",
    "Decision",
    "Held",
    "Holder",
    "Limit",
    "Offer",
    "Part",
    "Saved",
    "create",
    "decision_key",
    "offer_key",
    "push_key",
    "read",
]

T = TypeVar("T")

DECISIONS = "tiers/decisions/"

_COST = (
    ". Steps that a restart or a rollback has given up count again without it, and the job may go on from one of "
    "them; to go on from the durable store, delete the local stores of all hosts too"
)


class Saved(msgspec.Struct, frozen=True, order=True):
    """A step as saved after decision `epoch`; `save` is the id that the parts of one save share."""

    step: int
    epoch: int
    save: str = ""


class Part(msgspec.Struct, frozen=True):
    """The part of one host of `hosts` in a save of a job, as the metadata of its local commit has it.

    `job` is the uuid of the durable store.
    """

    job: str
    saved: Saved
    host: int
    hosts: int


class Held(msgspec.Struct, frozen=True):
    """A part that a host holds whole and verified: version `version` of the store in this folder."""

    part: Part
    folder: str
    version: int


class Offer(msgspec.Struct, frozen=True):
    """What one host of a starting job holds, and how others read it.

    `place` identifies the local storage: hosts with the same place share it. `url` and `token` are those of its
    server, or empty. Hosts of one failure domain may fail together.
    """

    host: int
    hosts: int
    place: str
    url: str
    token: str
    domain: str
    held: tuple[Held, ...]


class Holder(msgspec.Struct, frozen=True):
    """Where a part is held: a store below the local storage `place`, or below the URL of a server."""

    place: str
    url: str
    token: str
    folder: str
    version: int


class Limit(msgspec.Struct, frozen=True):
    """After decision `number`, of all that was saved before it only the steps up to `step` count."""

    number: int
    step: int


class Decision(msgspec.Struct, frozen=True):
    """The step from which the job goes on, and who holds its parts.

    `saved` is None if there is nothing to resume from. `holders` has for each part its holders, and is empty if
    only the durable store has the step; `durable` says whether it has that same save. `offers` are those of the
    hosts that take part, without what they hold, by number.
    """

    number: int
    round: str
    saved: Saved | None
    holders: tuple[tuple[Holder, ...], ...]
    durable: bool
    limits: tuple[Limit, ...]
    offers: tuple[Offer, ...]

    @property
    def step(self) -> int:
        """The decided step, -1 if there is none."""
        return -1 if self.saved is None else self.saved.step

    def counts(self, saved: Saved) -> bool:
        """Return whether no decision up to this one has given a save up."""
        return all(saved.step <= limit.step for limit in self.limits if limit.number > saved.epoch)


def offer_key(round: str, host: int) -> str:
    """Return the key of a host's offer in a round."""
    return f"tiers/offers/{round}/{host:05d}"


def decision_key(number: int) -> str:
    """Return the key of a decision."""
    return f"{DECISIONS}{number:020d}"


def push_key(decision: int, number: int) -> str:
    """Return the key of the object with the step of the push with this number since a decision."""
    return f"tiers/pushes/{decision}-{number}"


async def create(storage: Storage, key: str, value: Any) -> None:
    """Create an object durably; raise `AlreadyExists`."""
    data = msgspec.json.encode(value)
    await storage.create(key, f"{xxhash.xxh3_128_hexdigest(data)} ".encode() + data, Durability.FSYNC)


async def read(storage: Storage, key: str, kind: type[T]) -> T:
    """Return an object; raise `NotFound`, or `Corrupt` if it does not match its checksum."""
    check, _, data = (await storage.get(key)).partition(b" ")
    if check != xxhash.xxh3_128_hexdigest(data).encode():
        cost = _COST if key.startswith(DECISIONS) else ""
        raise Corrupt(
            f"{storage.url}: {key} does not match its checksum; delete it, and start the job again{cost}"
        )
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"{storage.url}: {key} does not parse ({error}); another version of tstore wrote it"
        ) from error

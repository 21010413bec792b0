"""What a server spends on its clients."""

from __future__ import annotations

import math
from typing import NamedTuple

from tstore.errors import InvalidArgument
from tstore.storage.pace import SLOWEST

__all__ = [
    "FRAMING",
    "FRAMING_SHARE",
    "HELD",
    "LIMITS",
    "LONGEST_HELD",
    "MOST_RATE",
    "PIECE",
    "SMALLER",
    "UPLOADS",
    "Limits",
    "checked_limits",
]

PIECE = 1 << 20
"""Bytes of a body that must make their way within `Limits.stall`; also the most of it that is sent in one call."""

FRAMING, FRAMING_SHARE = 32 << 10, 16
"""Bytes of a request that may be no body: its head, and the framing of a body in chunks, of which one more is
permitted for each 16 of the body. That is 5,000 chunks of any size, and any number of about 100 bytes."""

HELD = 256 << 20
"""Bytes of bodies that are in memory at once: those that are checked before they are stored."""

LONGEST_HELD = 192 << 20
"""The longest body that is held in memory, where `bounds.longest` lets an object of its name be longer."""

SMALLER = "choose larger chunks, or write to its storage directly"
"""What a client can do whose metadata is too long for a server."""

UPLOADS = 8
"""Objects on their way at once to a storage that is not local; they are whole by then."""


MOST_RATE = 1 << 20
"""The greatest `Limits.rate`: a job's hosts that share 1 Gbit/s send 128 bodies at once no faster."""


class Limits(NamedTuple):
    """What clients may take; beyond it they are refused or cut off."""

    connections: int = 1024
    """Open at once; a further one takes the place of a silent one, or of the one that is idle for longest."""
    requests: int = 256
    """Answered at once; a further one takes the place of one whose client is too slow, or gets 503."""
    object_bytes: int = 64 << 30
    """The longest pack."""
    stall: float = 180.0
    """Seconds in which the next piece (1 MiB) of a body must have been sent or received.

    By default more than tstore's clients wait for one, with the silence that they permit.
    """
    idle: float = 75.0
    """Seconds until the head of the next request must be whole."""
    drain: float = 30.0
    """Seconds that requests under way are given at the end."""
    rate: int = SLOWEST
    """Bytes a second of a whole body, sent or received, that a client must reach on average, after `stall`.

    By default no more than tstore's clients demand themselves.
    """
    wait: float = 30.0
    """Seconds that a request waits for memory, or for its turn with the storage, before it gets 503."""


LIMITS = Limits()
"""Those that a server has unless told otherwise."""


def checked_limits(limits: Limits) -> Limits:
    """Return the limits; `InvalidArgument` for what is no limit, or one that no client keeps."""
    for name, value in limits._asdict().items():
        least = {"drain": 0, "stall": 0.001, "idle": 0.001, "wait": 0.001}.get(name, 1)
        most = MOST_RATE if name == "rate" else math.inf
        if not (isinstance(value, int | float) and least <= value <= most and math.isfinite(value)):
            upper = "" if most == math.inf else f" and at most {most}"
            raise InvalidArgument(f"Limits({name}={value!r}): expected a number of at least {least}{upper}")
    return limits

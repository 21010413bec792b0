"""The limits of a server: connections, requests, sizes, rates and times."""

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
"""Bytes of a body that must be transferred within `Limits.stall`; also the maximum sent in one call."""

FRAMING, FRAMING_SHARE = 32 << 10, 16
"""Bytes of a request besides its body: the head, and the framing of a chunked body, of which one more byte is
permitted for each 16 of the body. That permits 5,000 chunks of any size, and any number of about 100 bytes."""

HELD = 256 << 20
"""Bytes of bodies in memory at once: those that are validated before they are stored."""

LONGEST_HELD = 192 << 20
"""The longest body held in memory, if `bounds.longest` permits a longer object of its name."""

SMALLER = "choose larger chunks, or write to its storage directly"
"""The advice to clients whose metadata is too large for a server."""

UPLOADS = 8
"""Objects uploaded at once to storage that is not local; they are complete by then."""


MOST_RATE = 1 << 20
"""The maximum of `Limits.rate`: the rate of each of 128 concurrent bodies of hosts that share 1 Gbit/s."""


class Limits(NamedTuple):
    """The limits of clients; beyond them requests are refused or aborted."""

    connections: int = 1024
    """Concurrent connections; another one replaces a silent one, or the one that is idle for longest."""
    requests: int = 256
    """Concurrent requests; another one replaces one whose client is too slow, or gets 503."""
    object_bytes: int = 64 << 30
    """The maximum size of a pack."""
    stall: float = 180.0
    """Seconds to transfer the next MiB of a body.

    The default is longer than tstore's clients wait themselves.
    """
    idle: float = 75.0
    """Seconds to receive the complete head of the next request."""
    drain: float = 30.0
    """Seconds for requests under way at shutdown."""
    rate: int = SLOWEST
    """Bytes per second that a body must reach on average, after `stall` seconds.

    The default is not higher than tstore's clients require themselves.
    """
    wait: float = 30.0
    """Seconds that a request waits for memory, or for its turn with the storage, before it gets 503."""


LIMITS = Limits()
"""The default limits."""


def checked_limits(limits: Limits) -> Limits:
    """Return the limits; raise `InvalidArgument` for a value out of its range."""
    for name, value in limits._asdict().items():
        least = {"drain": 0, "stall": 0.001, "idle": 0.001, "wait": 0.001}.get(name, 1)
        most = MOST_RATE if name == "rate" else math.inf
        if not (isinstance(value, int | float) and least <= value <= most and math.isfinite(value)):
            upper = "" if most == math.inf else f" and at most {most}"
            raise InvalidArgument(f"Limits({name}={value!r}): expected a number of at least {least}{upper}")
    return limits

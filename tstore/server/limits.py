"""What a server spends on its clients."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "FRAMING",
    "FRAMING_SHARE",
    "HELD",
    "LIMITS",
    "LONGEST_HELD",
    "LONGEST_SMALL",
    "PIECE",
    "UPLOADS",
    "Limits",
]

PIECE = 1 << 20
"""Bytes of a body that must make their way within `Limits.stall`; also the most of it that is sent in one call."""

FRAMING, FRAMING_SHARE = 32 << 10, 16
"""Bytes of a request that may be no body: its head, and the framing of a body in chunks, of which one more is
permitted for each 16 of the body. That is 5,000 chunks of any size, and any number of about 100 bytes."""

HELD = 256 << 20
"""Bytes of bodies that are in memory at once: those that are checked before they are stored."""

LONGEST_HELD = 192 << 20
"""The longest body that is held in memory."""

UPLOADS = 8
"""Objects on their way at once to a storage that is not local; they are whole by then."""

LONGEST_SMALL = 4 << 10
"""The longest marker, hint or heartbeat."""


class Limits(NamedTuple):
    """What clients may take; beyond it they are refused or cut off."""

    connections: int = 1024
    """Open at once; a further one takes the place of a silent one, or of the one that is idle for longest."""
    requests: int = 256
    """Answered at once; a further one takes the place of one whose client is too slow, or gets 503."""
    object_bytes: int = 64 << 30
    """The longest pack."""
    stall: float = 60.0
    """Seconds in which the next piece (1 MiB) of a body must have been sent or received."""
    idle: float = 75.0
    """Seconds until the head of the next request must be whole."""
    drain: float = 30.0
    """Seconds that requests under way are given at the end."""
    rate: int = 32 << 10
    """Bytes a second of a whole body, sent or received, that a client must reach on average, after `stall`."""
    wait: float = 30.0
    """Seconds that a request waits for memory, or for its turn with the storage, before it gets 503."""


LIMITS = Limits()
"""Those that a server has unless told otherwise."""

"""The bodies on their way to and from clients: how fast each must be, and which has to go where others want in.

A body lasts as long as its client likes, so three rules bound it. Only time in which the server waited for the
client counts, never what its own storage took.

1. `Limits.stall`: each MiB must make its way within so many seconds.
2. `Limits.rate`: the whole must reach an average of so many bytes a second, or each MiB could take all its time.
   By default neither ends a body that tstore's own clients still wait for (`storage.pace`): 32 uploads of a client
   that share 2 Mbit/s are finished.
3. Where as many requests are being answered as may be, the slowest body has to go, with 503, for one that comes.

The third is what keeps a server reachable. It takes the place of a fixed quota for each client: eight hosts of a
job may share one address, on one machine or behind a proxy, and one token, and a quota would strangle them.
Instead, a body of a client (an address and a token) that has more bodies under way than the one that asks is ended
if it makes less than 1 MiB a second. Any other is ended only below 64 KiB a second, at which 256 of them use 16
MiB a second. So hosts that are equally slow because they share a line do not drive each other out: those that find
no place are told to come again (`Retry-After`). What it cannot do is to tell a flood that is fast from a job of
the same address and token; give jobs tokens of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator

from aiohttp import web

from tstore.server.limits import PIECE, Limits
from tstore.server.responses import Refused

__all__ = ["Transfer", "Transfers", "client_of"]

_SLOW = 64 << 10  # bytes a second
_SLOW_OF_MANY = 1 << 20
_HEAD_START = 128 << 10  # bytes that are added to what has moved, or each piece would be slow in its first moment
_NETWORK = 64  # bits of an IPv6 address; the rest is each client's own to choose


def client_of(request: web.BaseRequest) -> Hashable:
    """Return who asks: the address, or the network of one that has many, and the token."""
    try:
        address = ipaddress.ip_address((request.remote or "").partition("%")[0])
    except ValueError:
        return request.remote, hash(request.headers.get("Authorization"))
    network = int(address) >> _NETWORK if address.version == 6 else int(address)
    return network, hash(request.headers.get("Authorization"))


class Transfer:
    """One body under way; its client is waited for inside `awaiting`."""

    def __init__(self, client: Hashable, limits: Limits) -> None:
        self.client = client
        self.moved = 0
        """Bytes that have made their way; who moves them adds them."""
        self._limits = limits
        self._waited = 0.0
        self._piece = 0, 0.0  # what had moved, and how long it took, when the last whole piece had
        self._began = 0.0
        self._timeout: asyncio.Timeout | None = None
        self._displaced = False

    @contextlib.asynccontextmanager
    async def awaiting(self) -> AsyncIterator[None]:
        """Wait for the client, inside the block, as long as its pace permits; `Refused` (408, 503) beyond."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        try:
            async with asyncio.timeout(self._patience()) as self._timeout:
                yield
        except TimeoutError:
            raise self._refusal() from None
        finally:
            self._timeout, self._displaced = None, False
            self._waited += loop.time() - self._began
            if self.moved - self._piece[0] >= PIECE:
                self._piece = self.moved, self._waited

    def pace(self, now: float) -> float | None:
        """Bytes a second since the last whole MiB; None where it is not the client that is waited for."""
        if self._timeout is None or self._displaced or self._timeout.expired():
            return None
        moved, waited = self.moved - self._piece[0], self._waited + now - self._began - self._piece[1]
        return (moved + _HEAD_START) / max(1e-6, waited)

    def displace(self) -> None:
        """End it, for one that comes; only where it has a pace."""
        assert self._timeout is not None
        self._displaced = True
        self._timeout.reschedule(self._began)

    def _patience(self) -> float:
        """Seconds that the client still has: the fewest that either rule leaves it."""
        stall, rate = self._limits.stall, self._limits.rate
        return min(stall - (self._waited - self._piece[1]), stall + self.moved / rate - self._waited)

    def _refusal(self) -> Refused:
        if self._displaced:
            said = "faster clients wait, and this body comes slowly; try again"
            return Refused(503, said, {"Retry-After": "5", "Connection": "close"})
        stall, rate = self._limits.stall, self._limits.rate
        said = (
            f"less than {PIECE} bytes of the body came in {stall:g} s, or less than {rate} bytes a second of all"
        )
        return Refused(408, said, {"Connection": "close"})


class Transfers:
    """The bodies that are under way."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: dict[Transfer, None] = {}
        self._of: Counter[Hashable] = Counter()

    @contextlib.contextmanager
    def begun(self, client: Hashable) -> Iterator[Transfer]:
        """A new one, as long as the block takes."""
        transfer = Transfer(client, self._limits)
        self._running[transfer] = None
        self._of[client] += 1
        try:
            yield transfer
        finally:
            del self._running[transfer]
            self._of[client] -= 1
            if not self._of[client]:
                del self._of[client]

    def make_room(self, client: Hashable) -> bool:
        """Whether a body was ended so that a request of this client can be answered."""
        now = asyncio.get_running_loop().time()
        share = self._of[client] + 1  # what it would have
        slow: list[tuple[int, float, Transfer]] = []
        for transfer in self._running:
            pace, more = transfer.pace(now), self._of[transfer.client] - share
            if pace is not None and pace < (_SLOW_OF_MANY if more > 0 else _SLOW):
                slow.append((-max(0, more), pace, transfer))
        if not slow:
            return False
        min(slow, key=lambda found: found[:2])[2].displace()
        return True

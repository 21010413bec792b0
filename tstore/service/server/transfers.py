"""The transfers of bodies to and from clients: the rate that each must reach, and which one is ended in overload.

Three rules bound transfers, which a client could otherwise prolong for ever. Only the time spent waiting for the
client counts, not the time spent waiting for the server's storage.

1. `Limits.stall`: each MiB must be transferred within this time.
2. `Limits.rate`: the whole body must reach this average rate; otherwise each MiB could take the whole stall time.
   The defaults never end a body that tstore's own clients still wait for (`storage.limits`): 32 uploads of a
   client that share 2 Mbit/s complete.
3. At the limit of concurrent requests the slowest transfer is ended, with 503, in favor of a new request.

The third rule keeps a server reachable. It replaces a fixed quota per client: eight hosts of a job may share one
address, on one machine or behind a proxy, and one token, and a quota would throttle them. Instead, a client (an
address and a token) with more transfers than the requesting client loses a transfer slower than 1 MiB/s. Any other
transfer is ended only below 64 KiB/s: 256 transfers at that rate use 16 MiB/s. So hosts that are equally slow
because they share a line do not displace each other: those that find no room get 503 with `Retry-After`. A fast
flood can't be distinguished from a job with the same address and token; so give each job its own token.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
from collections import Counter
from collections.abc import Hashable, Iterator
from types import TracebackType

from tstore.service.server.quotas import PIECE, Limits
from tstore.service.server.responses import Refused

__all__ = ["Transfer", "Transfers", "client_at"]

_MIN_PACE = 64 << 10  # bytes per second, below which a transfer can be ended
_MIN_PACE_OF_MANY = 1 << 20  # the same, if its client has more transfers than the requesting client
_HEAD_START = 128 << 10  # bytes added to those transferred, so that no piece seems slow at its start
_HOST_BITS = 64  # low bits of an IPv6 address, which each client can choose freely


def client_at(remote: str | None, token: bytes) -> Hashable:
    """Return the identity of a client: its address (for IPv6 the network) and the digest of its token."""
    return _network(remote or ""), token


@functools.lru_cache(maxsize=1024)
def _network(remote: str) -> Hashable:
    try:
        address = ipaddress.ip_address(remote.partition("%")[0])
    except ValueError:
        return remote
    return int(address) >> _HOST_BITS if address.version == 6 else int(address)


class Transfer:
    """The transfer of one body. Only the time spent in `async with transfer:` counts as waiting for the client."""

    def __init__(self, client: Hashable, limits: Limits) -> None:
        self.client = client
        self.moved = 0
        """Bytes transferred, updated by the code that transfers them."""
        self._limits = limits
        self._waited = 0.0
        self._piece_end = 0, 0.0  # `moved` and `_waited` when the last whole piece was complete
        self._started = 0.0
        self._timeout: asyncio.Timeout | None = None
        self._displaced = False

    async def __aenter__(self) -> None:
        """Start to wait for the client, at most as long as the rules allow."""
        self._started = asyncio.get_running_loop().time()
        self._timeout = asyncio.timeout(self._remaining())
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise `Refused` (408, 503) if the client took longer than the rules allow."""
        assert self._timeout is not None
        try:
            await self._timeout.__aexit__(kind, error, trace)
            if kind is TimeoutError:
                raise TimeoutError
        except TimeoutError:
            raise self._refusal() from None
        finally:
            self._timeout, self._displaced = None, False
            self._waited += asyncio.get_running_loop().time() - self._started
            if self.moved - self._piece_end[0] >= PIECE:
                self._piece_end = self.moved, self._waited

    def pace(self, now: float) -> float | None:
        """Return bytes per second since the last whole MiB; None while the server does not wait for the client."""
        if self._timeout is None or self._displaced or self._timeout.expired():
            return None
        moved, waited = self.moved - self._piece_end[0], self._waited + now - self._started - self._piece_end[1]
        return (moved + _HEAD_START) / max(1e-6, waited)

    def displace(self) -> None:
        """End the transfer in favor of another request, while the server waits for the client."""
        assert self._timeout is not None
        self._displaced = True
        self._timeout.reschedule(self._started)

    def _remaining(self) -> float:
        """Return the seconds left to the client by the stricter of the first two rules."""
        stall, rate = self._limits.stall, self._limits.rate
        return min(stall - (self._waited - self._piece_end[1]), stall + self.moved / rate - self._waited)

    def _refusal(self) -> Refused:
        if self._displaced:
            message = "overload: this slow transfer was ended in favor of other requests; try again"
            return Refused(503, message, {"Retry-After": "5", "Connection": "close"})
        stall, rate = self._limits.stall, self._limits.rate
        message = f"the body is too slow: expected {PIECE} bytes every {stall:g} s, and {rate} bytes/s on average"
        return Refused(408, message, {"Connection": "close"})


class Transfers:
    """The transfers under way, counted by client."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: dict[Transfer, None] = {}
        self._counts: Counter[Hashable] = Counter()

    @contextlib.contextmanager
    def track(self, client: Hashable) -> Iterator[Transfer]:
        """Yield a new transfer, which counts as running during the block."""
        transfer = Transfer(client, self._limits)
        self._running[transfer] = None
        self._counts[client] += 1
        try:
            yield transfer
        finally:
            del self._running[transfer]
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client]

    def make_room(self, client: Hashable) -> bool:
        """End a slow transfer in favor of a request of this client; return whether there was one."""
        now = asyncio.get_running_loop().time()
        client_count = self._counts[client] + 1  # including this request
        slow: list[tuple[int, float, Transfer]] = []
        for transfer in self._running:
            pace, excess = transfer.pace(now), self._counts[transfer.client] - client_count
            if pace is not None and pace < (_MIN_PACE_OF_MANY if excess > 0 else _MIN_PACE):
                slow.append((-max(0, excess), pace, transfer))
        if not slow:
            return False
        min(slow, key=lambda candidate: candidate[:2])[2].displace()
        return True

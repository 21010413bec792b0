"""The server of a host's local storage, and the copies that the host makes of the stores of others.

A host with several hosts in its job serves its folder of the job: only reads, and only with a random token of
this start, which its offer has. With `peers=n` the store of each host is copied by n others: those at the
smallest distances in rank for which no host, or else the fewest, would be copied within its own failure domain. A
copy is an ordinary copy of a store, so each chunk is verified before it is kept, what exists is not transferred
again, and a copy that was cut off continues. What the source has collected since is deleted from the copy too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from tstore.core.copying.copy import copy_to
from tstore.core.maintenance.gc import delete_condemned
from tstore.core.runtime.event_loops import LoopThread
from tstore.core.steps import steps_of
from tstore.core.storage.connect import connect
from tstore.core.storage.local.store import LocalStorage
from tstore.core.store import open as open_store
from tstore.errors import NotAStore, TStoreError
from tstore.service.server.access import Access
from tstore.service.server.server import Certificate, Server
from tstore.tiers.objects import Offer

__all__ = ["PeerServer", "copied_by", "route_to"]

_POLL = 0.25  # seconds between looks at the store of another host
_LAG = 10.0  # seconds that a save waits for a copy of the step before the previous one
_START = 30.0  # seconds for the server to listen

_log = logging.getLogger("tstore.tiers")


def copied_by(offers: Sequence[Offer], peers: int, host: int) -> list[int]:
    """Return the hosts whose stores a host copies; the offers are those of all hosts, by number.

    Each of the `peers` distances, at most one less than the hosts, gives every host one that copies it.
    """
    hosts = len(offers)

    def shared(distance: int) -> int:
        return sum(offers[h].domain == offers[(h + distance) % hosts].domain for h in range(hosts))

    distances = sorted(range(1, hosts), key=lambda distance: (shared(distance), distance))[:peers]
    if host == 0 and any(map(shared, distances)):
        _log.warning(
            "copies of some hosts are in their own failure domain (%s): there are too few domains for peers=%d",
            ", ".join(sorted({offer.domain for offer in offers})[:5]),
            peers,
        )
    return [(host - distance) % hosts for distance in distances]


def route_to(durable: str) -> str:
    """Return the address from which this machine reaches the durable store, or else any other network."""
    target = urlsplit(durable).hostname if durable.startswith(("http://", "https://")) else "192.0.2.1"
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # a datagram socket sends nothing yet
        return str(probe.getsockname()[0])
    return "127.0.0.1"


class PeerServer:
    """Serves the folder of a job in a thread of its own, and copies the stores of other hosts into it."""

    def __init__(self, root: str, address: str, certificate: Certificate | None = None) -> None:
        self.token = secrets.token_hex(24)
        self.copied: dict[int, int] = {}
        """The newest step of each host that is copied here, by host; -1 before the first."""
        self._changed = threading.Condition()
        self._root = root
        self._thread = LoopThread("tstore-tiers")
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()
        self._copying: asyncio.Task[None] | None = None
        listening: Future[str] = Future()
        self._ended = asyncio.run_coroutine_threadsafe(
            self._serve(address, certificate, listening), self._thread.loop
        )
        self._ended.add_done_callback(lambda ended: _pass_error(ended, listening))
        self.url = listening.result(_START)

    async def _serve(self, address: str, certificate: Certificate | None, listening: Future[str]) -> None:
        access = Access({self.token: "read"})
        server = Server(self._root, mode="r", names="any", host=address, access=access, certificate=certificate)
        async with server:
            listening.set_result(server.url)
            await self._stop.wait()
            if self._copying is not None:
                self._copying.cancel()
                await asyncio.wait([self._copying])
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:  # requests that the copying shared
            for task in rest:
                task.cancel()
            await asyncio.wait(rest, timeout=_POLL)

    def copy(self, offers: Sequence[Offer], hosts: Sequence[int], start: str, by: int) -> None:
        """Keep copies of the stores of these hosts from now on, until `close`."""

        self.copied = dict.fromkeys(hosts, -1)

        async def run() -> None:
            if self._copying is not None:
                self._copying.cancel()
            work = [self._copy(offers[host], f"{start}-{host:05d}", by) for host in hosts]
            self._copying = asyncio.create_task(_all(work))

        asyncio.run_coroutine_threadsafe(run(), self._thread.loop).result(_START)

    def wait_copied(self, step: int) -> None:
        """Block until this host has copied a step of all hosts that it copies, for at most `_LAG` seconds.

        So the copies are never many steps behind, and there is a step that can be restored if a host is lost.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: min(self.copied.values(), default=step) >= step, _LAG):
                late = [host for host, copied in self.copied.items() if copied < step]
                _log.warning(
                    "step %d of hosts %s is not copied yet; it would be lost with these hosts", step, late
                )

    def _set_copied(self, host: int, step: int) -> None:
        with self._changed:
            self.copied[host] = step
            self._changed.notify_all()

    def wake(self) -> None:
        """Look for new steps of the other hosts now, because this host has saved one."""
        self._thread.loop.call_soon_threadsafe(self._wake.set)

    def close(self) -> None:
        """Stop the server and the copying."""
        self._thread.loop.call_soon_threadsafe(self._stop.set)
        with contextlib.suppress(TStoreError):
            self._ended.result(_START)
        self._thread.loop.call_soon_threadsafe(self._thread.loop.stop)
        self._thread.join(_START)
        if not self._thread.is_alive():
            self._thread.loop.close()

    async def _copy(self, offer: Offer, folder: str, by: int) -> None:
        """Copy the store of a host again and again, as it grows; a failure is logged when it begins."""
        source = connect(f"{offer.url}/{folder}", {"token": offer.token, "retry_timeout": 5})
        target = LocalStorage(os.path.join(self._root, f"{folder}-at-{by:05d}"))
        version, failing = 0, False
        try:
            while True:
                try:
                    async with asyncio.timeout(600), await open_store(source, "r") as store:
                        newest = await store.log.reader.newest()
                        if newest > version:
                            report = await copy_to(store, target)
                            await delete_condemned(target, store.log.reader.records.chain.log_id, version)
                            version = report.version
                            self._set_copied(offer.host, max(steps_of(await store.tags()), default=-1))
                    failing = False
                except NotAStore:  # the host has not saved yet
                    pass
                except Exception as error:  # an unforeseen one must not end the copying in silence
                    if not failing:
                        unforeseen = not isinstance(error, TStoreError | TimeoutError)
                        text = "host %d can't be copied by host %d; it tries again: %s"
                        _log.warning(text, offer.host, by, error, exc_info=unforeseen)
                    failing = True
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _POLL)
                self._wake.clear()
        finally:
            await source.close()


async def _all(work: Sequence[Any]) -> None:
    await asyncio.gather(*work)


def _pass_error(ended: Future[None], listening: Future[str]) -> None:
    if not listening.done():
        error = None if ended.cancelled() else ended.exception()
        listening.set_exception(error or RuntimeError("the server of the local tier has ended"))

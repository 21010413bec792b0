"""The rounds of `bench.backends`: what a host does, and the figures of all contenders on each server."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from bench import machine, report
from bench.backends.servers import SERVERS, Place
from bench.bars import Bar
from bench.contender import Contender
from bench.figures import NONE, median_of
from bench.peers.clients import Aiohttp, Fsspec
from bench.peers.tensorstore import TensorStoreServed
from bench.peers.tstore import TStoreServed
from bench.processes import Hosts, until
from bench.rounds import Rounds
from bench.workloads import Arrays, Weights

ARRAYS = 8


class Peer(NamedTuple):
    """A contender, the servers on which it saves and restores, and those on which only restores are measured."""

    contender: type[Contender]
    servers: tuple[str, ...]
    reads: tuple[str, ...] = ()


CONTENDERS = {
    "tstore": Peer(TStoreServed, ("local", "serve", "gcs", "s3"), ("nginx",)),
    "tensorstore": Peer(TensorStoreServed, ("local", "gcs"), ("serve", "nginx")),
    "aiohttp": Peer(Aiohttp, ("serve",), ("nginx",)),
    "fsspec": Peer(Fsspec, ("gcs", "s3")),
}


@dataclass(frozen=True)
class Served(Weights):
    """A checkpoint, and where it is saved."""

    server: str = ""
    place: Place | None = None


class HostProcess:
    """One of the hosts of a checkpoint; see `bench.processes.Hosts`."""

    def __init__(self, number: int, count: int, make: type[Contender], work: Served) -> None:
        warnings.simplefilter("ignore")
        self._contender = make(number, count, Path(), work)

    def ready(self) -> None:
        """Make this host's part of the arrays."""
        len(self._contender.state)

    def run(self, start: float, do: str, step: int) -> tuple[float, int, dict[str, int]]:
        """Save or restore at `start`; return the time of the end, the peak beyond the arrays, and the requests."""
        before = machine.reset_peak()
        until(start)
        restored: Arrays = {}
        if do == "save":
            self._contender.save(step, True)
        else:
            restored = self._contender.restore(step, "same")
        ended, peak = time.monotonic(), machine.peak() - before
        if restored and not all(np.array_equal(restored[n], a) for n, a in self._contender.arrays.items()):
            raise ValueError("the restored values differ")
        peak -= sum(array.nbytes for array in restored.values())
        return ended, peak, getattr(self._contender, "requests", {})


class Measurement(Rounds):
    """All rounds on all servers: the seconds of a save and of a restore, by server and contender."""

    work: Served
    hosts: int

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests: dict[str, dict[str, dict[str, int]]] = {}
        self.peaks: dict[str, int] = {}

    def round(self, server: str, turn: int) -> None:
        contenders = [name for name, each in CONTENDERS.items() if server in (*each.servers, *each.reads)]
        names = self.names(contenders, turn, server)
        if names:
            with SERVERS[server](self.folder) as place:
                for name in names:
                    with self.attempt(server, name):
                        self._measure(server, name, place, turn)

    def _measure(self, server: str, name: str, place: Place, turn: int) -> None:
        peer, work = CONTENDERS[name], replace(self.work, server=server, place=place)
        with Hosts(self.hosts, HostProcess, peer.contender, work) as hosts:
            hosts.call("ready")
            for do in ("save", "restore"):  # a rehearsal: the first use of a client costs more
                hosts.results(hosts.call_at_once("run", do, _REHEARSAL + turn)[1])
            for do in ("save", "restore"):
                start, numbers = hosts.call_at_once("run", do, turn)
                done = hosts.results(numbers)
                if do == "restore" or server in peer.servers:
                    self.add(server, name, turn, {do: max(ended for ended, _, _ in done) - start})
                if name == "tstore":
                    requests = sum((Counter(requests) for _, _, requests in done), Counter())
                    self.requests.setdefault(server, {})[do] = dict(requests)
                    key = f"{server} {do}"
                    self.peaks[key] = max(self.peaks.get(key, 0), *(peak for _, peak, _ in done))

    def bars(self) -> list[Bar]:
        needs = [(s, *each) for s in ("serve", "nginx") for each in (("aiohttp", "restore", 0.9), _TENSORSTORE)]
        needs += [("gcs", "fsspec", do, 0.9) for do in ("save", "restore")]
        out = []
        for server, other, do, need in needs:
            if server in self.results:
                figures = self.results[server]
                by = figures.get(other, NONE).ratio(do, figures.get("tstore", NONE))
                out.append(Bar(f"{server}: tstore {do} ÷ {other}", need, by))
        for key, peak in self.peaks.items():
            what = f"{key}: tstore memory beyond the arrays"
            out.append(Bar(what, 256, peak / report.MIB, most=True, unit=" MiB"))
        return out

    def tables(self) -> Iterator[Table]:
        for server, figures in self.results.items():
            rows = []
            for name, f in figures.items():
                row = [name]
                for do in ("save", "restore"):
                    speeds = sorted(self.work.nbytes / 1e9 / seconds for seconds in f.of(do).values())
                    row += (
                        [f"{median_of(speeds):.3g}", f"{speeds[0]:.3g}–{speeds[-1]:.3g}"] if speeds else ["–", ""]
                    )
                rows.append(row)
            requests = self.requests.get(server, {})
            notes = [f"tstore's requests, {do}: {_counts(n)}" for do, n in requests.items() if n]
            yield report.table(server, ("", "save GB/s", "min–max", "restore GB/s", "min–max"), rows, notes)

    def data(self) -> dict[str, Any]:
        seconds = {
            server: {name: {do: list(by.values()) for do, by in f.values.items()} for name, f in figures.items()}
            for server, figures in self.results.items()
        }
        errors = {f"{s} {name}": f.error for s, by in self.results.items() for name, f in by.items() if f.error}
        return {"seconds": seconds, "requests": self.requests, "peaks": self.peaks, "errors": errors}


_REHEARSAL = 1000  # the first step of rehearsals
_TENSORSTORE = ("tensorstore", "restore", 1.2)


def _counts(requests: dict[str, int]) -> str:
    return f"{sum(requests.values())} ({', '.join(f'{n} {o}' for o, n in sorted(requests.items()))})"

"""Tiers: how long a local save blocks and takes, how fast a host copies another, and how soon hosts decide.

    pip install -e '.[bench]' && python -m bench.tiers --dir /dev/shm

In each round, one host saves its state to a local store, beside a copy of the state in memory and a parallel
copy of it into files. Then a host copies that store from a server on loopback, beside the same bytes over plain
HTTP. At last many hosts, which are tasks of this process, decide from which step to go on, through a folder.
Figures are medians of rounds, ratios those of the paired ratios. Linux only.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np

import tstore.sync
from bench import program
from bench.backends.servers import announced
from bench.bars import Bar
from bench.report import as_data, table
from bench.rounds import Rounds
from tstore.core.storage.local.store import LocalStorage
from tstore.tiers.objects import Held, Offer, Part, Saved
from tstore.tiers.resume import Round

WORKERS = 2
MOVES = (
    "memory copy",
    "copy into files",
    "local save: blocked",
    "local save: committed",
    "HTTP",
    "copy of a host",
)


class Tiers(Rounds):
    """Rounds of local saves, copies and decisions; what moves bytes is in MB per second."""

    def saves(self, turn: int, state: dict[str, Any]) -> None:
        """Save the state to a local store, beside the copies."""
        tstore_sync = tstore.sync
        size = sum(array.nbytes for array in state.values())
        folder = self.folder / f"local-{turn}"
        tiers = tstore.Tiers(folder, self.folder / f"durable-{turn}")
        checkpoints = tstore_sync.Checkpointer(tiers)
        room = {name: np.ones_like(array) for name, array in state.items()}
        for step in range(1, 4):  # the first ones grow the memory for copies
            for array in state.values():
                array += 1
            copied = self._timed(lambda: _copy(state, room))
            written = self._timed(lambda: _write(state, self.folder / "files"))
            begun = time.perf_counter()
            save = checkpoints.save(step, state)
            blocked = time.perf_counter() - begun
            save.wait()
            committed = time.perf_counter() - begun
        for row, seconds in zip(MOVES[:4], (copied, written, blocked, committed), strict=True):
            self.add("bytes", row, turn, {"rate": size / seconds / 1e6})
        [store] = {path.parent for path in folder.glob("*/*/tstore.json")}
        self.copies(turn, store)
        shutil.rmtree(folder)

    def copies(self, turn: int, store: Path) -> None:
        """Copy a store from a server on loopback, beside its packs over plain HTTP."""
        packs = sorted(store.glob("txn/*/pack-*"))
        size = sum(path.stat().st_size for path in packs)
        with announced("-m", "tstore", "serve", str(store), "--read-only") as (_, document):
            keys = [path.relative_to(store) for path in packs]

            def fetch() -> None:
                with ThreadPoolExecutor(WORKERS) as pool:
                    list(pool.map(lambda key: _fetch(f"{document['url']}/{key}", self.folder / "fetched"), keys))

            plain = self._timed(fetch)
            target = self.folder / f"copy-{turn}"
            copied = self._timed(lambda: tstore.sync.copy(document["url"], target))
        shutil.rmtree(target)
        for row, seconds in zip(MOVES[4:], (plain, copied), strict=True):
            self.add("bytes", row, turn, {"rate": size / seconds / 1e6})

    def decision(self, turn: int, hosts: int) -> None:
        """Let hosts offer one part each, and decide."""
        storage = LocalStorage(self.folder / f"decisions-{turn}")
        saved = Saved(10, 0, "save")

        async def host(number: int) -> None:
            held = (Held(Part("job", saved, number, hosts), "store", 1),)
            offer = Offer(number, hosts, f"{number}", "http://127.0.0.1:1", "token", "domain", held)
            decided = await Round(storage, "job", "0" * 32, number, hosts).run(offer, [], 60)
            assert decided.saved == saved

        async def run() -> None:
            await asyncio.gather(*map(host, range(hosts)))

        self.add("decisions", str(hosts), turn, {"seconds": self._timed(lambda: asyncio.run(run()))})

    def _timed(self, work: Any) -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun


def _copy(state: dict[str, Any], room: dict[str, Any]) -> None:
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda name: np.copyto(room[name], state[name]), state))


def _write(state: dict[str, Any], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda name: state[name].tofile(folder / name), state))


def _fetch(url: str, to: Path) -> None:
    with urllib.request.urlopen(url) as response, open(f"{to}-{url.rpartition('/')[2]}", "wb") as file:
        shutil.copyfileobj(response, file, 1 << 20)


@program.command(__doc__)
@program.rounds_option(7)
@click.option("--mib", default=256, type=click.IntRange(8), help="MiB of the state of a host.")
@click.option("--hosts", default=64, type=program.COUNT, help="Hosts that decide.")
@program.json_option
@program.dir_option
def main(run: program.Run, rounds: int, mib: int, hosts: int) -> None:
    bench = Tiers(run.folder, run.log)
    state = {f"w{i}": np.ones((mib << 20) // 8 // 4, "float32") for i in range(8)}
    for turn in range(rounds):
        run.log(f"round {turn + 1} of {rounds}")
        bench.saves(turn, state)
        bench.decision(turn, hosts)
    moved, decisions = bench.results["bytes"], bench.results["decisions"]
    rows = [[row, f"{moved[row].median('rate'):.0f}"] for row in MOVES]
    run.show(table("MB/s (medians)", ("", "MB/s"), rows))
    memory, files, blocked, committed, http, copied = (moved[row] for row in MOVES)
    bars = [
        Bar("caller blocked by a local save ÷ a copy in memory", 1.15, memory.ratio("rate", blocked), most=True),
        Bar("a local save ÷ a parallel copy into files", 0.8, committed.ratio("rate", files)),
        Bar("a copy of a host ÷ plain HTTP", 0.7, copied.ratio("rate", http)),
        Bar(f"decision of {hosts} hosts", 2, decisions[str(hosts)].median("seconds"), most=True, unit=" s"),
    ]
    run.finish(bars, **as_data(bench.results))


if __name__ == "__main__":
    main()

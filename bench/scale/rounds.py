"""The measurements of `bench.scale`, in interleaved rounds of all contenders.

Each piece of work runs in a new process, whose cost is measured from the first use of a library on. Not measured
are: importing the library, making values, emptying the folder, syncing the disk, and filling or evicting the page
cache. A peer is skipped if a rehearsal of a part of the work tells that all of it would take more than `LIMIT`
seconds, and gets no more rounds of a work that has taken so long.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench import machine
from bench.cost import Cost, mean
from bench.processes import Hosts
from bench.rounds import LIMIT, Rounds, Skipped
from bench.save.peers import CONTENDERS as SAVERS
from bench.save.workloads import WORKLOADS, Workload
from bench.scale.contenders import GROUP, WIDTH, array_name, value_at
from bench.scale.group import RealHost, VirtualHosts
from bench.scale.peers import CONTENDERS
from bench.scale.saves import SaveProcess, speeds_of
from bench.writers.rounds import Bench as Writers
from bench.writers.stores import RawFiles

CHANGES = 200
"""The commits of the row `change`: more than three roots are written meanwhile."""
PEERS = ("ts-ocdbt", "ts-file", "icechunk", "safetensors")
"""The contenders that a run can leave out."""
RESERVED = 16 << 20
"""Bytes of a state from which on its memory is provided before it is saved or restored: see `machine.Reserve`."""
POLLED = 10
"""The commits between two polls of the row `poll`."""
FEW_HOSTS = 64
PLACES = {"disk": None, "tmpfs": Path("/dev/shm")}

TITLES = {name: each.title for name, each in CONTENDERS.items()} | {n: each.title for n, each in SAVERS.items()}
TITLES["raw-files"] = RawFiles.title

_REHEARSAL = 50  # how much smaller a rehearsal is
_SAVERS = {
    "leaves": ("raw1", "safetensors", "ts-ocdbt", "tstore"),
    "chunks64k": ("raw1", "raw2", "ts-file", "ts-ocdbt", "tstore"),
}
_ROOT = Path(__file__).resolve().parents[2]


class Sizes(NamedTuple):
    """How much the rows measure: numbers, `size` in MiB, and `seconds` of small commits."""

    chunks: int
    arrays: int
    leaves: tuple[int, ...]
    hosts: int
    commits: int
    size: int
    seconds: float


class Bench(Rounds):
    """Runs rows in a folder; `results` has the figures by piece of work and contender, by the fields of `Cost`."""

    def __init__(
        self, folder: Path, sizes: Sizes, peers: Sequence[str], before: Path | None, log: Callable[[str], None]
    ) -> None:
        super().__init__(TITLES, PEERS, peers, log)
        self.folder, self.sizes, self.before = folder, sizes, before
        self._reserve = machine.Reserve()

    def chunks(self, turn: int, rows: Sequence[str]) -> None:
        """Write many chunks; open the store and read one; change one, again and again."""
        chunks = self.sizes.chunks
        for name in self.names(CONTENDERS, turn, "write"):
            with self.attempt("write", name):
                self._rehearse(name, turn, "write", chunks)
                self._measure("write", name, turn, "write", chunks)
            if self.figures("write", name).error:
                continue
            for row, array, index in (("open", "big", chunks // 2 * WIDTH), ("beside", "small", 1)):
                if "open" in rows:
                    with self.attempt(row, name):
                        self._measure(row, name, turn, "read_one", array, index, value_at(index))
            if "change" in rows:
                with self.attempt("change", name):
                    changed = [n * 7919 % chunks for n in range(min(CHANGES, self.sizes.commits))]
                    self._measure("change", name, turn, "change", changed, turn)

    def arrays(self, turn: int) -> None:
        """Write many arrays in groups; open the store and read one, or a group; list a group."""
        count = self.sizes.arrays
        for name in self.names(CONTENDERS, turn, "arrays: write"):
            with self.attempt("arrays: write", name):
                self._rehearse(name, turn, "write_arrays", count)
                self._measure("arrays: write", name, turn, "write_arrays", count)
                middle = count // 2
                self._measure("arrays: read one", name, turn, "read_one", array_name(middle), 0, middle)
                self._measure("arrays: restore a group", name, turn, "restore_group", middle // GROUP)
                self._measure("arrays: list a group", name, turn, "list_one", middle // GROUP)

    def poll(self, turn: int) -> None:
        """Read what another process has committed, again and again; figures are of the first and last tenth."""
        commits = self.sizes.commits
        for name in self.names(CONTENDERS, turn, "poll: first tenth"):
            with self.attempt("poll: first tenth", name):
                machine.clear(self.folder)
                self._alone(name, "write", commits)
                one = partial(Hosts, 1, CONTENDERS[name], self.folder)
                with one() as writer, one() as reader:
                    reader.call("read_one", "big", 0, value_at(0))
                    costs, began = [], time.monotonic()
                    for first in range(0, commits, POLLED):
                        chunks = [n * 7919 % commits for n in range(first, min(first + POLLED, commits))]
                        writer.call("change", chunks, -first)
                        costs += reader.call("read_one", "big", chunks[-1] * WIDTH, -first)
                        if time.monotonic() - began > LIMIT:
                            raise Skipped(f"{commits:,} commits take more than {LIMIT:.0f} s")
                tenth = max(1, len(costs) // 10)
                self.add("poll: first tenth", name, turn, mean(costs[:tenth])._asdict())
                self.add("poll: last tenth", name, turn, mean(costs[-tenth:])._asdict())

    def leaves(self, turn: int) -> None:
        """Save and restore many small arrays."""
        for count in self.sizes.leaves:
            self._save_and_restore(Workload("leaves", f"{count:,} leaves", count, (1024,), (1024,)), turn)

    def chunks64k(self, turn: int) -> None:
        """Save and restore one array in chunks of 64 KiB."""
        shape = (128 * self.sizes.size // 4, 8192)
        self._save_and_restore(Workload("chunks64k", "chunks64k", 1, shape, (128, 128), chunked=True), turn)

    def _save_and_restore(self, workload: Workload, turn: int) -> None:
        title, once = workload.title, workload.nbytes
        steps = (
            ("save", "save", machine.clear, 2 * once),
            ("restore warm", "restore", machine.warm, once),
            ("restore cold", "restore", machine.evict, 2 * once),
        )
        for name in self.names(_SAVERS[workload.name], turn, f"{title}: save"):
            with self.attempt(f"{title}: save", name), Hosts(1, SaveProcess, name, workload) as process:
                process.call("rehearse", self.folder)
                for what, do, prepare, spare in steps:
                    prepare(self.folder)
                    if spare > RESERVED:
                        self._reserve.acquire(spare)
                    self._reserve.release()
                    [cost] = process.call(do, self.folder)
                    self.add(f"{title}: {what}", name, turn, cost._asdict())

    def group(self, turn: int) -> None:
        """Commit many chunks from virtual hosts: all of them, and `FEW_HOSTS` with as many chunks each.

        Then commit all chunks from `FEW_HOSTS` processes on disk; the cost is that of the busiest process.
        """
        chunks = self.sizes.chunks // self.sizes.hosts
        for hosts in (FEW_HOSTS, self.sizes.hosts):
            with self.attempt(f"group: {hosts} hosts", "tstore"), Hosts(1, VirtualHosts) as process:
                [cost] = process.call("commit", hosts, chunks, turn)
                self.add(f"group: {hosts} hosts", "tstore", turn, cost._asdict())
        machine.clear(self.folder)
        work = f"group: {FEW_HOSTS} processes"
        with self.attempt(work, "tstore"), Hosts(FEW_HOSTS, RealHost, self.folder) as processes:
            processes.call("write", self.sizes.chunks // FEW_HOSTS)
            _, numbers = processes.call_at_once("commit")
            costs = [Cost(*cost) for cost in processes.results(numbers)]
            busiest = max(costs, key=lambda cost: cost.cpu)
            self.add(work, "tstore", turn, busiest._replace(seconds=max(c.seconds for c in costs))._asdict())

    def commits(self, turn: int) -> None:
        """Make small commits with fsync from one process, from eight, and from eight tasks of one."""
        for place, folder in PLACES.items():
            parent = folder or self.folder.parent  # not inside the store that other rows leave in the folder
            writers = Writers(parent / f"{self.folder.name}-commits", self.log)
            try:
                for what, hosts, tasks in (("1 process", 1, 1), ("8 processes", 8, 1), ("8 tasks", 1, 8)):
                    work = f"commits, {place}: {what}"
                    if not os.access(parent, os.W_OK):
                        self.figures(work, "tstore").error = f"skipped: {parent} can't be written"
                        continue
                    former = len(writers.rows)
                    writers.independent(hosts, tasks, True, turn, self.sizes.seconds)
                    self._add_commits(work, turn, writers.rows[former:])
            finally:
                shutil.rmtree(writers.folder, ignore_errors=True)

    def _add_commits(self, work: str, turn: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the figures of rows of `bench.writers`."""
        for row in rows:
            name = "ts-ocdbt" if row["contender"] == "ts-shared" else f"{row['contender']}"
            if "error" in row:
                self.figures(work, name).error = f"failed: {row['error']}"
            else:
                self.add(work, name, turn, {"seconds": 1 / row["rate"], "cpu": row["cpu_ms"] / 1e3})

    def large(self, turn: int) -> None:
        """Run `bench.save` on its large state, in this checkout and in the one of `before`."""
        checkouts = {"tstore": _ROOT} | ({} if self.before is None else {"before": self.before})
        for name in self.names(checkouts, turn, "large"):
            with self.attempt("large", name):
                for measure, speed in speeds_of(checkouts[name], self.folder).items():
                    seconds = WORKLOADS["large"].nbytes / 1e9 / speed
                    self.add(f"large: {measure}", name, turn, {"seconds": seconds})

    def _alone(self, name: str, do: str, *arguments: Any) -> Cost:
        """Return the cost of a call in a new process."""
        with Hosts(1, CONTENDERS[name], self.folder) as process:
            [cost] = process.call(do, *arguments)
        return Cost(*cost)

    def _measure(self, work: str, name: str, turn: int, do: str, *arguments: Any) -> None:
        """Add the cost of a call in a new process."""
        self.add(work, name, turn, self._alone(name, do, *arguments)._asdict())

    def _rehearse(self, name: str, turn: int, do: str, count: int) -> None:
        """Empty the folder. Raise `Skipped` if a peer would take too long."""
        machine.clear(self.folder)
        if turn or name == "tstore":
            return
        few = max(1, count // _REHEARSAL)
        seconds = self._alone(name, do, few).seconds * count / few
        if seconds > LIMIT:
            raise Skipped(f"it would take about {seconds:,.0f} s")
        machine.clear(self.folder)

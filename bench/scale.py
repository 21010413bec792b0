"""Costs that grow with a store: millions of chunks, many arrays, thousands of commits, beside peers.

    pip install -e '.[bench]' && python -m bench.scale --json figures.json

Measured are time, CPU time, peak memory and the bytes read and written, each in a new process, of tstore,
tensorstore's ocdbt, icechunk and safetensors where they can do the work. Figures are medians of interleaved
rounds, ratios are medians of the paired ratios of the rounds: quote ratios. Checks what is read, and asserts no
figure. Peers that are not installed, or would take too long, are left out. Linux only; needs 12 GB of free memory
and 8 GB of free disk.

Each piece of work runs in a new process, whose cost is measured from the first use of a library on. Not measured
are: importing the library, making values, emptying the folder, syncing the disk, and filling or evicting the page
cache. A peer is skipped if a rehearsal of a part of the work tells that all of it would take more than four
minutes, and gets no more rounds of a work that has taken so long.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench import machine, program, save
from bench.bars import Bar
from bench.chunks import ChunkProcess
from bench.contender import Contender
from bench.cost import Cost, mean
from bench.figures import NONE, lead
from bench.group import RealHost, VirtualHosts
from bench.peers.icechunk import Icechunk
from bench.peers.raw import RawFiles
from bench.peers.tensorstore import TensorStoreCaching
from bench.peers.tstore import TStore
from bench.processes import Hosts
from bench.report import MIB, as_data, cost_table
from bench.rounds import LIMIT, Results, Skipped
from bench.states import CLEAR, EVICT, WARM, StateRounds
from bench.workloads import GROUP, WIDTH, Weights, array_name, chunks64k, leaves, value_at
from bench.writers.rounds import Bench as Writers

CONTENDERS: dict[str, type[Contender]] = {"tstore": TStore, "ts-ocdbt": TensorStoreCaching, "icechunk": Icechunk}
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

_REHEARSAL = 50  # how much smaller a rehearsal is
_SAVERS = {
    "leaves": ("raw1", "safetensors", "ts-ocdbt", "tstore"),
    "chunks64k": ("raw1", "raw2", "ts-file", "ts-ocdbt", "tstore"),
}
_ROOT = Path(__file__).resolve().parents[1]


class Sizes(NamedTuple):
    """How much the rows measure: numbers, `size` in MiB, and `seconds` of small commits."""

    chunks: int
    arrays: int
    leaves: tuple[int, ...]
    hosts: int
    commits: int
    size: int
    seconds: float


class Bench(StateRounds):
    """Runs rows in a folder; `results` has the figures by piece of work and contender, by the fields of `Cost`."""

    contenders = CONTENDERS | save.CONTENDERS | {"raw-files": RawFiles}
    sizes: Sizes
    before: Path | None = None

    def chunks(self, turn: int, rows: Sequence[str]) -> None:
        """Write many chunks; open the store and read one; change one, again and again."""
        chunks = self.sizes.chunks
        for name in self.names(CONTENDERS, turn, "write"):
            with self.attempt("write", name):
                self._rehearse(name, turn, "write_chunks", chunks)
                self._measure("write", name, turn, "write_chunks", chunks)
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
        middle = count // 2
        for name in self.names(CONTENDERS, turn, "arrays: write"):
            with self.attempt("arrays: write", name):
                self._rehearse(name, turn, "write_arrays", count)
                self._measure("arrays: write", name, turn, "write_arrays", count)
                self._measure("arrays: read one", name, turn, "read_one", array_name(middle), 0, middle)
                self._measure("arrays: restore a group", name, turn, "restore_group", middle // GROUP)
                self._measure("arrays: list a group", name, turn, "list_one", middle // GROUP)

    def poll(self, turn: int) -> None:
        """Read what another process has committed, again and again; figures are of the first and last tenth."""
        commits = self.sizes.commits
        for name in self.names(CONTENDERS, turn, "poll: first tenth"):
            with self.attempt("poll: first tenth", name):
                machine.clear(self.folder)
                self._alone(name, "write_chunks", commits)
                with self._process(name) as writer, self._process(name) as reader:
                    reader.call("read_one", "big", 0, value_at(0))
                    costs, began = [], time.monotonic()
                    for first in range(0, commits, POLLED):
                        chunks = [n * 7919 % commits for n in range(first, min(first + POLLED, commits))]
                        writer.call("change", chunks, -first)
                        costs += reader.call("read_one", "big", chunks[-1] * WIDTH, -first)
                        if time.monotonic() - began > LIMIT:
                            raise Skipped(f"{commits:,} commits take more than {LIMIT:.0f} s")
                tenth = max(1, len(costs) // 10)
                self.add("poll: first tenth", name, turn, mean(costs[:tenth]))
                self.add("poll: last tenth", name, turn, mean(costs[-tenth:]))

    def leaves(self, turn: int) -> None:
        """Save and restore many small arrays."""
        for count in self.sizes.leaves:
            self._save_and_restore(leaves(count, "{:,} leaves", grouped=False), f"{count:,} leaves", turn)

    def chunks64k(self, turn: int) -> None:
        """Save and restore one array in chunks of 64 KiB."""
        self._save_and_restore(chunks64k(self.sizes.size), "chunks64k", turn)

    def _save_and_restore(self, work: Weights, title: str, turn: int) -> None:
        once = work.nbytes
        steps: tuple[tuple[str, Any, int, str, tuple[Any, ...]], ...] = (
            ("save", CLEAR, 2 * once, "save", (0, True)),
            ("restore warm", WARM, once, "restore", (0, "same", True)),
            ("restore cold", EVICT, 2 * once, "restore", (0, "same", True)),
        )
        for name in self.names(_SAVERS[work.name], turn, f"{title}: save"):
            with self.attempt(f"{title}: save", name), self.job(name, work) as job:
                job.call("rehearse")
                job.call("make_state")
                for what, prepare, spare, do, arguments in steps:
                    prepare(self.folder)
                    if spare > RESERVED:
                        self.reserve.acquire(spare)
                    self.reserve.release()
                    [cost] = job.call(do, *arguments)
                    self.add(f"{title}: {what}", name, turn, cost)

    def group(self, turn: int) -> None:
        """Commit many chunks from virtual hosts: all of them, and `FEW_HOSTS` with as many chunks each.

        Then commit all chunks from `FEW_HOSTS` processes on disk; the cost is that of the busiest process.
        """
        chunks = self.sizes.chunks // self.sizes.hosts
        for hosts in (FEW_HOSTS, self.sizes.hosts):
            with self.attempt(f"group: {hosts} hosts", "tstore"), Hosts(1, VirtualHosts) as process:
                [cost] = process.call("commit", hosts, chunks, turn)
                self.add(f"group: {hosts} hosts", "tstore", turn, cost)
        machine.clear(self.folder)
        work = f"group: {FEW_HOSTS} processes"
        with self.attempt(work, "tstore"), Hosts(FEW_HOSTS, RealHost, self.folder) as processes:
            processes.call("write", self.sizes.chunks // FEW_HOSTS)
            _, numbers = processes.call_at_once("commit")
            costs = [Cost(*cost) for cost in processes.results(numbers)]
            busiest = max(costs, key=lambda cost: cost.cpu)
            self.add(work, "tstore", turn, busiest._replace(seconds=max(c.seconds for c in costs)))

    def commits(self, turn: int) -> None:
        """Make small commits with fsync from one process, from eight, and from eight tasks of one."""
        for place, folder in PLACES.items():
            parent = folder or self.folder.parent  # not inside the store that other rows leave in the folder
            writers = Writers(parent / f"{self.folder.parent.name}-commits", self.log)
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
                machine.clear(self.folder)
                for measure, speed in speeds_of(checkouts[name], self.folder).items():
                    seconds = save.WORKLOADS["large"].nbytes / 1e9 / speed
                    self.add(f"large: {measure}", name, turn, {"seconds": seconds})

    def _process(self, name: str) -> Hosts:
        return Hosts(1, ChunkProcess, CONTENDERS[name], self.folder)

    def _alone(self, name: str, do: str, *arguments: Any) -> Cost:
        """Return the cost of a call in a new process."""
        with self._process(name) as process:
            [cost] = process.call(do, *arguments)
        return Cost(*cost)

    def _measure(self, work: str, name: str, turn: int, do: str, *arguments: Any) -> None:
        """Add the cost of a call in a new process."""
        self.add(work, name, turn, self._alone(name, do, *arguments))

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


def speeds_of(checkout: Path, folder: Path) -> dict[str, float]:
    """Return the GB/s of tstore in one round of `bench.save` on the large state, with the code of a checkout."""
    figures = folder / "figures.json"
    options = ["--only", "large", "--peers", "raw1", "--rounds", "1", "--dir", f"{folder}", "--json", f"{figures}"]
    environment = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'codecs'}"}
    command = [sys.executable, "-m", "bench.save", *options]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    speeds: dict[str, float] = json.loads(figures.read_text())["workloads"]["large"]["tstore"]["median"]
    return speeds


_RAW = ("raw1", "raw2")
_TENSORSTORE = ("ts-file", "ts-ocdbt")


def remarks(results: Results) -> list[str]:
    """Return what the table does not say."""
    if not any(work.startswith("group") for work in results):
        return []
    return [
        "group: seconds from the last byte to the commit, virtual for virtual hosts; the costs of the finisher"
    ]


def bars(results: Results, sizes: Sizes) -> list[Bar]:
    """Return the bars of the rows that ran."""
    out: list[Bar] = []

    def most(work: str, *needs: tuple[str, float, str, float, str]) -> None:
        """Add bars for measures of tstore: the measure, the most, its unit, the factor to it, and what it is."""
        if work in results:
            mine = results[work].get("tstore", NONE)
            for measure, need, unit, factor, what in needs:
                out.append(Bar(f"{work}: {what}", need, mine.median(measure) * factor, most=True, unit=unit))

    def grown(work: str, former: str, measure: str, need: float, what: str) -> None:
        """Add a bar for the ratio of a measure to that of another work."""
        if work in results:
            by = results[work].get("tstore", NONE).ratio(measure, results[former]["tstore"])
            out.append(Bar(f"{work}: {what}", need, by, most=True))

    def faster(work: str, peers: tuple[str, ...], need: float, what: str) -> None:
        """Add a bar for the time of the fastest peer ÷ that of tstore."""
        if work in results:
            out.append(Bar(f"{work}: {what} ÷ tstore", need, lead(results[work], peers)))

    memory = ("memory", 256, " MiB", 1 / MIB)
    most("write", (*memory, "memory beyond the array"), ("cpu", 1.5, " µs", 1e6 / sizes.chunks, "CPU a chunk"))
    few_bytes = ("read", 4, " MiB", 1 / MIB, "bytes read")
    for work in ("open", "beside"):
        most(work, ("cpu", 40, " ms", 1e3, "CPU"), ("memory", 24, " MiB", 1 / MIB, "memory"), few_bytes)
    written = ("written", 64, " KiB", 1 / 1024, "bytes written a commit")
    most("change", ("cpu", 10, " ms", 1e3, "CPU a commit"), written)
    most("arrays: read one", ("cpu", 60, " ms", 1e3, "CPU"))
    most("arrays: restore a group", ("cpu", 60, " ms", 1e3, "CPU"), few_bytes)
    most("arrays: list a group", ("cpu", 20, " ms", 1e3, "CPU"))
    for count in sizes.leaves:
        for what in ("save", "restore warm"):
            faster(f"{count:,} leaves: {what}", ("safetensors",), 0.6, "safetensors")
            faster(f"{count:,} leaves: {what}", ("ts-ocdbt",), 6, "tensorstore ocdbt")
    few, many = (f"group: {hosts} hosts" for hosts in (FEW_HOSTS, sizes.hosts))
    finisher = (("cpu", 10, " s", 1, "CPU of the finisher"), (*memory, "memory of the finisher"))
    most(many, *finisher)
    grown(many, few, "seconds", 4, f"delay ÷ that of {FEW_HOSTS} hosts")
    most(f"group: {FEW_HOSTS} processes", *finisher)
    for place in PLACES:
        work = f"commits, {place}: 1 process"
        most(work, ("cpu", 0.5, " ms", 1e3, "CPU a commit"))
        if work in results:
            beyond = results[work].get("tstore", NONE).beyond("cpu", results[work].get("raw-files", NONE))
            out.append(Bar(f"{work}: CPU a commit beyond raw", 0.5, 1e3 * beyond, most=True, unit=" ms"))
        faster(f"commits, {place}: 8 processes", ("ts-ocdbt",), 2, "tensorstore ocdbt")
        faster(f"commits, {place}: 8 tasks", ("ts-ocdbt",), 1, "tensorstore ocdbt")
    grown("poll: last tenth", "poll: first tenth", "cpu", 1.5, "CPU of a poll ÷ first tenth")
    faster("chunks64k: restore warm", _TENSORSTORE, 2.5, "better tensorstore")
    faster("chunks64k: restore warm", _RAW, 0.75, "raw")
    faster("chunks64k: restore cold", _RAW, 0.9, "raw")
    for work in results:
        if work.startswith("large: "):
            faster(work, ("before",), 0.97, "before")
    return out


CHUNKS_ROWS = ("write", "open", "change")
ROWS = (*CHUNKS_ROWS, "arrays", "leaves", "group", "commits", "poll", "chunks64k", "large")
_CHANGES = f"Commits that a reader polls; change makes as many, at most {CHANGES}."


@program.command(__doc__, 170)
@program.rounds_option(3)
@program.names_option("--only", ROWS)
@program.names_option("--peers", PEERS, "; raw and tstore always run")
@click.option(
    "--chunks", default=10_000_000, type=program.COUNT, help="Chunks of 64 bytes, of one host or all hosts."
)
@click.option("--leaves", default="10000,100000", help="Numbers of leaves of 4 KiB, comma-separated.")
@click.option("--arrays", default=100_000, type=click.IntRange(10), help="Arrays in groups of ten.")
@click.option("--hosts", default=4096, type=click.IntRange(FEW_HOSTS), help="Virtual hosts of one commit.")
@click.option("--commits", default=5000, type=click.IntRange(10), help=_CHANGES)
@click.option("--size", default=256, type=click.IntRange(4), help="MiB of the array in chunks of 64 KiB.")
@click.option("--seconds", default=2.0, help="Duration of each measurement of small commits.")
@click.option(
    "--before", type=program.FOLDER, help="A checkout of an earlier commit, to compare with in the row large."
)
@program.json_option
@program.dir_option
def main(
    run: program.Run, rounds: int, only: list[str], peers: list[str], leaves: str, before: Path | None, **how: Any
) -> None:
    bench = Bench(run.folder / "store", run.log, PEERS, peers)
    bench.sizes = Sizes(leaves=tuple(map(int, leaves.split(","))), **how)
    bench.before = before and before.resolve()
    for turn in range(rounds):
        run.log(f"round {turn + 1} of {rounds}")
        if set(only) & set(CHUNKS_ROWS):
            bench.chunks(turn, only)
        for row in ROWS[len(CHUNKS_ROWS) :]:
            if row in only:
                getattr(bench, row)(turn)
    run.show(cost_table(bench.results, remarks(bench.results)))
    unit = "seconds and bytes: of one commit for change and commits, of one read for poll"
    works = as_data(bench.results)
    run.finish(bars(bench.results, bench.sizes), unit=unit, sizes=bench.sizes._asdict(), works=works)


if __name__ == "__main__":
    main()

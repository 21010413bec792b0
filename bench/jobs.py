"""Training jobs that save and restore: tstore with NumPy, JAX and PyTorch, beside Orbax, torch DCP and others.

    pip install -e '.[bench,jax,torch]' && python -m bench.jobs --json figures.json

JAX has one process with 8 CPU devices, PyTorch two processes with gloo. Measured are saves with and without fsync;
restores in the same and in another sharding, and of 10 % of the leaves; saves in the background, which block the
caller and slow a training loop; and the bytes that three steps write if 90 % of the state is frozen. Figures are
medians of interleaved rounds, ratios are medians of the paired ratios of the rounds: quote ratios. Checks the
restored values, and asserts no figure. Peers that are not installed are left out. Linux only; takes about 20
minutes on two cores, 14 GB of free memory and 10 GB of free disk.
"""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from bench import machine, program, report
from bench.bars import Bar
from bench.contender import Contender
from bench.cost import Cost
from bench.figures import Figures, lead
from bench.peers.on_jax import Levanter, Orbax, OrbaxUncompressed, TStoreJax
from bench.peers.on_torch import CheckpointFiles, TStoreTorch
from bench.peers.raw import RawDisk
from bench.peers.safetensors import Safetensors
from bench.peers.tstore import TStore
from bench.processes import Hosts
from bench.report import MIB, Form
from bench.rounds import Results
from bench.states import StateRounds, slowest
from bench.workloads import Weights, large
from bench.workloads import leaves as small_leaves

CONTENDERS: dict[str, type[Contender]] = {
    "raw": RawDisk,
    "safetensors": Safetensors,
    "tstore": TStore,
    "tstore-jax": TStoreJax,
    "orbax": Orbax,
    "orbax-plain": OrbaxUncompressed,
    "levanter": Levanter,
    "tstore-torch": TStoreTorch,
    "dcp": CheckpointFiles,
}
TSTORE = ("tstore", "tstore-jax", "tstore-torch")
ORBAX = ("orbax", "orbax-plain")
PEERS = (*ORBAX, "dcp")
WORKLOADS = ("large", "leaves")

COPY = "memory copy"
SAVES = {True: "save durable", False: "save not durable"}
RESTORES = {"same": "restore warm", "other": "reshard warm", "tenth": "restore 10 % warm"}
COLD = "restore cold"
WRITTEN = "written by frozen steps"  # share of the bytes of the state
STAGINGS = ("memory", "turns")

_FROZEN_STEPS = 3


def blocking(staging: str) -> str:
    """Return the measure of how long a save in the background blocks its caller."""
    return "blocking" if staging == "memory" else f"blocking, {staging}"


def slowed(staging: str) -> str:
    """Return the measure of the share by which training is slower during a save in the background."""
    return blocking(staging).replace("blocking", "training slowed")


def lock(staging: str) -> str:
    """Return the measure of the share of the time in which training waits for the lock during such a save."""
    return blocking(staging).replace("blocking", "waits for lock")


def peak(measure: str) -> str:
    """Return the measure of the peak memory during another measure, in bytes."""
    return f"{measure}: peak memory"


class JobRounds(StateRounds):
    """Rounds of all contenders; figures are seconds, unless they are peaks of memory or shares, by workload."""

    contenders = CONTENDERS
    large_only = ("orbax-plain",)

    def measure(self, hosts: Hosts, name: str, work: Weights, turn: int) -> None:
        contender, once = CONTENDERS[name], work.nbytes

        def add(measure: str, costs: list[Cost]) -> None:
            cost = slowest(costs)
            self.add(work.name, name, turn, {measure: cost.seconds})
            if measure != COPY:
                self.add(work.name, name, turn, {peak(measure): max(0.0, cost.memory)})

        hosts.call("make_state")
        add(COPY, self.timed(hosts, once, "copy_state"))
        for durable in reversed(contender.durabilities):
            machine.clear(self.folder)
            add(SAVES[durable], self.timed(hosts, 2 * once, "save", 1, durable))
        machine.warm(self.folder)
        for what, measure in RESTORES.items():
            if (what == "same" or contender.parts) and (what != "other" or contender.reshards):
                checked = turn == 0 and what != "tenth"
                add(measure, self.timed(hosts, once, "restore", 1, what, checked))
        machine.evict(self.folder)
        add(COLD, self.timed(hosts, 2 * once, "restore", 1, "same", False))
        if contender.parts and turn == 0:  # the bytes are the same in each round
            before = machine.stored_bytes(self.folder)
            for step in range(2, 2 + _FROZEN_STEPS):
                hosts.call("change_tenth")
                hosts.call("save", step, True)
            written = machine.stored_bytes(self.folder) - before
            self.add(work.name, name, turn, {WRITTEN: written / (_FROZEN_STEPS * once)})
        for staging in contender.stagings:
            machine.clear(self.folder)
            measured = self.timed(hosts, 2 * once, "save_while_training", 1, staging)
            add(blocking(staging), [cost for cost, _, _ in measured])
            for measure, at in ((slowed(staging), 1), (lock(staging), 2)):
                self.add(work.name, name, turn, {measure: sum(each[at] for each in measured) / len(measured)})


def tables(title: str, figures: dict[str, Figures]) -> list[Table]:
    """Return two tables: one of seconds, and one of peak memory, slower training and bytes written."""
    blocked = [blocking(staging) for staging in STAGINGS]
    times = [
        COPY,
        *blocked,
        *reversed(SAVES.values()),
        RESTORES["same"],
        COLD,
        RESTORES["other"],
        RESTORES["tenth"],
    ]
    costs: list[tuple[str, str, Form]] = [
        (f"peak MiB, {measure}", peak(measure), lambda value: f"{value / MIB:.0f}")
        for measure in (*blocked, SAVES[True], RESTORES["same"])
    ]
    shares = [measure(staging) for staging in STAGINGS for measure in (slowed, lock)]
    costs += [(measure, measure, "{:.1%}".format) for measure in (*shares, WRITTEN)]
    return [
        report.figures_table(
            f"{title}: seconds", figures, [(measure, measure, "{:.3g}".format) for measure in times]
        ),
        report.figures_table(f"{title}: memory beyond the state, training, bytes", figures, costs),
    ]


def bars(results: Results, nbytes: int) -> list[Bar]:
    """Return the bars of the workloads that ran; `nbytes` is the size of the large one."""
    out = []
    for work, figures in results.items():
        for measure in (SAVES[True], RESTORES["same"]):
            for name in (name for name in TSTORE[1:] if name in figures):
                against: list[tuple[str, tuple[str, ...], float]] = [("best of Orbax and DCP", PEERS, 2.0)]
                against += [("raw disk", ("raw",), 0.8)] if work == "large" and "raw" in figures else []
                for what, peers, need in against:
                    by = lead(figures, peers, measure, name)
                    out.append(Bar(f"{work}: {what} ÷ {name}, {measure}", need, by))
        if work == "large":
            out += _large_bars(figures, nbytes)
    return out


def _large_bars(figures: dict[str, Figures], nbytes: int) -> list[Bar]:
    out = []

    def most(what: str, need: float, value: float, unit: str = " %") -> None:
        out.append(Bar(f"large: {what}", need, value, most=True, unit=unit))

    if "tstore-jax" in figures:
        what, by = RESTORES["other"], lead(figures, ORBAX, RESTORES["other"], "tstore-jax")
        out.append(Bar(f"large: best of Orbax ÷ tstore-jax, {what}", 3, by))
    for name in (name for name in TSTORE if name in figures):
        mine, block = figures[name], blocking("memory")
        most(f"{name} {block} ÷ {COPY}", 1.1, mine.ratio(block, mine, COPY), "×")
        for staging in CONTENDERS[name].stagings:
            state, measure = (nbytes if staging == "memory" else 0), peak(blocking(staging))
            most(f"{name} {measure}", state / MIB + 300, mine.median(measure) / MIB, " MiB")
            share = 100 * mine.median(slowed(staging))
            most(f"{name} {slowed(staging)}", 5, share)
            if "raw" in figures:
                beyond = share - 100 * figures["raw"].median(slowed("memory"))
                most(f"{name} {slowed(staging)}, beyond raw disk", 5, beyond)
            most(f"{name} {lock(staging)}", 5, 100 * mine.median(lock(staging)))
        most(f"{name} {WRITTEN}", 12, 100 * mine.median(WRITTEN))
    return out


@program.command(__doc__, 170)
@program.rounds_option(3)
@program.names_option("--only", WORKLOADS)
@program.names_option("--contenders", list(CONTENDERS), "; raw always runs")
@click.option("--size", default=2048, type=program.COUNT, help="MiB of the large state.")
@click.option("--leaves", default=10_000, type=click.IntRange(10), help="Number of small leaves.")
@program.json_option
@program.dir_option
def main(run: program.Run, rounds: int, only: list[str], contenders: list[str], size: int, leaves: int) -> None:
    workloads = {"large": large(size * 2**20), "leaves": small_leaves(leaves)}
    bench = JobRounds(run.folder / "state", run.log, [name for name in CONTENDERS if name != "raw"], contenders)
    for work in (workloads[name] for name in only):
        run.show(*tables(work.title, bench.run(work, rounds)))
    document: dict[str, Any] = {"unit": "seconds; bytes of peak memory; shares"}
    document["workloads"] = report.as_data(bench.results)
    run.finish(bars(bench.results, workloads["large"].nbytes), **document)


if __name__ == "__main__":
    main()

"""Saves, restores and memory of tstore, tensorstore, np.save, safetensors and the raw limit of the disk.

    pip install -e '.[bench]' && python -m bench.save --json figures.json

Figures are medians of interleaved rounds, ratios are medians of the paired ratios of the rounds: quote ratios.
Checks the restored values, and asserts no figure. Linux only; takes about ten minutes on two cores, 10 GB of
free memory and 5 GB of free disk. The kernels of exmy are measured by `python -m bench.exmy speed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bench import machine, program
from bench.bars import Bar, number
from bench.contender import Contender
from bench.figures import Figures, or_none
from bench.peers.raw import Raw, RawTwoFiles
from bench.peers.safetensors import NumPy, Safetensors
from bench.peers.tensorstore import TensorStore, TensorStoreCopying, TensorStoreOcdbt
from bench.peers.tstore import TStore, TStoreE4M3
from bench.processes import Hosts
from bench.report import MIB, failures, table
from bench.rounds import Results
from bench.states import CLEAR, EVICT, WARM, StateRounds
from bench.workloads import Weights, chunks64k, leaves

CONTENDERS: dict[str, type[Contender]] = {
    "raw1": Raw,
    "raw2": RawTwoFiles,
    "ts-file": TensorStore,
    "ts-file-copy": TensorStoreCopying,
    "ts-ocdbt": TensorStoreOcdbt,
    "npy": NumPy,
    "safetensors": Safetensors,
    "tstore": TStore,
    "tstore-e4m3": TStoreE4M3,
}
RAW = ("raw1", "raw2")
TENSORSTORE = ("ts-file", "ts-file-copy", "ts-ocdbt")
PEERS = [name for name in CONTENDERS if name not in RAW and not name.startswith("tstore")]
MEASURES = ("save durable", "save not durable", "restore warm", "restore cold")
PEAKS = {"save": "save: peak memory", "restore": "restore: peak memory"}
COLD_SHARE = "share read from the disk in a cold restore"

WORKLOADS = {
    w.name: w
    for w in (
        # 16 MiB chunks: tensorstore restores them up to twice as fast as one chunk per array
        Weights("large", "1 GiB in 16 arrays of 4096×4096", 16, (4096, 4096), (1024, 4096)),
        chunks64k(256),
        leaves(10_000, grouped=False),
    )
}


class SaveRounds(StateRounds):
    """Rounds of all contenders; the figures are GB/s, bytes of peak memory and shares, by workload."""

    contenders = CONTENDERS
    large_only = ("ts-file-copy", "tstore-e4m3")

    def measure(self, hosts: Hosts, name: str, work: Weights, turn: int) -> None:
        once, twice, contender = work.nbytes, 2 * work.nbytes, CONTENDERS[name]
        durable, not_durable, warm, cold = MEASURES
        steps: list[tuple[str, Any, int, str, tuple[Any, ...]]] = [
            (not_durable, CLEAR, twice, "save", (0, False)),
            (durable, CLEAR, twice, "save", (0, True)),
        ]
        if contender.restores:
            steps.append((warm, WARM, once, "restore", (0, "same", turn == 0)))
            steps.append((cold, EVICT, twice, "restore", (0, "same", False)))
        peaks: dict[str, float] = {}
        hosts.call("rehearse")
        hosts.call("make_state")
        for measure, before, spare, do, arguments in steps:
            before(self.folder)
            [read] = hosts.call("from_disk")
            [cost] = self.timed(hosts, spare, do, *arguments)
            self.add(work.name, name, turn, {measure: once / 1e9 / cost.seconds})
            peaks[do] = max(peaks.get(do, 0.0), cost.memory)
            if measure == cold:
                share = (hosts.call("from_disk")[0] - read) / machine.stored_bytes(self.folder)
                self.add(work.name, name, turn, {COLD_SHARE: share})
        self.add(work.name, name, turn, {PEAKS[phase]: peak for phase, peak in peaks.items()})


def best(figures: dict[str, Figures], names: Sequence[str], measure: str) -> Figures | None:
    """Return the contender with the best median, of those measured in more than half of the rounds."""
    most = max((len(f.of(measure)) for f in figures.values()), default=0)
    have = [figures[n] for n in names if n in figures and len(figures[n].of(measure)) > most / 2]
    return max(have, key=lambda f: f.median(measure), default=None)


def ratio(figures: dict[str, Figures], mine: Figures | None, others: Sequence[str], measure: str) -> float:
    """Return the ratio of a speed to the best of some contenders."""
    other = best(figures, others, measure)
    return mine.ratio(measure, other) if mine and other else float("nan")


def peak(f: Figures, phase: str) -> int | None:
    """Return the highest peak of the rounds."""
    return max((int(value) for value in f.of(PEAKS[phase]).values()), default=None)


def save_table(title: str, figures: dict[str, Figures]) -> Table:
    rows: list[list[str] | str] = []
    for measure in MEASURES:
        references = [best(figures, names, measure) for names in (RAW, TENSORSTORE)]
        rows.append(measure)
        for f in figures.values():
            if values := f.of(measure).values():
                most = peak(f, measure.split()[0])
                cells = f"{f.median(measure):.3g}", f"{min(values):.3g}–{max(values):.3g}"
                ratios = (number(ratio(figures, f, names, measure)) for names in (RAW, TENSORSTORE))
                memory = "–" if most is None else f"{most / MIB:.0f}"
                mark = " *" if any(f is other for other in references) else ""
                rows.append([f"  {f.title}{mark}", *cells, *ratios, memory, str(len(values))])
    notes = ["* the reference of the ratios", *failures({"": figures})]
    notes += [
        f"{f.title}: a cold restore read only {min(shares):.0%} of the stored bytes from disk"
        for f in figures.values()
        if (shares := f.of(COLD_SHARE).values()) and min(shares) < 0.9
    ]
    return table(title, ("", "GB/s", "min–max", "× raw", "× tensorstore", "peak MiB", "rounds"), rows, notes)


def bars(results: Results) -> list[Bar]:
    """Return the bars of the workloads that ran."""
    durable, not_durable, warm, _ = MEASURES
    ocdbt = (("ts-ocdbt",), "tensorstore ocdbt")
    needs: list[tuple[str, str, tuple[str, ...], str, float, str]] = [
        ("large", durable, RAW, "raw", 0.85, "tstore"),
        ("large", durable, TENSORSTORE, "better tensorstore", 1.1, "tstore"),
        ("large", not_durable, TENSORSTORE, "better tensorstore", 2, "tstore"),
        ("large", not_durable, ("ts-file-copy",), "tensorstore file's plain write()", 2, "tstore"),
        ("large", warm, RAW, "raw", 0.8, "tstore"),
        ("large", warm, TENSORSTORE, "better tensorstore", 2, "tstore"),
        *(("chunks64k", m, *ocdbt, need, "tstore") for m, need in ((durable, 2), (not_durable, 2), (warm, 2.5))),
        *(("leaves", m, *ocdbt, 3, "tstore") for m in (durable, not_durable, warm)),
        ("large", durable, RAW, "raw, logical bytes", 2, "tstore-e4m3"),
    ]
    out = [
        Bar(f"{work}: {name} {m} ÷ {what}", need, ratio(results[work], results[work].get(name), others, m))
        for work, m, others, what, need, name in needs
        if work in results
    ]
    for work, figures in results.items():
        peaks = [peak(f, phase) for n, f in figures.items() if n.startswith("tstore") for phase in PEAKS]
        most = max((p / MIB for p in peaks if p is not None), default=float("nan"))
        out.append(Bar(f"{work}: tstore memory beyond the arrays", 300, most, most=True, unit=" MiB"))
    return out


def as_data(figures: dict[str, Figures], nbytes: int) -> dict[str, Any]:
    """Return the figures of a workload for JSON."""
    return {
        name: {
            "title": f.title,
            "values": {measure: f.of(measure) for measure in MEASURES if f.of(measure)},
            "error": f.error,
            "cold_share": list(f.of(COLD_SHARE).values()),
            "peak": {phase: most for phase in PEAKS if (most := peak(f, phase)) is not None},
            "seconds": sum(nbytes / 1e9 / speed for m in MEASURES for speed in f.of(m).values()),
            "median": {m: or_none(f.median(m)) for m in MEASURES},
            "ratio_to_raw": {m: or_none(ratio(figures, f, RAW, m)) for m in MEASURES},
            "ratio_to_tensorstore": {m: or_none(ratio(figures, f, TENSORSTORE, m)) for m in MEASURES},
        }
        for name, f in figures.items()
    }


@program.command(__doc__)
@program.rounds_option(5)
@program.names_option("--only", list(WORKLOADS))
@program.names_option("--peers", list(CONTENDERS), "; raw and tstore always run")
@program.json_option
@program.dir_option
def main(run: program.Run, rounds: int, only: list[str], peers: list[str]) -> None:
    bench = SaveRounds(run.folder / "state", run.log, PEERS, peers)
    for work in (WORKLOADS[name] for name in only):
        run.show(save_table(work.title, bench.run(work, rounds)))
    workloads = {work: as_data(figures, WORKLOADS[work].nbytes) for work, figures in bench.results.items()}
    run.finish(bars(bench.results), unit="GB/s (1e9 bytes of float32)", workloads=workloads)


if __name__ == "__main__":
    main()

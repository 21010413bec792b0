"""Costs that grow with a store: millions of chunks, many arrays, thousands of commits, beside peers.

    pip install -e '.[bench]' && python -m bench.scale --json figures.json

Measured are time, CPU time, peak memory and the bytes read and written, each in a new process, of tstore,
tensorstore's ocdbt, icechunk and safetensors where they can do the work. Figures are medians of interleaved
rounds, ratios are medians of the paired ratios of the rounds: quote ratios. Checks what is read, and asserts no
figure. Peers that are not installed, or would take too long, are left out. Linux only; needs 12 GB of free memory
and 8 GB of free disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench import program
from bench.report import as_data, cost_table
from bench.scale import report
from bench.scale.rounds import CHANGES, FEW_HOSTS, PEERS, TITLES, Bench, Sizes

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
    bench = Bench(run.folder / "store", TITLES, PEERS, peers, run.log)
    bench.sizes = Sizes(leaves=tuple(map(int, leaves.split(","))), **how)
    bench.before = before and before.resolve()
    for turn in range(rounds):
        run.log(f"round {turn + 1} of {rounds}")
        if set(only) & set(CHUNKS_ROWS):
            bench.chunks(turn, only)
        for row in ROWS[len(CHUNKS_ROWS) :]:
            if row in only:
                getattr(bench, row)(turn)
    run.show(cost_table(bench.results, report.remarks(bench.results)))
    unit = "seconds and bytes: of one commit for change and commits, of one read for poll"
    works = as_data(bench.results)
    run.finish(report.bars(bench.results, bench.sizes), unit=unit, sizes=bench.sizes._asdict(), works=works)


if __name__ == "__main__":
    main()

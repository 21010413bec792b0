"""Costs that grow with a store: millions of chunks, many arrays, thousands of commits, beside peers.

    pip install -e '.[bench]' && python -m bench.scale --json figures.json

Measured are time, CPU time, peak memory and the bytes read and written, each in a new process, of tstore,
tensorstore's ocdbt, icechunk and safetensors where they can do the work. Figures are medians of interleaved
rounds, ratios are medians of the paired ratios of the rounds: quote ratios. Checks what is read, and asserts no
figure. Peers that are not installed, or would take too long, are left out. Linux only; needs 12 GB of free memory
and 8 GB of free disk.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import click
from rich.console import Console

from bench import machine
from bench.bars import bar_table
from bench.command import among
from bench.cost_table import cost_table
from bench.scale import report
from bench.scale.rounds import CHANGES, FEW_HOSTS, PEERS, Bench, Sizes

CHUNKS_ROWS = ("write", "open", "change")
ROWS = (*CHUNKS_ROWS, "arrays", "leaves", "group", "commits", "poll", "chunks64k", "large")
_Folder = click.Path(exists=True, file_okay=False, path_type=Path)
_Count = click.IntRange(1)


@click.command(help=__doc__, context_settings={"max_content_width": 110, "show_default": True})
@click.option("--rounds", default=3, type=_Count)
@click.option("--only", default="", help=f"Comma-separated: {', '.join(ROWS)}.")
@click.option("--peers", default="", help=f"Comma-separated: {', '.join(PEERS)}; raw and tstore always run.")
@click.option("--chunks", default=10_000_000, type=_Count, help="Chunks of 64 bytes, of one host or all hosts.")
@click.option("--leaves", default="10000,100000", help="Numbers of leaves of 4 KiB, comma-separated.")
@click.option("--arrays", default=100_000, type=click.IntRange(10), help="Arrays in groups of ten.")
@click.option("--hosts", default=4096, type=click.IntRange(FEW_HOSTS), help="Virtual hosts of one commit.")
@click.option(
    "--commits",
    default=5000,
    type=click.IntRange(10),
    help=f"Commits that a reader polls; change makes as many, at most {CHANGES}.",
)
@click.option("--size", default=256, type=click.IntRange(4), help="MiB of the array in chunks of 64 KiB.")
@click.option("--seconds", default=2.0, help="Duration of each measurement of small commits.")
@click.option("--before", type=_Folder, help="A checkout of an earlier commit, to compare with in the row large.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file.")
@click.option("--dir", "parent", default=".", help="Folder on the disk to measure.", type=_Folder)
def main(
    rounds: int,
    only: str,
    peers: str,
    chunks: int,
    leaves: str,
    arrays: int,
    hosts: int,
    commits: int,
    size: int,
    seconds: float,
    before: Path | None,
    json_file: Path | None,
    parent: Path,
) -> None:
    rows = among(only, list(ROWS), "--only")
    counts = tuple(int(count) for count in leaves.split(","))
    sizes = Sizes(chunks, arrays, counts, hosts, commits, size, seconds)
    console, log = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 170
    folder = Path(tempfile.mkdtemp(prefix="tstore-bench-", dir=parent.resolve()))
    bench = Bench(folder, sizes, among(peers, list(PEERS), "--peers"), before and before.resolve(), log.print)
    try:
        about = machine.describe(folder)
        console.print_json(json.dumps(about))
        for turn in range(rounds):
            log.print(f"round {turn + 1} of {rounds}")
            if set(rows) & set(CHUNKS_ROWS):
                bench.chunks(turn, rows)
            for row in ROWS[len(CHUNKS_ROWS) :]:
                if row in rows:
                    getattr(bench, row)(turn)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(cost_table(bench.results, report.remarks(bench.results)))
    console.print(bar_table(report.bars(bench.results, sizes)))
    if json_file:
        json_file.write_text(json.dumps(report.as_data(about, bench.results, sizes), indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A volume in chunks, written and read as a whole and in parts, beside tensorstore, zarr-python and icechunk.

    pip install -e '.[bench]' && python -m bench.arrays --json figures.json

Measured are time, CPU time and peak memory, each contender in a new process. Figures are medians of interleaved
rounds, ratios are medians of the paired ratios of the rounds: quote ratios. What is read is in the page cache.
zarr-python and icechunk never call fsync, so they have no row that is durable. Checks what is read, and asserts no
figure. Linux only; needs 6 times the volume's bytes of free memory and disk.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from pathlib import Path

import click
from rich.console import Console

from bench import machine
from bench.arrays import report
from bench.arrays.peers import CONTENDERS
from bench.arrays.rounds import READS, WRITES, Bench
from bench.arrays.volume import Layout
from bench.bars import bar_table
from bench.command import among

ROWS = [*WRITES, *READS, "open"]
_Folder = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(help=__doc__, context_settings={"max_content_width": 110, "show_default": True})
@click.option("--rounds", default=3, type=click.IntRange(1))
@click.option("--only", default="", help=f"Comma-separated rows: {'; '.join(ROWS)}.".replace(", ", " "))
@click.option("--contenders", default="", help=f"Comma-separated: {', '.join(CONTENDERS)}.")
@click.option("--side", default=1024, type=click.IntRange(8), help="Values of uint16 along each axis.")
@click.option("--chunks", default="64,256", help="Lengths of chunks along each axis, comma-separated.")
@click.option("--codecs", default="raw,zstd", help="Comma-separated: raw, zstd.")
@click.option("--share", default=1.0, help="The share of all small reads that is made.")
@click.option("--arrays", default=10_000, type=click.IntRange(10), help="Arrays of the row open.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file.")
@click.option("--dir", "parent", default=".", help="Folder on the disk to measure.", type=_Folder)
def main(
    rounds: int,
    only: str,
    contenders: str,
    side: int,
    chunks: str,
    codecs: str,
    share: float,
    arrays: int,
    json_file: Path | None,
    parent: Path,
) -> None:
    console, log = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 150
    rows = among(only, ROWS, "--only")
    lengths = [min(int(length), side) for length in chunks.split(",")]
    kinds = among(codecs, ["raw", "zstd"], "--codecs")
    layouts = [Layout(side, n, kind == "zstd") for n, kind in itertools.product(dict.fromkeys(lengths), kinds)]
    folder = Path(tempfile.mkdtemp(prefix="tstore-bench-", dir=parent.resolve()))
    bench = Bench(folder, among(contenders, list(CONTENDERS), "--contenders"), rows, share, log.print)
    try:
        about = machine.describe(folder)
        console.print_json(json.dumps(about))
        for turn in range(rounds):
            log.print(f"round {turn + 1} of {rounds}")
            for layout in layouts if set(rows) - {"open"} else []:
                bench.volume(layout, turn)
            if "open" in rows:
                bench.many_arrays(arrays, turn)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(report.table(bench.results))
    console.print(bar_table(report.bars(bench.results)))
    if json_file:
        json_file.write_text(json.dumps(report.as_data(about, bench.results), indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Reads and writes of parts of a volume: all of it, boxes, chunks, elements and strides, beside peers.

    pip install -e '.[bench]' && python -m bench.arrays --json figures.json

A volume of uint16 values is written and read in chunks of each size, raw and compressed, by tstore, tensorstore,
zarr-python, icechunk and, as raw limits, plain files of the same bytes: without chunks, and chunk by chunk with
the same compressor. Measured are time, CPU time, peak memory (results included) and the bytes that system calls
moved, each in a new process, from the page cache.
Figures are medians of interleaved rounds, ratios are medians of the paired ratios of the rounds: quote ratios.
Checks what is read, and asserts no figure. Linux only; needs free memory of three times the volume and free disk
of as much. One element of a compressed chunk takes all of it, so that of long chunks few should be read.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import click
from rich.console import Console

from bench import machine
from bench.arrays import report
from bench.arrays.peers import PEERS
from bench.arrays.rounds import ROWS, Bench, Sizes
from bench.arrays.volume import Volume
from bench.bars import bar_table
from bench.command import among
from bench.cost_table import cost_table
from bench.rounds import Results

_CODECS = ["raw", "zstd"]
_Count = click.IntRange(1)


@click.command(help=__doc__, context_settings={"max_content_width": 110, "show_default": True})
@click.option("--rounds", default=3, type=_Count)
@click.option("--only", default="", help=f"Comma-separated: {', '.join(ROWS)}.")
@click.option(
    "--peers", default="", help=f"Comma-separated: {', '.join(PEERS)}; the raw limits and tstore always run."
)
@click.option("--side", default=1024, type=click.IntRange(8), help="Side of the volume, in values.")
@click.option("--chunks", default="64,256", help="Sides of chunks, comma-separated: divisors of the volume's.")
@click.option("--codecs", default="", help=f"Comma-separated: {', '.join(_CODECS)}.")
@click.option("--boxes", default=100, type=_Count, help="Misaligned boxes of 100 × 100 × 64 values.")
@click.option("--singles", default=1000, type=_Count, help="Reads of one chunk, each at most once.")
@click.option("--elements", default=1000, type=_Count, help="Tasks that read one element each.")
@click.option("--arrays", default=10_000, type=click.IntRange(10), help="Arrays of the store that is opened.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    help="Also write the figures to this file, after each piece of work.",
)
@click.option(
    "--dir",
    "parent",
    default=".",
    help="Folder on the disk to measure.",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
def main(
    rounds: int,
    only: str,
    peers: str,
    side: int,
    chunks: str,
    codecs: str,
    boxes: int,
    singles: int,
    elements: int,
    arrays: int,
    json_file: Path | None,
    parent: Path,
) -> None:
    rows = among(only, list(ROWS), "--only")
    sizes = Sizes(boxes, singles, elements, arrays)
    volumes = [
        Volume(side, int(chunk), codec)
        for chunk in chunks.split(",")
        for codec in among(codecs, _CODECS, "--codecs")
    ]
    if any(side % volume.chunk for volume in volumes):
        raise click.BadParameter(f"expected divisors of {side}, not {chunks}", param_hint="--chunks")
    console, log = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 120
    folder = Path(tempfile.mkdtemp(prefix="tstore-bench-", dir=parent.resolve()))
    about = machine.describe(folder)

    def save(results: Results) -> None:
        if json_file:
            data = report.as_data(about, results, sizes, volumes)
            unfinished = json_file.with_name(json_file.name + ".part")
            unfinished.write_text(json.dumps(data, indent=1) + "\n")
            unfinished.replace(json_file)

    bench = Bench(folder, sizes, rows, among(peers, list(PEERS), "--peers"), log.print, save)
    try:
        console.print_json(json.dumps(about))
        for turn in range(rounds):
            log.print(f"round {turn + 1} of {rounds}")
            for volume in volumes:
                if set(rows) - {"arrays"}:
                    bench.volume(volume, turn)
            if "arrays" in rows:
                bench.many_arrays(turn)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(cost_table(bench.results))
    console.print(bar_table(report.bars(bench.results, volumes)))


if __name__ == "__main__":
    main()

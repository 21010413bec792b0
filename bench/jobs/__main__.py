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

import json
import shutil
import tempfile
from pathlib import Path

import click
from rich.console import Console

from bench import machine
from bench.bars import bar_table
from bench.command import among
from bench.jobs import report, states
from bench.jobs.contenders import CONTENDERS, LARGE_ONLY
from bench.jobs.rounds import Race

WORKLOADS = ("large", "leaves")


@click.command(help=__doc__, context_settings={"max_content_width": 110})
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--only", default="", help=f"Comma-separated: {', '.join(WORKLOADS)}.")
@click.option("--contenders", default="", help=f"Comma-separated: {', '.join(CONTENDERS)}; raw always runs.")
@click.option("--size", default=2048, show_default=True, type=click.IntRange(1), help="MiB of the large state.")
@click.option(
    "--leaves", default=10_000, show_default=True, type=click.IntRange(10), help="Number of small leaves."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file.")
@click.option(
    "--dir",
    "parent",
    default=".",
    help="Folder on the disk to measure.",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
def main(
    rounds: int, only: str, contenders: str, size: int, leaves: int, json_file: Path | None, parent: Path
) -> None:
    chosen = among(only, list(WORKLOADS), "--only")
    names = among(contenders, list(CONTENDERS), "--contenders")
    names = [n for n in CONTENDERS if n in names or n == "raw"]
    console, log = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 170
    workloads = {"large": states.large(size * 2**20), "leaves": states.leaves(leaves)}
    folder = Path(tempfile.mkdtemp(prefix="tstore-bench-", dir=parent.resolve()))
    races: report.Races = {}
    try:
        about = machine.describe(folder)
        console.print_json(json.dumps(about))
        for workload in (workloads[name] for name in chosen):
            with log.status(workload.title):
                here = [n for n in names if n not in LARGE_ONLY or workload.name == "large"]
                races[workload.name] = Race(workload, here, folder, log.print).run(rounds)
            for table in report.tables(workload.title, races[workload.name]):
                console.print(table)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    nbytes = workloads["large"].nbytes
    console.print(bar_table(report.bars(races, nbytes)))
    if json_file:
        json_file.write_text(json.dumps(report.as_data(about, races, nbytes), indent=1) + "\n")


if __name__ == "__main__":
    main()

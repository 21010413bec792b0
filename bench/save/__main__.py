"""Saves, restores and memory of tstore, tensorstore, np.save, safetensors and the raw limit of the disk.

    pip install -e '.[bench]' && python -m bench.save --json figures.json

Figures are medians of interleaved rounds, ratios are medians of the paired ratios of the rounds: quote ratios.
Checks the restored values, and asserts no figure. Linux only; takes about eight minutes on two cores, 10 GB of
free memory and 5 GB of free disk. The kernels of exmy are measured by `python -m bench.exmy speed`.
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
from bench.save import report
from bench.save.peers import CONTENDERS, LARGE_ONLY, RAW
from bench.save.rounds import Race
from bench.save.workloads import WORKLOADS


@click.command(help=__doc__, context_settings={"max_content_width": 110})
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--only", default="", help=f"Comma-separated: {', '.join(WORKLOADS)}.")
@click.option("--peers", default="", help=f"Comma-separated: {', '.join(CONTENDERS)}; raw and tstore always run.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file.")
@click.option(
    "--dir",
    "parent",
    default=".",
    help="Folder on the disk to measure.",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
def main(rounds: int, only: str, peers: str, json_file: Path | None, parent: Path) -> None:
    chosen = among(only, list(WORKLOADS), "--only")
    names = among(peers, list(CONTENDERS), "--peers")
    names = [n for n in CONTENDERS if n in names or n in RAW or n.startswith("tstore")]
    console = Console()
    if not console.is_terminal:
        console.width = 120
    log = Console(stderr=True)
    folder = Path(tempfile.mkdtemp(prefix="tstore-bench-", dir=parent.resolve()))
    races: report.Races = {}
    try:
        about = machine.describe(folder)
        console.print_json(json.dumps(about))
        for workload in (w for w in WORKLOADS.values() if w.name in chosen):
            here = [n for n in names if n not in LARGE_ONLY or workload.name == "large"]
            with log.status(workload.title):
                races[workload.name] = Race(workload, here, folder, log.print).run(rounds)
            console.print(report.table(workload.title, races[workload.name]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(bar_table(report.bars(races)))
    if json_file:
        json_file.write_text(json.dumps(report.as_data(about, races), indent=1) + "\n")


if __name__ == "__main__":
    main()

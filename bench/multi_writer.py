"""Many writers of one store: tstore beside tensorstore (one ocdbt; or, as Orbax does, one for each process, merged
by process 0) and icechunk.

    pip install -e '.[bench,plot]' && python bench/multi_writer.py --json figures.json --plot .

(a) all hosts save one state as one commit, (b) each makes small commits of its own, (c) one is killed, (d) up to
4,096 hosts on a model of GCS under virtual time (`gcs_model` states it). What is acknowledged is read back.
Figures are medians of interleaved rounds, ratios the medians of the rounds' paired ratios: quote ratios. Linux
only; under ten minutes on two cores, 8 GB of free memory and 4 GB of free disk.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import shutil
import tempfile
from pathlib import Path

import click
import gcs_model
import machine
import report
import writer_report
from rich.console import Console
from writer_rounds import Bench

QUESTIONS = ("cooperative", "independent", "killed", "model")
HOSTS = (1, 2, 4, 8, 16, 32, 64)
MODEL_HOSTS = (64, 256, 1024, 4096)


@click.command(help=__doc__, context_settings={"max_content_width": 110})
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(1), help="Where there is a bar; else 1."
)
@click.option("--only", default="", help=f"Of {', '.join(QUESTIONS)}; comma-separated.")
@click.option("--hosts", default=",".join(map(str, HOSTS)), show_default=True, help="How many; comma-separated.")
@click.option("--seconds", default=1.0, show_default=True, help="Of small commits, each time.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
@click.option(
    "--plot", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Write PNG files there."
)
@click.option(
    "--dir",
    "parent",
    default=".",
    help="Folder on the disk to measure.",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
def main(
    rounds: int, only: str, hosts: str, seconds: float, json_file: Path | None, plot: Path | None, parent: Path
) -> None:
    asked = [q for q in QUESTIONS if q in only.split(",")] if only else list(QUESTIONS)
    if not asked:
        raise click.BadParameter(f"expected of {', '.join(QUESTIONS)}", param_hint="--only")
    counts = sorted({int(n) for n in hosts.split(",")})
    console, log = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 170
    folder = Path(tempfile.mkdtemp(prefix="tstore-bench-", dir=parent.resolve()))
    bench = Bench(folder, log.print)
    commits: list[tuple[bool, gcs_model.Commit]] = []
    try:
        about = machine.describe(folder)
        console.print_json(json.dumps(about))
        if "cooperative" in asked:
            _cooperative(bench, counts, rounds, console)
        if "independent" in asked:
            _independent(bench, counts, rounds, seconds, console)
        if "killed" in asked:
            for turn in range(rounds):
                bench.killed(writer_report.BAR_HOSTS, turn)
            console.print(writer_report.killed_table(bench.rows))
        if "model" in asked:
            commits = _model()
            console.print(writer_report.model_table(commits))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for row in bench.rows:
        if "error" in row:
            console.print(f"{row['question']}, {row['way']}, {row['hosts']} hosts: {row['error']}", style="red")
    console.print(report.bar_table(writer_report.bars(bench.rows, commits)))
    for line in writer_report.limits(bench.rows):
        console.print(line)
    if json_file:
        json_file.write_text(json.dumps(writer_report.as_data(about, bench.rows, commits), indent=1) + "\n")
    if plot:
        for made in writer_report.plot(bench.rows, commits, plot):
            log.print(str(made))


def _cooperative(bench: Bench, counts: list[int], rounds: int, console: Console) -> None:
    at_bar = writer_report.BAR_HOSTS
    for count in counts:
        for turn in range(rounds if count == at_bar else 1):
            bench.cooperative(count, True, turn)
    for turn in range(rounds if at_bar in counts else 0):
        bench.cooperative(at_bar, False, turn)
    for durable in (True, False):
        console.print(writer_report.cooperative_table(bench.rows, durable))


def _independent(bench: Bench, counts: list[int], rounds: int, seconds: float, console: Console) -> None:
    at_bar = writer_report.BAR_HOSTS
    for count in counts:
        for turn in range(rounds if count == at_bar else 1):
            bench.independent(count, 1, True, turn, seconds)
        if count > 1:
            bench.independent(1, count, True, 0, seconds)
        if count in (1, at_bar):
            bench.independent(count, 1, False, 0, seconds)
    console.print(writer_report.independent_table(bench.rows, True, tasks=False))
    console.print(writer_report.independent_table(bench.rows, True, tasks=True))
    console.print(writer_report.independent_table(bench.rows, False, tasks=False))


def _model() -> list[tuple[bool, gcs_model.Commit]]:
    """Each run is one thread of computing; two go at once."""
    wanted = [(uploads, hosts) for hosts in reversed(MODEL_HOSTS) for uploads in (True, False)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, context) as pool:
        runs = [(uploads, pool.submit(gcs_model.commit, hosts, 1, uploads=uploads)) for uploads, hosts in wanted]
        found = [(uploads, run.result()) for uploads, run in runs]
    return sorted(found, key=lambda each: (not each[0], each[1].hosts))


if __name__ == "__main__":
    main()

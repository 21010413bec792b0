"""Many writers of one store: tstore, tensorstore (one ocdbt, or one per process as in Orbax) and icechunk.

    pip install -e '.[bench,plot]' && python -m bench.writers --json figures.json --plot .

(a) All hosts save one state as one commit; (b) each host makes small commits; (c) one host is killed; (d) up to
4,096 hosts commit to a model of GCS in virtual time (described in `bench.writers.model`). Acknowledged commits are
read back. Figures are medians of interleaved rounds, ratios are medians of the paired ratios of the rounds: quote
ratios. Linux only; takes less than ten minutes on two cores, 8 GB of free memory and 4 GB of free disk.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from bench import machine
from bench.writers import model, report
from bench.writers.rounds import Bench

QUESTIONS = ("cooperative", "independent", "killed", "model")
HOSTS = (1, 2, 4, 8, 16, 32, 64)
MODEL_HOSTS = (64, 256, 1024, 4096)


@click.command(help=__doc__, context_settings={"max_content_width": 110})
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Rounds of the measurements with a bar; others have 1.",
)
@click.option("--only", default="", help=f"Comma-separated: {', '.join(QUESTIONS)}.")
@click.option(
    "--hosts", default=",".join(map(str, HOSTS)), show_default=True, help="Numbers of hosts, comma-separated."
)
@click.option("--seconds", default=1.0, show_default=True, help="Duration of each measurement of small commits.")
@click.option(
    "--minutes",
    default=8.0,
    show_default=True,
    help="Begin no measurement after this time.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file.")
@click.option(
    "--plot",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write plots as PNG files to this folder, which is made if it is missing.",
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
    hosts: str,
    seconds: float,
    minutes: float,
    json_file: Path | None,
    plot: Path | None,
    parent: Path,
) -> None:
    selected = [q for q in QUESTIONS if q in only.split(",")] if only else list(QUESTIONS)
    if not selected:
        raise click.BadParameter(f"expected some of {', '.join(QUESTIONS)}", param_hint="--only")
    counts = sorted({int(n) for n in hosts.split(",")})
    console, log = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 170
    folder = Path(tempfile.mkdtemp(prefix="tstore-bench-", dir=parent.resolve()))
    bench = Bench(folder, log.print, time.monotonic() + 60 * minutes)
    commits: list[tuple[bool, model.Commit]] = []
    try:
        about = machine.describe(folder)
        console.print_json(json.dumps(about))
        for question, measure in _jobs(bench, counts, rounds, seconds, commits):
            if question in selected:
                measure()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.show(console, bench.rows, commits)
    if bench.skipped:
        console.print(f"skipped for lack of time (--minutes {minutes:g}): {'; '.join(bench.skipped)}")
    if json_file:
        json_file.write_text(json.dumps(report.as_data(about, bench.rows, commits), indent=1) + "\n")
    if plot:
        for path in report.plot(bench.rows, commits, plot, len(bench.skipped)):
            log.print(str(path))


Job = tuple[str, Callable[[], None]]


def _jobs(
    bench: Bench, counts: list[int], rounds: int, seconds: float, commits: list[tuple[bool, model.Commit]]
) -> Iterator[Job]:
    """Yield the question and the call of each measurement; those with a bar come first."""
    bar = report.BAR_HOSTS
    turns = range(rounds if bar in counts else 0)
    for turn in turns:
        yield "independent", partial(bench.independent, bar, 1, True, turn, seconds)
    yield "model", lambda: commits.extend(_model(bench))
    for turn in turns:
        for durable in (True, False):
            yield "cooperative", partial(bench.cooperative, bar, durable, turn)
        yield "killed", partial(bench.killed, bar, turn)
    for count in counts:
        if count != bar:
            yield "cooperative", partial(bench.cooperative, count, True, 0)
            yield "independent", partial(bench.independent, count, 1, True, 0, seconds)
        if count > 1:
            yield "independent", partial(bench.independent, 1, count, True, 0, seconds)
        if count in (1, bar):
            yield "independent", partial(bench.independent, count, 1, False, 0, seconds)


def _model(bench: Bench) -> list[tuple[bool, model.Commit]]:
    """Return the run with the median time for each kind. Two single-threaded runs are made in parallel."""
    kinds = [(uploads, hosts) for hosts in reversed(MODEL_HOSTS) for uploads in (True, False)]
    context = multiprocessing.get_context("spawn")
    medians = []
    with concurrent.futures.ProcessPoolExecutor(2, context) as pool:
        runs = {
            (uploads, hosts): [pool.submit(model.commit, hosts, n, uploads=uploads) for n in range(_seeds(hosts))]
            for uploads, hosts in kinds
        }
        for (uploads, hosts), futures in runs.items():
            concurrent.futures.wait(futures, max(0.0, bench.end - time.monotonic()))
            late = [future for future in futures if future.cancel()]  # none waits for a process before the end
            if late:
                bench.skipped.append(f"model: {hosts} hosts")
                continue
            ordered = sorted((future.result() for future in futures), key=lambda commit: commit.visible)
            medians.append((uploads, ordered[len(ordered) // 2]))
    return sorted(medians, key=lambda each: (not each[0], each[1].hosts))


def _seeds(hosts: int) -> int:
    return 9 if hosts <= 256 else 3


if __name__ == "__main__":
    main()

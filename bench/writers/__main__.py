"""Many writers of one store: tstore, tensorstore (one ocdbt, or one per process as in Orbax) and icechunk.

    pip install -e '.[bench,plot]' && python -m bench.writers --json figures.json --plot .

(a) All hosts save one state as one commit; (b) each host makes small commits; (c) one host is killed; (d) up to
4,096 hosts commit to a model of GCS in virtual time (described in `bench.writers.model`). Acknowledged commits are
read back. Figures are medians of interleaved rounds, ratios are medians of the paired ratios of the rounds: quote
ratios. Linux only; takes less than ten minutes on two cores, 8 GB of free memory and 4 GB of free disk.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click

from bench import program
from bench.writers import model, report
from bench.writers.rounds import Bench

QUESTIONS = ("cooperative", "independent", "killed", "model")
HOSTS = (1, 2, 4, 8, 16, 32, 64)
MODEL_HOSTS = (64, 256, 1024, 4096)
_PLOTS = click.Path(file_okay=False, path_type=Path)


@program.command(__doc__, 170)
@program.rounds_option(3, "Rounds of the measurements with a bar; others have 1.")
@program.names_option("--only", QUESTIONS)
@click.option("--hosts", default=",".join(map(str, HOSTS)), help="Numbers of hosts, comma-separated.")
@click.option("--seconds", default=1.0, help="Duration of each measurement of small commits.")
@click.option("--minutes", default=8.0, help="Begin no measurement after this time.")
@program.json_option
@click.option(
    "--plot", type=_PLOTS, help="Write plots as PNG files to this folder, which is made if it is missing."
)
@program.dir_option
def main(
    run: program.Run, rounds: int, only: list[str], hosts: str, minutes: float, plot: Path | None, **how: float
) -> None:
    counts = sorted({int(n) for n in hosts.split(",")})
    commits: report.Commits = []
    bench = Bench(run.folder / "store", run.log, time.monotonic() + 60 * minutes)
    for question, measure in _jobs(bench, counts, rounds, commits=commits, **how):
        if question in only:
            measure()
    run.show(*report.parts(bench.rows, commits))
    models = [{"uploads": up, **c._asdict(), "per_host": c.per_host} for up, c in commits]
    run.finish(report.bars(bench.rows, commits), rows=bench.rows, model=models)
    run.show(*report.limits(bench.rows))
    if bench.skipped:
        run.show(f"skipped for lack of time (--minutes {minutes:g}): {'; '.join(bench.skipped)}")
    if plot:
        for path in report.plot(bench.rows, commits, plot, len(bench.skipped)):
            run.log(str(path))


Job = tuple[str, Callable[[], None]]


def _jobs(bench: Bench, counts: list[int], rounds: int, seconds: float, commits: report.Commits) -> Iterator[Job]:
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


def _model(bench: Bench) -> report.Commits:
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

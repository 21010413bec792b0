"""The page of a store: how long its views take, what they weigh, and what it costs the server's other requests.

    pip install -e '.[bench]' && python -m bench.page

Each round starts `tstore view` on a store of some steps and arrays, opens Run for the first time (the page with
its style sheet, script and icon, as browsers do), again, and after another commit; then Tree of a store of many
arrays for the first and the second time. At last `tstore serve` serves one small object with a page and without
one. CPU is that of the server's process. Figures are medians of rounds. Linux only.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.table import Table

import tstore.sync as tstore
from bench import machine
from bench.bars import Bar, bar_table, bars_as_data
from bench.figures import Figures

HTML = {"Accept": "text/html", "Accept-Encoding": "gzip"}
CHANGED = 10  # arrays of a step
RUN = ("Run, first", "Run, again", "Run, after a commit")
WITHOUT_PAGE = """
import sys
sys.modules["tstore.service.page"] = None
from tstore import cli
sys.exit(cli.main())
"""


class Response(NamedTuple):
    body: bytes
    size: int


class Process(NamedTuple):
    """A server that was started for this measurement."""

    pid: int
    url: str
    entrance: str

    def cpu(self) -> float:
        """Return the CPU seconds of all threads so far."""
        running = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in running) / 1e9


class Visitor:
    """A browser without a window: it keeps its connection and its cookie."""

    def __init__(self, process: Process) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(process.url).netloc)
        self._headers = dict(HTML)
        if process.entrance:
            address = urlsplit(process.entrance)
            self._connection.request("GET", f"{address.path}?{address.query}", headers=self._headers)
            with self._connection.getresponse() as response:
                self._headers["Cookie"] = response.headers["Set-Cookie"].partition(";")[0]

    def get(self, path: str) -> Response:
        self._connection.request("GET", path, headers=self._headers)
        with self._connection.getresponse() as response:
            body = response.read()
            if response.status != 200:
                raise RuntimeError(f"{path}: status {response.status}")
            compressed = response.headers.get("Content-Encoding") == "gzip"
        return Response(gzip.decompress(body) if compressed else body, len(body))


@contextlib.contextmanager
def started(*command: str) -> Iterator[Process]:
    """Run a command that serves a store and prints its address as JSON."""
    with subprocess.Popen(
        [sys.executable, *command, "--port", "0", "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        try:
            document = json.loads(process.stdout.readline())
            yield Process(process.pid, document["url"], document.get("entrance", ""))
        finally:
            process.kill()


def training_run(folder: Path, steps: int, arrays: int) -> None:
    """Make a store of steps, each of which changes ten of the arrays."""
    with tstore.open(folder) as store:
        for step in range(steps):
            metadata = {"step": step, "metrics": {"loss": 1 / (step + 1), "accuracy": step / steps, "rate": 1e-3}}
            with store.transaction(tag=f"step/{step}", metadata=metadata, durability="none") as tx:
                for number in range(arrays) if step == 0 else range(step % arrays, arrays, arrays // CHANGED):
                    path = f"layers/{number // 10}/w{number % 10}"
                    w = tx.array(path) if step else tx.create_array(path, (16, 16), "float32")
                    w.write(float(step + number))


def model(folder: Path, arrays: int) -> None:
    """Make a store of one version with small arrays in groups of ten."""
    with tstore.open(folder) as store, store.transaction(durability="none") as tx:
        for number in range(arrays):
            tx.create_array(f"layers/{number // 10}/w{number % 10}", (16, 16), "float32", sparse=True)


class Bench:
    """The measurements, by work: seconds, CPU seconds and bytes."""

    def __init__(self) -> None:
        self.figures: dict[str, Figures] = {}

    def views(self, turn: int, folder: Path, path: str, rows: tuple[str, ...], commit: str = "") -> None:
        """Open a view in a new server as often as there are rows; commit something before the row `commit`."""
        with started("-m", "tstore", "view", str(folder), "--no-browser") as process:
            visitor = Visitor(process)
            for row in rows:
                if row == commit:
                    with tstore.open(folder) as store, store.transaction(metadata={"metrics": {"loss": 1}}) as tx:
                        tx.array("layers/0/w0").write(float(turn))
                cpu, start = process.cpu(), time.perf_counter()
                page = visitor.get(path)
                size = page.size
                if row == rows[0]:
                    links = [part.partition(b'"')[0].decode() for part in page.body.split(b'="')]
                    size += sum(visitor.get(link).size for link in links if link.startswith("/-/page/static/"))
                self._add(row, turn, time.perf_counter() - start, process.cpu() - cpu, size)

    def requests(self, turn: int, folder: Path, count: int) -> None:
        """Read one object often from a server with a page and from one without."""
        key = next(folder.glob("commits/*")).name
        for row, program in (("GET, with a page", ("-m", "tstore")), ("GET, without", ("-c", WITHOUT_PAGE))):
            with started(*program, "serve", str(folder)) as process:
                visitor = Visitor(process)
                for _ in range(count // 10):
                    visitor.get(f"/commits/{key}")
                cpu, start = process.cpu(), time.perf_counter()
                for _ in range(count):
                    size = visitor.get(f"/commits/{key}").size
                seconds = time.perf_counter() - start
                self._add(row, turn, seconds / count, (process.cpu() - cpu) / count, size)

    def _add(self, row: str, turn: int, seconds: float, cpu: float, size: int) -> None:
        figures = self.figures.setdefault(row, Figures(row))
        for measure, value in (("seconds", seconds), ("cpu", cpu), ("bytes", size)):
            figures.add(measure, turn, value)


def report(figures: dict[str, Figures]) -> Table:
    table = Table(title="views (medians, fastest in parentheses)", title_justify="left")
    for head in ("", "ms", "ms of CPU", "kB"):
        table.add_column(head, justify="right" if head else "left")
    for row, found in figures.items():
        times = [
            f"{1000 * found.median(measure):.3g} ({1000 * min(found.of(measure).values()):.3g})"
            for measure in ("seconds", "cpu")
        ]
        table.add_row(row, *times, f"{found.median('bytes') / 1000:.1f}")
    return table


@click.command(help=__doc__, context_settings={"max_content_width": 110, "show_default": True})
@click.option("--rounds", default=5, type=click.IntRange(1))
@click.option("--steps", default=1000, type=click.IntRange(1))
@click.option("--arrays", default=1000, type=click.IntRange(CHANGED), help="Arrays of the store of steps.")
@click.option("--many", default=100_000, type=click.IntRange(1), help="Arrays of the store for Tree.")
@click.option("--gets", default=1000, type=click.IntRange(10), help="Requests for the small object.")
@click.option("--dir", "parent", default=".", help="Folder for the stores.", type=click.Path(path_type=Path))
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file.")
@click.option("--keep", is_flag=True, help="Keep the stores in the folder, and use those that are there.")
def main(
    rounds: int,
    steps: int,
    arrays: int,
    many: int,
    gets: int,
    parent: Path,
    json_file: Path | None,
    keep: bool,
) -> None:
    folder = parent.resolve() if keep else Path(tempfile.mkdtemp(prefix="tstore-bench-", dir=parent.resolve()))
    console, log, bench = Console(), Console(stderr=True), Bench()
    run, tree = folder / f"run-{steps}-{arrays}", folder / f"tree-{many}"
    try:
        about = machine.describe(folder)
        console.print_json(json.dumps(about))
        if not run.exists():
            log.print("making the stores")
            training_run(run, steps, arrays)
        if not tree.exists():
            model(tree, many)
        for turn in range(rounds):
            log.print(f"round {turn + 1} of {rounds}")
            bench.views(turn, run, "/-/page/", RUN, commit=RUN[-1])
            bench.views(turn, tree, "/-/page/tree", ("Tree, first", "Tree, again"))
            bench.requests(turn, run, gets)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    console.print(report(bench.figures))
    first = bench.figures["Run, first"]
    with_page, without = bench.figures["GET, with a page"], bench.figures["GET, without"]
    bars = [
        Bar("the first view of Run", 300, 1000 * first.median("seconds"), most=True, unit=" ms"),
        Bar("its size, compressed", 300, first.median("bytes") / 1000, most=True, unit=" kB"),
        Bar("CPU of a GET, with a page ÷ without", 1.05, with_page.ratio("cpu", without), most=True),
    ]
    console.print(bar_table(bars))
    if json_file:
        measured = {row: figures.as_data() for row, figures in bench.figures.items()}
        document = {"machine": about, "views": measured, "bars": bars_as_data(bars)}
        json_file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

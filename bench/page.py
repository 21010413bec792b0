"""The page of a store: how long its views take, what they weigh, and what it costs the server's other requests.

    pip install -e '.[bench]' && python -m bench.page

Each round starts `tstore view` on a store of some steps and arrays, opens Run for the first time (the page with
its style sheet, script and icon, as browsers do), again, and after another commit; then Tree of a store of many
arrays for the first and the second time. At last `tstore serve` serves one small object with a page and without
one. CPU is that of the server's process. Figures are medians of rounds. Linux only.
"""

from __future__ import annotations

import gzip
import http.client
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

import tstore.sync as tstore
from bench import program
from bench.backends.servers import announced
from bench.bars import Bar
from bench.report import as_data, table
from bench.rounds import Rounds

HTML = {"Accept": "text/html", "Accept-Encoding": "gzip"}
CHANGED = 10  # arrays of a step
RUN = ("Run, first", "Run, again", "Run, after a commit")
TREE = ("Tree, first", "Tree, again")
GETS = {
    "GET, with a page": ("-m", "tstore"),
    "GET, without": (
        "-c",
        "import sys; sys.modules['tstore.service.page'] = None; from tstore import cli; sys.exit(cli.main())",
    ),
}


class Visitor:
    """A browser without a window, at a server that was started: it keeps its connection and its cookie."""

    def __init__(self, process: int, document: dict[str, Any]) -> None:
        self._process, self._headers = process, dict(HTML)
        self._connection = http.client.HTTPConnection(urlsplit(document["url"]).netloc)
        if entrance := document.get("entrance"):
            address = urlsplit(entrance)
            self._connection.request("GET", f"{address.path}?{address.query}", headers=self._headers)
            with self._connection.getresponse() as response:
                self._headers["Cookie"] = response.headers["Set-Cookie"].partition(";")[0]

    def get(self, path: str) -> tuple[bytes, int]:
        """Return the body of a response and its size as it was sent."""
        self._connection.request("GET", path, headers=self._headers)
        with self._connection.getresponse() as response:
            body = response.read()
            if response.status != 200:
                raise RuntimeError(f"{path}: status {response.status}")
            compressed = response.headers.get("Content-Encoding") == "gzip"
        return gzip.decompress(body) if compressed else body, len(body)

    def cpu(self) -> float:
        """Return the CPU seconds of all threads of the server so far."""
        running = Path(f"/proc/{self._process}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in running) / 1e9


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


class Pages(Rounds):
    """Rounds of views and requests, by row: seconds, CPU seconds and bytes."""

    def views(self, turn: int, folder: Path, path: str, rows: tuple[str, ...]) -> None:
        """Open a view in a new server as often as there are rows; commit something before the last of three."""
        with announced("-m", "tstore", "view", str(folder), "--no-browser") as server:
            visitor = Visitor(*server)
            for row in rows:
                if row == RUN[-1]:
                    with tstore.open(folder) as store, store.transaction(metadata={"metrics": {"loss": 1}}) as tx:
                        tx.array("layers/0/w0").write(float(turn))
                cpu, start = visitor.cpu(), time.perf_counter()
                body, size = visitor.get(path)
                if row == rows[0]:
                    links = [part.partition(b'"')[0].decode() for part in body.split(b'="')]
                    size += sum(visitor.get(link)[1] for link in links if link.startswith("/-/page/static/"))
                self._add(row, turn, time.perf_counter() - start, visitor.cpu() - cpu, size)

    def requests(self, turn: int, folder: Path, count: int) -> None:
        """Read one object often from a server with a page and from one without."""
        key = next(folder.glob("commits/*")).name
        for row, program_of_row in GETS.items():
            with announced(*program_of_row, "serve", str(folder)) as server:
                visitor = Visitor(*server)
                for _ in range(count // 10):
                    visitor.get(f"/commits/{key}")
                cpu, start = visitor.cpu(), time.perf_counter()
                for _ in range(count):
                    _, size = visitor.get(f"/commits/{key}")
                seconds = time.perf_counter() - start
                self._add(row, turn, seconds / count, (visitor.cpu() - cpu) / count, size)

    def _add(self, row: str, turn: int, seconds: float, cpu: float, size: int) -> None:
        self.add("views", row, turn, {"seconds": seconds, "cpu": cpu, "bytes": size})


@program.command(__doc__)
@program.rounds_option(5)
@click.option("--steps", default=1000, type=program.COUNT)
@click.option("--arrays", default=1000, type=click.IntRange(CHANGED), help="Arrays of the store of steps.")
@click.option("--many", default=100_000, type=program.COUNT, help="Arrays of the store for Tree.")
@click.option("--gets", default=1000, type=click.IntRange(10), help="Requests for the small object.")
@click.option("--keep", is_flag=True, help="Keep the stores in the folder, and use those that are there.")
@program.json_option
@program.dir_option
def main(run: program.Run, rounds: int, steps: int, arrays: int, many: int, gets: int, keep: bool) -> None:
    bench = Pages(run.parent if keep else run.folder, run.log)
    stores = bench.folder / f"run-{steps}-{arrays}", bench.folder / f"tree-{many}"
    run.log("making the stores")
    if not stores[0].exists():
        training_run(stores[0], steps, arrays)
    if not stores[1].exists():
        model(stores[1], many)
    for turn in range(rounds):
        run.log(f"round {turn + 1} of {rounds}")
        bench.views(turn, stores[0], "/-/page/", RUN)
        bench.views(turn, stores[1], "/-/page/tree", TREE)
        bench.requests(turn, stores[0], gets)
    views = bench.results["views"]
    rows = [
        [
            row,
            *(f"{1000 * f.median(m):.3g} ({1000 * min(f.of(m).values()):.3g})" for m in ("seconds", "cpu")),
            f"{f.median('bytes') / 1000:.1f}",
        ]
        for row, f in views.items()
    ]
    run.show(table("views (medians, fastest in parentheses)", ("", "ms", "ms of CPU", "kB"), rows))
    first, (with_page, without) = views[RUN[0]], (views[row] for row in GETS)
    bars = [
        Bar("the first view of Run", 300, 1000 * first.median("seconds"), most=True, unit=" ms"),
        Bar("its size, compressed", 300, first.median("bytes") / 1000, most=True, unit=" kB"),
        Bar("CPU of a GET, with a page ÷ without", 1.05, with_page.ratio("cpu", without), most=True),
    ]
    run.finish(bars, **as_data(bench.results))


if __name__ == "__main__":
    main()

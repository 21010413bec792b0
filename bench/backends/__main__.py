"""Saves and restores of one checkpoint by several host processes: tstore and its peers on each storage.

    pip install -e '.[bench,test]' && python -m bench.backends --json figures.json

Each round starts new server processes on loopback. Every contender saves and restores the same bytes, in an order
that rotates by one each round. Figures are medians of rounds, ratios are medians of the paired ratios of the
rounds: quote ratios. Requests are those of all hosts; memory is the highest peak of a host, without its arrays.
Restored values are checked after the clock has stopped. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.backends import latency
from bench.backends.peers import CONTENDERS
from bench.backends.servers import SERVERS, Place
from bench.bars import Bar, bar_table

Figures = dict[str, dict[str, dict[str, list[float]]]]
"""Seconds of each round, by server, contender and "save" or "restore"."""


class Hosts:
    """The host processes, which all run the same call at the same time."""

    def __init__(self, hosts: int, size: int) -> None:
        self.size = size
        command = [sys.executable, "-m", "bench.backends.host"]
        self._processes = [
            subprocess.Popen(
                [*command, str(i), str(hosts), str(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # errors are in their replies
                text=True,
            )
            for i in range(hosts)
        ]

    def call(self, **request: Any) -> tuple[float, list[dict[str, Any]]]:
        """Return the seconds until the last host was done, and the replies. Raise `RuntimeError` on failure."""
        line = json.dumps(request) + "\n"
        began = time.monotonic()  # a clock that all processes share
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        replies = []
        for process in self._processes:
            assert process.stdout is not None
            replies.append(json.loads(process.stdout.readline() or '{"error": "the host ended"}'))
        for reply in replies:
            if "error" in reply:
                raise RuntimeError(reply["error"])
        return max(reply.get("ended", began) for reply in replies) - began, replies

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


class Measurement:
    """All rounds on all servers."""

    def __init__(self, hosts: Hosts, parent: Path, log: Console) -> None:
        self.hosts = hosts
        self.parent = parent
        self.log = log
        self.seconds: Figures = {}
        self.requests: dict[str, dict[str, dict[str, int]]] = {}
        self.peaks: dict[str, int] = {}
        self.errors: dict[str, str] = {}

    def round(self, server: str, number: int) -> None:
        names = [n for n, c in CONTENDERS.items() if server in (*c.servers, *c.reads)]
        names = [n for n in names if f"{server} {n}" not in self.errors]
        if not names:
            return
        names = names[number % len(names) :] + names[: number % len(names)]
        with SERVERS[server](self.parent) as place:
            for name in names:
                try:
                    self._measure(server, name, place, number)
                except RuntimeError as error:
                    self.errors[f"{server} {name}"] = str(error)
                    self.log.print(f"{server}: {name} failed: {error}")

    def _measure(self, server: str, name: str, place: Place, number: int) -> None:
        location = {**place._asdict(), "folder": str(place.folder)}
        self.hosts.call(contender=name, server=server, place=location)
        for do in ("save", "restore"):
            seconds, replies = self.hosts.call(do=do, run=str(number))
            if do == "restore" or server in CONTENDERS[name].servers:
                self.seconds.setdefault(server, {}).setdefault(name, {}).setdefault(do, []).append(seconds)
            if name == "tstore":
                total: Counter[str] = Counter()
                for reply in replies:
                    total.update(reply["requests"])
                self.requests.setdefault(server, {})[do] = dict(total)
                key = f"{server} {do}"
                self.peaks[key] = max(self.peaks.get(key, 0), *(reply["peak"] for reply in replies))

    def ratio(self, server: str, other: str, do: str) -> float:
        """Return the median over the rounds of the other's seconds divided by tstore's."""
        figures = self.seconds.get(server, {})
        mine, theirs = (figures.get(n, {}).get(do, []) for n in ("tstore", other))
        return median(b / a for a, b in zip(mine, theirs, strict=False)) if mine and theirs else float("nan")

    def bars(self) -> list[Bar]:
        out = []

        def add(server: str, other: str, do: str, need: float) -> None:
            if server in self.seconds:
                out.append(Bar(f"{server}: tstore {do} ÷ {other}", need, self.ratio(server, other, do)))

        for server in ("serve", "nginx"):
            add(server, "aiohttp", "restore", 0.9)
            add(server, "tensorstore", "restore", 1.2)
        for do in ("save", "restore"):
            add("gcs", "fsspec", do, 0.9)
        for key, peak in self.peaks.items():
            out.append(Bar(f"{key}: tstore memory beyond the arrays", 256, peak / 2**20, most=True, unit=" MiB"))
        return out

    def tables(self) -> Iterator[Table]:
        for server, figures in self.seconds.items():
            out = Table(title=server, title_justify="left")
            for head in ("", "save GB/s", "min–max", "restore GB/s", "min–max"):
                out.add_column(head, justify="right" if head else "left", no_wrap=True)
            for name, by in figures.items():
                row = [name]
                for do in ("save", "restore"):
                    speeds = sorted(self.hosts.size / 1e9 / s for s in by.get(do, []))
                    row += [f"{median(speeds):.3g}", f"{speeds[0]:.3g}–{speeds[-1]:.3g}"] if speeds else ["–", ""]
                out.add_row(*row)
            requests = self.requests.get(server, {})
            out.caption = "\n".join(f"tstore's requests, {do}: {_counts(n)}" for do, n in requests.items() if n)
            out.caption_justify = "left"
            yield out

    def data(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "requests": self.requests,
            "peaks": self.peaks,
            "errors": self.errors,
        }


def _counts(requests: dict[str, int]) -> str:
    return f"{sum(requests.values())} ({', '.join(f'{n} {o}' for o, n in sorted(requests.items()))})"


@click.command(help=__doc__, context_settings={"max_content_width": 110})
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--hosts", default=8, show_default=True, type=click.IntRange(1))
@click.option("--size", default=256, show_default=True, type=click.IntRange(1), help="MiB of the checkpoint.")
@click.option("--only", default="", help=f"Comma-separated: {', '.join(SERVERS)}, latency.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file.")
@click.option(
    "--dir",
    "parent",
    default=".",
    help="Folder on the disk to measure.",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
def main(rounds: int, hosts: int, size: int, only: str, json_file: Path | None, parent: Path) -> None:
    chosen = [name.strip() for name in only.split(",") if name.strip()] or [*SERVERS, "latency"]
    console, log = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 120
    about = machine.describe(parent.resolve())
    console.print_json(json.dumps(about))
    with contextlib.closing(Hosts(hosts, size * 2**20)) as processes:
        measured = Measurement(processes, parent.resolve(), log)
        for number in range(rounds):
            for server in (s for s in chosen if s in SERVERS):
                log.print(f"round {number + 1} of {rounds}: {server}")
                measured.round(server, number)
    for table in measured.tables():
        console.print(table)
    bars = measured.bars()
    delayed = latency.measure(rounds) if "latency" in chosen else None
    if delayed is not None:
        console.print(
            f"50 ms per request: {delayed.arrays} arrays {median(delayed.many):.2f} s, the same bytes in one "
            f"array {median(delayed.one):.2f} s; one commit: {delayed.save} for {delayed.objects} objects"
        )
        bars += delayed.bars()
    console.print(bar_table(bars))
    if json_file:
        rows = [{"what": b.what, "need": b.need, "measured": b.measured, "met": b.met} for b in bars]
        data = {"machine": about, **measured.data(), "bars": rows}
        json_file.write_text(
            json.dumps(data | ({"latency": delayed._asdict()} if delayed else {}), indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

"""Tables, bars and plots of `bench.writers`, and the same as plain data for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.bars import Bar, bar_table
from bench.writers.model import Commit
from bench.writers.peers import WAYS
from bench.writers.rounds import Row

BAR_HOSTS = 8
TENSORSTORE = ("ts-shared", "ts-merged")
NAN = float("nan")


def chosen(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows with these values that have figures."""
    return [r for r in rows if "error" not in r and all(r[k] == v for k, v in wanted.items())]


def middle(rows: Sequence[Row], figure: str) -> float:
    """The median of a figure; NaN of no rows."""
    return median(r[figure] for r in rows) if rows else NAN


def ratio(mine: Sequence[Row], theirs: Sequence[Row], figure: str) -> float:
    """The median over rounds of one figure by the other's."""
    others = {r["round"]: r[figure] for r in theirs}
    pairs = [r[figure] / others[r["round"]] for r in mine if others.get(r["round"])]
    return median(pairs) if pairs else NAN


def show(console: Console, rows: list[Row], commits: list[tuple[bool, Commit]]) -> None:
    """Prints all tables of what was measured, what failed, and the bars."""
    tables = [cooperative_table(rows, durable) for durable in (True, False)]
    tables += [independent_table(rows, durable, tasks) for durable, tasks in ((True, False), (True, True))]
    tables += [independent_table(rows, False, False), killed_table(rows), model_table(commits)]
    for table in tables:
        if table.row_count:
            console.print(table)
    for row in rows:
        if "error" in row:
            console.print(f"{row['question']}, {row['way']}, {row['hosts']} hosts: {row['error']}", style="red")
    console.print(bar_table(bars(rows, commits)))
    for line in limits(rows):
        console.print(line)


def cooperative_table(rows: list[Row], durable: bool) -> Table:
    title = f"(a) one state of 1 GiB from all hosts, {_how(durable)}: GB/s, and the share after the last byte"
    return _by_hosts(
        title,
        chosen(rows, question="cooperative", durable=durable),
        lambda found: f"{middle(found, 'gbps'):.2f}, {middle(found, 'coordination'):.0%}",
        "hosts",
    )


def independent_table(rows: list[Row], durable: bool, tasks: bool) -> Table:
    title = f"(b) small commits a second by {'tasks of one process' if tasks else 'processes'}, {_how(durable)}"
    here = [r for r in chosen(rows, question="independent", durable=durable) if tasks == (r["tasks"] > 1)]
    here += chosen(rows, question="independent", durable=durable, hosts=1, tasks=1) if tasks and here else []
    return _by_hosts(title, here, _small, "tasks" if tasks else "hosts")


def killed_table(rows: list[Row]) -> Table:
    title = "(c) one host killed: seconds from there to the commit of the next attempt, with fsync"
    found = chosen(rows, question="killed")
    return _by_hosts(title, found, lambda some: f"{middle(some, 'seconds'):.2f} s", "hosts")


def model_table(commits: list[tuple[bool, Commit]]) -> Table:
    title = "(d) one checkpoint on a model of GCS, virtual time; the median of 9 runs, above 256 hosts of 3"
    out = Table(title=title, title_justify="left")
    heads = (
        "hosts",
        "their data ends",
        "last byte to visible",
        "to the last return",
        "requests",
        "a host",
        "429s",
    )
    for head in heads:
        out.add_column(head, justify="right")
    for uploads, c in commits:
        total = sum(c.requests.values())
        when = f"over {c.uploaded:.0f} s" if uploads else "no data"
        out.add_row(
            *(str(c.hosts), when, f"{c.visible:.2f} s", f"{c.returned:.2f} s"),
            *(f"{total:,}", f"{c.per_host:.1f}", f"{c.refused:,}"),
        )
    return out


def bars(rows: list[Row], commits: list[tuple[bool, Commit]]) -> list[Bar]:
    """Every bar of the issue, NaN where it was not measured."""
    out: list[Bar] = []
    for durable in (True, False):
        here = {"question": "cooperative", "durable": durable, "hosts": BAR_HOSTS}
        mine, peers = chosen(rows, **here, way="tstore"), [chosen(rows, **here, way=n) for n in TENSORSTORE]
        better = max((p for p in peers if p), key=lambda p: middle(p, "gbps"), default=[])
        what = f"(a) {BAR_HOSTS} hosts, {_how(durable)}: tstore ÷ the better tensorstore way"
        out.append(Bar(what, 1.5, ratio(mine, better, "gbps")))
        out.append(
            Bar(
                f"(a) {BAR_HOSTS} hosts, {_how(durable)}: coordination",
                10,
                100 * middle(mine, "coordination"),
                most=True,
                unit=" %",
            )
        )
    small = {"question": "independent", "durable": True, "hosts": BAR_HOSTS, "tasks": 1}
    mine, theirs = chosen(rows, **small, way="tstore"), chosen(rows, **small, way="ts-shared")
    out.append(
        Bar(f"(b) {BAR_HOSTS} processes, fsync: tstore ÷ tensorstore's ocdbt", 5, ratio(mine, theirs, "rate"))
    )
    lost = [r["lost"] for r in chosen(rows, question="independent", way="tstore")]
    out.append(Bar("(b) commits of tstore that were lost", 0, sum(lost) if lost else NAN, most=True, unit=""))
    visible = {(up, c.hosts): c for up, c in commits}
    for uploads, what in ((True, "their data ends one after another"), (False, "no data")):
        few, many = visible.get((uploads, 64)), visible.get((uploads, 4096))
        grown = many.visible / few.visible if few and many else NAN
        out.append(Bar(f"(d) seconds to visible, 4096 hosts ÷ 64, {what}", 4, grown, most=True))
        more = many.per_host / few.per_host if few and many else NAN
        out.append(Bar(f"(d) requests a host, 4096 hosts ÷ 64, {what}", 2, more, most=True))
    return out


def limits(rows: list[Row]) -> list[str]:
    """What the disk alone would reach of the bars for (a)."""
    out = []
    for durable in (True, False):
        here = {"question": "cooperative", "durable": durable, "hosts": BAR_HOSTS}
        raw, mine = chosen(rows, **here, way="raw"), chosen(rows, **here, way="tstore")
        if raw and mine:
            against = [
                f"÷ {WAYS[n].title} {ratio(raw, chosen(rows, **here, way=n), 'gbps'):.2f}" for n in TENSORSTORE
            ]
            share = f"tstore ÷ raw {ratio(mine, raw, 'gbps'):.2f}"
            out.append(f"(a) {BAR_HOSTS} hosts, {_how(durable)}: raw {', '.join(against)}; {share}")
    return out


def plot(rows: list[Row], commits: list[tuple[bool, Commit]], folder: Path) -> list[Path]:
    """The figures as PNG files in the folder."""
    from matplotlib.figure import Figure

    made = []

    def drawn(name: str, title: str, lines: dict[str, list[tuple[int, float]]], unit: str) -> None:
        lines = {label: sorted(points) for label, points in lines.items() if points}
        if not lines:
            return
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(xscale="log", xlabel="hosts", ylabel=unit, title=title)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / name, dpi=120)
        made.append(folder / name)

    def by_way(figure: str, **wanted: Any) -> dict[str, list[tuple[int, float]]]:
        found = chosen(rows, **wanted)
        return {
            way.title: [
                (n, middle(chosen(found, way=name, hosts=n), figure))
                for n in sorted({r["hosts"] for r in found if r["way"] == name})
            ]
            for name, way in WAYS.items()
        }

    drawn(
        "cooperative.png",
        "1 GiB as one commit, fsync",
        by_way("gbps", question="cooperative", durable=True),
        "GB/s",
    )
    small = {"question": "independent", "durable": True, "tasks": 1}
    drawn("independent.png", "small commits by processes, fsync", by_way("rate", **small), "commits/s")
    for uploads in (True, False):
        lines = {
            "to the visible commit": [(c.hosts, c.visible) for up, c in commits if up == uploads],
            "to the last host's return": [(c.hosts, c.returned) for up, c in commits if up == uploads],
        }
        name = "model.png" if uploads else "model-at-once.png"
        drawn(name, "a checkpoint on the model of GCS", lines, "seconds from the last byte on")
    return made


def as_data(about: dict[str, Any], rows: list[Row], commits: list[tuple[bool, Commit]]) -> dict[str, Any]:
    """What ``--json`` writes; no NaN in it."""
    return {
        "machine": about,
        "rows": rows,
        "model": [{"uploads": up, **c._asdict(), "per_host": c.per_host} for up, c in commits],
        "bars": [
            {"what": b.what, "need": b.need, "measured": None if b.met is None else b.measured, "met": b.met}
            for b in bars(rows, commits)
        ],
    }


def _by_hosts(title: str, rows: list[Row], cell: Callable[[list[Row]], str], count: str) -> Table:
    names = [name for name in WAYS if any(r["way"] == name for r in rows)]
    out = Table(title=title, title_justify="left")
    out.add_column(count, justify="right")
    for name in names:
        out.add_column(WAYS[name].title, justify="right")
    for number in sorted({r[count] for r in rows}):
        found = [chosen(rows, way=name, **{count: number}) for name in names]
        out.add_row(str(number), *[cell(some) if some else "–" for some in found])
    return out


def _small(rows: list[Row]) -> str:
    lost, made = sum(r["lost"] for r in rows), sum(r["commits"] for r in rows)
    parts = [
        f"{middle(rows, 'rate'):.0f}/s",
        f"p50 {middle(rows, 'p50_ms'):.1f} p99 {middle(rows, 'p99_ms'):.0f} ms",
    ]
    if sum(r["retries"] for r in rows):
        parts.append(f"{sum(r['retries'] for r in rows) / made:.1f} retries each")
    return ", ".join([*parts, f"[red]{lost} of {made} lost" if lost else "0 lost"])


def _how(durable: bool) -> str:
    return "fsync" if durable else "no fsync"

"""The tables, bars and plots of `bench.writers`, and its figures as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.bars import Bar, bar_table
from bench.writers.model import Commit
from bench.writers.peers import CONTENDERS
from bench.writers.rounds import Row

BAR_HOSTS = 8
TENSORSTORE = ("ts-shared", "ts-merged")
NAN = float("nan")


def select(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Return the rows with these values, without those that failed."""
    return [r for r in rows if "error" not in r and all(r[k] == v for k, v in values.items())]


def median_of(rows: Sequence[Row], figure: str) -> float:
    """Return the median of a figure; NaN for no rows."""
    return median(r[figure] for r in rows) if rows else NAN


def ratio(mine: Sequence[Row], theirs: Sequence[Row], figure: str) -> float:
    """Return the median over rounds of the ratio of a figure to the other's."""
    others = {r["round"]: r[figure] for r in theirs}
    pairs = [r[figure] / others[r["round"]] for r in mine if others.get(r["round"])]
    return median(pairs) if pairs else NAN


def show(console: Console, rows: list[Row], commits: list[tuple[bool, Commit]]) -> None:
    """Print all tables, the failures and the bars."""
    tables = [cooperative_table(rows, durable) for durable in (True, False)]
    tables += [independent_table(rows, durable, tasks) for durable, tasks in ((True, False), (True, True))]
    tables += [independent_table(rows, False, False), killed_table(rows), model_table(commits)]
    for table in tables:
        if table.row_count:
            console.print(table)
    for row in rows:
        if "error" in row:
            console.print(
                f"{row['question']}, {row['contender']}, {row['hosts']} hosts: {row['error']}", style="red"
            )
    console.print(bar_table(bars(rows, commits)))
    for line in limits(rows):
        console.print(line)


def cooperative_table(rows: list[Row], durable: bool) -> Table:
    title = (
        f"(a) one state of 1 GiB from all hosts, {_how(durable)}: GB/s, and the share of time after the last byte"
    )
    return _by_hosts(
        title,
        select(rows, question="cooperative", durable=durable),
        lambda selected: f"{median_of(selected, 'gbps'):.2f}, {median_of(selected, 'coordination'):.0%}",
        "hosts",
    )


def independent_table(rows: list[Row], durable: bool, tasks: bool) -> Table:
    title = f"(b) small commits a second by {'tasks of one process' if tasks else 'processes'}, {_how(durable)}"
    here = [r for r in select(rows, question="independent", durable=durable) if tasks == (r["tasks"] > 1)]
    here += select(rows, question="independent", durable=durable, hosts=1, tasks=1) if tasks and here else []
    return _by_hosts(title, here, _small, "tasks" if tasks else "hosts")


def killed_table(rows: list[Row]) -> Table:
    title = "(c) one host killed: seconds until the commit of the next attempt, with fsync"
    selected = select(rows, question="killed")
    return _by_hosts(title, selected, lambda some: f"{median_of(some, 'seconds'):.2f} s", "hosts")


def model_table(commits: list[tuple[bool, Commit]]) -> Table:
    title = "(d) one checkpoint on a model of GCS, virtual time; the median of 9 runs, or of 3 above 256 hosts"
    out = Table(title=title, title_justify="left")
    heads = (
        "hosts",
        "data sent",
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
    """Return all bars; those not measured are NaN."""
    out: list[Bar] = []
    for durable in (True, False):
        here = {"question": "cooperative", "durable": durable, "hosts": BAR_HOSTS}
        mine, peers = (
            select(rows, **here, contender="tstore"),
            [select(rows, **here, contender=n) for n in TENSORSTORE],
        )
        better = max((p for p in peers if p), key=lambda p: median_of(p, "gbps"), default=[])
        what = f"(a) {BAR_HOSTS} hosts, {_how(durable)}: tstore ÷ the better tensorstore"
        out.append(Bar(what, 1.5, ratio(mine, better, "gbps")))
        out.append(
            Bar(
                f"(a) {BAR_HOSTS} hosts, {_how(durable)}: coordination",
                10,
                100 * median_of(mine, "coordination"),
                most=True,
                unit=" %",
            )
        )
    small = {"question": "independent", "durable": True, "hosts": BAR_HOSTS, "tasks": 1}
    mine, theirs = select(rows, **small, contender="tstore"), select(rows, **small, contender="ts-shared")
    out.append(
        Bar(f"(b) {BAR_HOSTS} processes, fsync: tstore ÷ tensorstore's ocdbt", 5, ratio(mine, theirs, "rate"))
    )
    lost = [r["lost"] for r in select(rows, question="independent", contender="tstore")]
    out.append(Bar("(b) lost commits of tstore", 0, sum(lost) if lost else NAN, most=True, unit=""))
    visible = {(up, c.hosts): c for up, c in commits}
    for uploads, what in ((True, "data sent one after another"), (False, "no data")):
        few, many = visible.get((uploads, 64)), visible.get((uploads, 4096))
        grown = many.visible / few.visible if few and many else NAN
        out.append(Bar(f"(d) seconds to visible, 4096 hosts ÷ 64, {what}", 4, grown, most=True))
        more = many.per_host / few.per_host if few and many else NAN
        out.append(Bar(f"(d) requests a host, 4096 hosts ÷ 64, {what}", 2, more, most=True))
    return out


def limits(rows: list[Row]) -> list[str]:
    """Return, for the bars of (a), what the raw disk reaches."""
    out = []
    for durable in (True, False):
        here = {"question": "cooperative", "durable": durable, "hosts": BAR_HOSTS}
        raw, mine = select(rows, **here, contender="raw"), select(rows, **here, contender="tstore")
        if raw and mine:
            against = [
                f"÷ {CONTENDERS[n].title} {ratio(raw, select(rows, **here, contender=n), 'gbps'):.2f}"
                for n in TENSORSTORE
            ]
            share = f"tstore ÷ raw {ratio(mine, raw, 'gbps'):.2f}"
            out.append(f"(a) {BAR_HOSTS} hosts, {_how(durable)}: raw {', '.join(against)}; {share}")
    return out


def plot(rows: list[Row], commits: list[tuple[bool, Commit]], folder: Path, skipped: int = 0) -> list[Path]:
    """Plot the figures to PNG files in a new or old folder, and return their paths."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    made = []

    def drawn(name: str, title: str, lines: dict[str, list[tuple[int, float]]], unit: str, better: str) -> None:
        absent = [label for label, points in lines.items() if not points]
        lines = {label: sorted(points) for label, points in lines.items() if points}
        if not lines:
            return
        hosts = sorted({number for points in lines.values() for number, _ in points})
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        if len(hosts) == 1:  # lines would be points
            bars = axes.barh([*lines], [points[0][1] for points in lines.values()])
            axes.bar_label(bars, fmt="%.3g", padding=3)
            axes.margins(x=0.12)
            axes.invert_yaxis()
            axes.set(xlabel=f"{unit} ({better} is better)", title=f"{title}, {hosts[0]} hosts")
            axes.grid(axis="x", alpha=0.3)
        else:
            for label, points in lines.items():
                axes.plot(*zip(*points, strict=True), marker="o", label=label)
            axes.set_xscale("log", base=2)
            axes.set_xticks(hosts, [f"{number:,}" for number in hosts])
            axes.set(xlabel="hosts", ylabel=f"{unit} ({better} is better)", title=title)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend()
        notes = [f"not measured: {', '.join(absent)}"] if absent else []
        notes += [f"{skipped} measurements skipped for lack of time"] if skipped else []
        if notes:
            figure.supxlabel("; ".join(notes), fontsize="small", color="0.4")
        figure.savefig(folder / name, dpi=120)
        made.append(folder / name)

    def by_contender(figure: str, **values: Any) -> dict[str, list[tuple[int, float]]]:
        selected = select(rows, **values)
        return {
            contender.title: [
                (n, median_of(select(selected, contender=name, hosts=n), figure))
                for n in sorted({r["hosts"] for r in selected if r["contender"] == name})
            ]
            for name, contender in CONTENDERS.items()
            if any(r["contender"] == name and r["question"] == values["question"] for r in rows)  # or failed
        }

    drawn(
        "cooperative.png",
        "1 GiB as one commit, fsync",
        by_contender("gbps", question="cooperative", durable=True),
        "GB/s",
        "higher",
    )
    small = {"question": "independent", "durable": True, "tasks": 1}
    drawn(
        "independent.png",
        "small commits by processes, fsync",
        by_contender("rate", **small),
        "commits/s",
        "higher",
    )
    for uploads in (True, False):
        lines = {
            "to the visible commit": [(c.hosts, c.visible) for up, c in commits if up == uploads],
            "to the last host's return": [(c.hosts, c.returned) for up, c in commits if up == uploads],
        }
        name = "model.png" if uploads else "model-at-once.png"
        drawn(name, "a checkpoint on the model of GCS", lines, "seconds from the last byte on", "lower")
    return made


def as_data(about: dict[str, Any], rows: list[Row], commits: list[tuple[bool, Commit]]) -> dict[str, Any]:
    """Return the data that `--json` writes, without NaN."""
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
    names = [name for name in CONTENDERS if any(r["contender"] == name for r in rows)]
    out = Table(title=title, title_justify="left")
    out.add_column(count, justify="right")
    for name in names:
        out.add_column(CONTENDERS[name].title, justify="right")
    for number in sorted({r[count] for r in rows}):
        selected = [select(rows, contender=name, **{count: number}) for name in names]
        out.add_row(str(number), *[cell(some) if some else "–" for some in selected])
    return out


def _small(rows: list[Row]) -> str:
    lost, made = sum(r["lost"] for r in rows), sum(r["commits"] for r in rows)
    parts = [
        f"{median_of(rows, 'rate'):.0f}/s",
        f"p50 {median_of(rows, 'p50_ms'):.1f} p99 {median_of(rows, 'p99_ms'):.0f} ms",
    ]
    if sum(r["retries"] for r in rows):
        parts.append(f"{sum(r['retries'] for r in rows) / made:.1f} retries each")
    return ", ".join([*parts, f"[red]{lost} of {made} lost" if lost else "0 lost"])


def _how(durable: bool) -> str:
    return "fsync" if durable else "no fsync"

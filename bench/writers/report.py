"""The tables, bars and plots of `bench.writers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from bench.bars import Bar
from bench.figures import Figures
from bench.report import table
from bench.writers.model import Commit
from bench.writers.rounds import CONTENDERS, Row

BAR_HOSTS = 8
TENSORSTORE = ("ts-shared", "ts-merged")
NAN = float("nan")

Commits = list[tuple[bool, Commit]]
"""A commit on the model for each number of hosts, with data to send (True) and without."""
Points = dict[str, list[tuple[int, float]]]
"""The figures of a plot by label: number of hosts and value."""


def select(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Return the rows with these values, without those that failed."""
    return [r for r in rows if "error" not in r and all(r[k] == v for k, v in values.items())]


def figures(rows: Iterable[Row], **values: Any) -> Figures:
    """Return the figures of the rows with these values, by round."""
    out = Figures()
    for row in select(rows, **values):
        for measure, value in row.items():
            if isinstance(value, float | int):
                out.add(measure, row["round"], value)
    return out


def parts(rows: list[Row], commits: Commits) -> list[RenderableType]:
    """Return all tables that have rows, and the failures."""
    tables = [cooperative_table(rows, durable) for durable in (True, False)]
    tables += [independent_table(rows, durable, tasks) for durable, tasks in ((True, False), (True, True))]
    tables += [independent_table(rows, False, False), killed_table(rows), model_table(commits)]
    failed = [
        f"[red]{row['question']}, {row['contender']}, {row['hosts']} hosts: {row['error']}"
        for row in rows
        if "error" in row
    ]
    return [*(each for each in tables if each.row_count), *failed]


def cooperative_table(rows: list[Row], durable: bool) -> Table:
    def text(some: list[Row]) -> str:
        f = figures(some)
        return f"{f.median('gbps'):.2f}, {f.median('coordination'):.0%}"

    what = "GB/s, and the share of time after the last byte"
    title = f"(a) one state of 1 GiB from all hosts, {_how(durable)}: {what}"
    return _by_hosts(title, select(rows, question="cooperative", durable=durable), text)


def independent_table(rows: list[Row], durable: bool, tasks: bool) -> Table:
    title = f"(b) small commits a second by {'tasks of one process' if tasks else 'processes'}, {_how(durable)}"
    here = [r for r in select(rows, question="independent", durable=durable) if tasks == (r["tasks"] > 1)]
    here += select(rows, question="independent", durable=durable, hosts=1, tasks=1) if tasks and here else []
    return _by_hosts(title, here, _small, "tasks" if tasks else "hosts")


def killed_table(rows: list[Row]) -> Table:
    title = "(c) one host killed: seconds until the commit of the next attempt, with fsync"
    selected = select(rows, question="killed")
    return _by_hosts(title, selected, lambda some: f"{figures(some).median('seconds'):.2f} s")


def model_table(commits: Commits) -> Table:
    title = "(d) one checkpoint on a model of GCS, virtual time; the median of 9 runs, or of 3 above 256 hosts"
    heads = ("hosts", "data sent", "last byte to visible", "to the last return", "requests", "a host", "429s")
    rows = [
        [
            *(str(c.hosts), f"over {c.uploaded:.0f} s" if uploads else "no data", f"{c.visible:.2f} s"),
            *(f"{c.returned:.2f} s", f"{sum(c.requests.values()):,}", f"{c.per_host:.1f}", f"{c.refused:,}"),
        ]
        for uploads, c in commits
    ]
    return table(title, heads, rows)


def bars(rows: list[Row], commits: Commits) -> list[Bar]:
    """Return all bars; those not measured are NaN."""
    out: list[Bar] = []
    for durable in (True, False):
        here = {"question": "cooperative", "durable": durable, "hosts": BAR_HOSTS}
        mine, peers = figures(rows, **here, contender="tstore"), _peers(rows, **here)
        better = max((f for f in peers.values() if f.values), key=lambda f: f.median("gbps"), default=Figures())
        title = f"(a) {BAR_HOSTS} hosts, {_how(durable)}:"
        out.append(Bar(f"{title} tstore ÷ the better tensorstore", 1.5, mine.ratio("gbps", better)))
        coordination = 100 * mine.median("coordination")
        out.append(Bar(f"{title} coordination", 10, coordination, most=True, unit=" %"))
    small = {"question": "independent", "durable": True, "hosts": BAR_HOSTS, "tasks": 1}
    by = figures(rows, **small, contender="tstore").ratio("rate", figures(rows, **small, contender="ts-shared"))
    out.append(Bar(f"(b) {BAR_HOSTS} processes, fsync: tstore ÷ tensorstore's ocdbt", 5, by))
    lost = [r["lost"] for r in select(rows, question="independent", contender="tstore")]
    out.append(Bar("(b) lost commits of tstore", 0, sum(lost) if lost else NAN, most=True, unit=""))
    runs = {(uploads, c.hosts): c for uploads, c in commits}
    for uploads, what in ((True, "data sent one after another"), (False, "no data")):
        few, many = runs.get((uploads, 64)), runs.get((uploads, 4096))
        grown, more = (many.visible / few.visible, many.per_host / few.per_host) if few and many else (NAN, NAN)
        out.append(Bar(f"(d) seconds to visible, 4096 hosts ÷ 64, {what}", 4, grown, most=True))
        out.append(Bar(f"(d) requests a host, 4096 hosts ÷ 64, {what}", 2, more, most=True))
    return out


def limits(rows: list[Row]) -> list[str]:
    """Return, for the bars of (a), what the raw disk reaches."""
    out = []
    for durable in (True, False):
        here = {"question": "cooperative", "durable": durable, "hosts": BAR_HOSTS}
        raw, mine = (figures(rows, **here, contender=name) for name in ("raw", "tstore"))
        if raw.values and mine.values:
            against = [
                f"÷ {CONTENDERS[n].title} {raw.ratio('gbps', f):.2f}" for n, f in _peers(rows, **here).items()
            ]
            share = f"tstore ÷ raw {mine.ratio('gbps', raw):.2f}"
            out.append(f"(a) {BAR_HOSTS} hosts, {_how(durable)}: raw {', '.join(against)}; {share}")
    return out


def plot(rows: list[Row], commits: Commits, folder: Path, skipped: int = 0) -> list[Path]:
    """Plot the figures to PNG files in a new or old folder, and return their paths."""

    def by_contender(figure: str, **values: Any) -> Points:
        tried = {r["contender"] for r in rows if r["question"] == values["question"]}  # or failed
        selected = select(rows, **values)
        return {
            contender.title: [
                (hosts, figures(selected, contender=name, hosts=hosts).median(figure))
                for hosts in sorted({r["hosts"] for r in selected if r["contender"] == name})
            ]
            for name, contender in CONTENDERS.items()
            if name in tried
        }

    def by_moment(uploads: bool) -> Points:
        runs = [c for up, c in commits if up == uploads]
        return {
            "to the visible commit": [(c.hosts, c.visible) for c in runs],
            "to the last host's return": [(c.hosts, c.returned) for c in runs],
        }

    saves = by_contender("gbps", question="cooperative", durable=True)
    small = by_contender("rate", question="independent", durable=True, tasks=1)
    model, seconds = "a checkpoint on the model of GCS", "seconds from the last byte on (lower is better)"
    plots = [
        ("cooperative.png", "1 GiB as one commit, fsync", saves, "GB/s (higher is better)"),
        ("independent.png", "small commits by processes, fsync", small, "commits/s (higher is better)"),
        ("model.png", model, by_moment(True), seconds),
        ("model-at-once.png", model, by_moment(False), seconds),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, title, points, unit in plots:
        if any(points.values()):
            _draw(folder / name, title, points, unit, skipped)
    return [folder / name for name, _, points, _ in plots if any(points.values())]


def _draw(path: Path, title: str, points: Points, unit: str, skipped: int) -> None:
    from matplotlib.figure import Figure

    lines = {label: sorted(line) for label, line in points.items() if line}
    hosts = sorted({number for line in lines.values() for number, _ in line})
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    if len(hosts) == 1:  # lines would be points
        bars = axes.barh([*lines], [line[0][1] for line in lines.values()])
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set(xlabel=unit, title=f"{title}, {hosts[0]} hosts")
        axes.grid(axis="x", alpha=0.3)
    else:
        for label, line in lines.items():
            axes.plot(*zip(*line, strict=True), marker="o", label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(hosts, [f"{number:,}" for number in hosts])
        axes.set(xlabel="hosts", ylabel=unit, title=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    absent = [label for label, line in points.items() if not line]
    notes = [f"not measured: {', '.join(absent)}"] if absent else []
    notes += [f"{skipped} measurements skipped for lack of time"] if skipped else []
    if notes:
        figure.supxlabel("; ".join(notes), fontsize="small", color="0.4")
    figure.savefig(path, dpi=120)


def _peers(rows: list[Row], **values: Any) -> dict[str, Figures]:
    return {name: figures(rows, **values, contender=name) for name in TENSORSTORE}


def _by_hosts(title: str, rows: list[Row], text: Callable[[list[Row]], str], count: str = "hosts") -> Table:
    names = [name for name in CONTENDERS if any(r["contender"] == name for r in rows)]
    cells: list[Sequence[str]] = []
    for number in sorted({r[count] for r in rows}):
        selected = [select(rows, contender=name, **{count: number}) for name in names]
        cells.append([str(number), *(text(some) if some else "–" for some in selected)])
    return table(title, [count, *(CONTENDERS[name].title for name in names)], cells)


def _small(rows: list[Row]) -> str:
    f, totals = figures(rows), {key: sum(r[key] for r in rows) for key in ("lost", "commits", "retries")}
    texts = [f"{f.median('rate'):.0f}/s", f"p50 {f.median('p50_ms'):.1f} p99 {f.median('p99_ms'):.0f} ms"]
    if totals["retries"]:
        texts.append(f"{totals['retries'] / totals['commits']:.1f} retries each")
    lost = f"[red]{totals['lost']} of {totals['commits']} lost" if totals["lost"] else "0 lost"
    return ", ".join([*texts, lost])


def _how(durable: bool) -> str:
    return "fsync" if durable else "no fsync"

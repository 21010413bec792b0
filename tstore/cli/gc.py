"""The command `tstore gc`."""

from __future__ import annotations

import datetime

import click

import tstore
from tstore.cli.console import Document, json_option, run, store_argument
from tstore.cli.tables import Progress, show_collected
from tstore.collect import ABANDONED_AFTER
from tstore.commits.retention import Best, Keep

__all__ = ["gc"]


def _best(context: click.Context, parameter: click.Parameter, value: str | None) -> Best | None:
    if value is None:
        return None
    count, _, metric = value.partition(":")
    metric, order = (metric[:-4], metric[-3:]) if metric.endswith((":min", ":max")) else (metric, "min")
    if not count.isdigit() or not metric:
        raise click.BadParameter(f"{value!r}: expected N:METRIC or N:METRIC:max, as 3:loss")
    return int(count), metric, "max" if order == "max" else "min"


@click.command("gc")
@store_argument
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="The N highest steps stay.")
@click.option("--keep-every", type=click.IntRange(1), metavar="K", help="The steps that K divides stay.")
@click.option(
    "--keep-best",
    callback=_best,
    metavar="N:METRIC[:max]",
    help="The N steps of the least (with :max the greatest) value of a metric stay.",
)
@click.option(
    "--keep-days", type=click.FloatRange(0), metavar="D", help="Versions of the last D days stay, steps or not."
)
@click.option("--keep-tag", multiple=True, metavar="TAG", help="The version with this tag stays; may be repeated.")
@click.option(
    "--abandoned-days",
    type=click.FloatRange(0),
    default=ABANDONED_AFTER.days,
    show_default=True,
    metavar="D",
    help="What transactions left that nobody wrote to for D days goes.",
)
@click.option("--dry-run", is_flag=True, help="Show what would go, and remove nothing.")
@json_option
def gc(
    store: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: Best | None,
    keep_days: float | None,
    keep_tag: tuple[str, ...],
    abandoned_days: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Remove the versions that no --keep option keeps, and what abandoned transactions left.

    The newest version and the newest step always stay. Without --keep options every version stays.
    """
    newer = None if keep_days is None else datetime.timedelta(days=keep_days)
    rules = (keep_last, keep_every, keep_best, newer)
    keep = Keep(*rules, tags=keep_tag) if keep_tag or any(r is not None for r in rules) else None

    async def work(progress: Progress) -> Document:
        progress.doing(f"collecting {store}")
        async with await tstore.open(store, "r"):
            pass  # mode "a" would make a store where none is
        async with await tstore.open(store, "r" if dry_run else "a") as opened:
            abandoned = datetime.timedelta(days=abandoned_days)
            report = await opened.collect(keep, abandoned=abandoned, dry_run=dry_run)
        return {"store": opened.url, **report._asdict()}

    return run(work, show_collected, as_json)

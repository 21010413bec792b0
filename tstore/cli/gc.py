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

_LONGEST = datetime.timedelta.max


def _best(context: click.Context, parameter: click.Parameter, value: str | None) -> Best | None:
    if value is None:
        return None
    count, _, metric = value.partition(":")
    metric, order = (metric[:-4], metric[-3:]) if metric.endswith((":min", ":max")) else (metric, "min")
    if not (count.isascii() and count.isdigit()) or int(count) == 0 or not metric:
        raise click.BadParameter(f"{value!r}: expected N:METRIC or N:METRIC:max, as 3:loss")
    return int(count), metric, "max" if order == "max" else "min"


def _days(context: click.Context, parameter: click.Parameter, value: float | None) -> datetime.timedelta | None:
    try:
        return None if value is None else datetime.timedelta(days=value)
    except (OverflowError, ValueError):
        raise click.BadParameter(f"{value:g} days are no time; expected up to {_LONGEST.days}") from None


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
    "--keep-days",
    type=click.FloatRange(0),
    callback=_days,
    metavar="D",
    help="Versions of the last D days stay, steps or not, by the clocks of their writers and of this machine.",
)
@click.option("--keep-tag", multiple=True, metavar="TAG", help="The version with this tag stays; may be repeated.")
@click.option(
    "--abandoned-days",
    type=click.FloatRange(0),
    callback=_days,
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
    keep_days: datetime.timedelta | None,
    keep_tag: tuple[str, ...],
    abandoned_days: datetime.timedelta,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Remove the versions that no --keep option keeps, and what abandoned transactions left.

    The newest version and the newest step always stay. Without --keep options every version stays.
    """
    rules = (keep_last, keep_every, keep_best, keep_days)
    keep = Keep(*rules, tags=keep_tag) if keep_tag or any(r is not None for r in rules) else None

    async def work(progress: Progress) -> Document:
        progress.doing(f"collecting {store}")
        async with await tstore.open(store, "r" if dry_run else "r+") as opened:
            report = await opened.collect(keep, abandoned=abandoned_days, dry_run=dry_run)
        return {"store": opened.url, **report._asdict()}

    return run(work, show_collected, as_json)

"""The commands that check and maintain a store: `tstore verify`, `gc`, `repair` and `finish`."""

from __future__ import annotations

import datetime
import re

import click

import tstore
from tstore.cli.console import Document, Progress, json_option, run, store_argument
from tstore.cli.tables import show_collected, show_finished, show_repaired, show_verified
from tstore.errors import InvalidArgument
from tstore.format.retention import Best, Keep
from tstore.maintenance.gc import ABANDONED_AFTER

__all__ = ["finish", "gc", "repair", "verify"]

_MAX_AGE = datetime.timedelta.max


@click.command("verify")
@store_argument
@json_option
def verify(store: str, as_json: bool) -> int:
    """Read and check every version of a store.

    Prints one line for each fault and exits with status 1 if there are any.
    """

    async def work(progress: Progress) -> Document:
        progress.doing(f"verifying {store}")
        async with await tstore.open(store, "r") as opened:
            report = await opened.verify()
        return {"store": opened.url, "ok": report.ok, **report._asdict()}

    return run(work, show_verified, as_json)


def _parse_best(context: click.Context, parameter: click.Parameter, value: str | None) -> Best | None:
    if value is None:
        return None
    count, _, metric = value.partition(":")
    metric, order = (metric[:-4], metric[-3:]) if metric.endswith((":min", ":max")) else (metric, "min")
    if not (count.isascii() and count.isdigit() and len(count) < 20) or int(count) == 0 or not metric:
        raise click.BadParameter(f"{value!r:.60}: expected N:METRIC or N:METRIC:max, such as 3:loss")
    return int(count), metric, "max" if order == "max" else "min"


def _to_age(context: click.Context, parameter: click.Parameter, value: float | None) -> datetime.timedelta | None:
    try:
        return None if value is None else datetime.timedelta(days=value)
    except (OverflowError, ValueError):
        raise click.BadParameter(f"{value:g} days is too long; expected at most {_MAX_AGE.days}") from None


@click.command("gc")
@store_argument
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="Keep the N highest steps.")
@click.option("--keep-every", type=click.IntRange(1), metavar="K", help="Keep the steps that are multiples of K.")
@click.option(
    "--keep-best",
    callback=_parse_best,
    metavar="N:METRIC[:max]",
    help="Keep the N steps with the lowest (with :max the highest) value of a metric.",
)
@click.option(
    "--keep-days",
    type=click.FloatRange(0),
    callback=_to_age,
    metavar="D",
    help="Keep the versions of the last D days, by the clocks of their writers and of this machine.",
)
@click.option("--keep-tag", multiple=True, metavar="TAG", help="Keep the version with this tag; may be repeated.")
@click.option(
    "--abandoned-days",
    type=click.FloatRange(0),
    callback=_to_age,
    default=ABANDONED_AFTER.days,
    show_default=True,
    metavar="D",
    help="Delete the data of uncommitted transactions after D days without a write.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
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
    """Remove old versions and abandoned data.

    Removes the versions that match no --keep option, and the data of abandoned transactions. The newest version
    and the newest step are always kept. Without a --keep option every version is kept.
    """
    rules = (keep_last, keep_every, keep_best, keep_days)

    async def work(progress: Progress) -> Document:
        keep = Keep(*rules, tags=keep_tag) if keep_tag or any(r is not None for r in rules) else None
        progress.doing(f"collecting garbage in {store}")
        async with await tstore.open(store, "r" if dry_run else "r+") as opened:
            report = await opened.collect(keep, abandoned=abandoned_days, dry_run=dry_run)
        return {"store": opened.url, **report._asdict()}

    return run(work, show_collected, as_json)


@click.command("repair")
@store_argument
@click.option(
    "--void",
    multiple=True,
    type=click.IntRange(1),
    metavar="N",
    help="Void version N, if its record is damaged; may be repeated.",
)
@click.option(
    "--void-readable",
    multiple=True,
    type=click.IntRange(1),
    metavar="N",
    help="Void version N even if its record is readable, for example if it is forged; may be repeated.",
)
@json_option
def repair(store: str, void: tuple[int, ...], void_readable: tuple[int, ...], as_json: bool) -> int:
    """List damaged versions, or void them.

    Lists the versions whose records are damaged or name missing objects, and changes nothing. With --void N the
    record of version N is replaced by an empty one: the changes of that version are lost, but reads, verify, gc
    and commits work again. The damaged record is saved as damaged/N-<checksum> in the store. If you have a copy of
    the record, restore it instead. Needs direct access to the storage, not through tstore serve. Run the command
    again after an interruption. Exits with status 1 if a damaged version remains.
    """

    async def work(progress: Progress) -> Document:
        progress.doing(f"checking the records of {store}")
        async with await tstore.open(store, "r+" if void or void_readable else "r") as opened:
            try:
                report = await opened.repair(void, void_readable=void_readable)
            except InvalidArgument as error:
                message = re.sub(r"void_readable=\[(\d+)\]", r"--void-readable \1", str(error))
                raise InvalidArgument(message) from error
        damaged = [version._asdict() for version in report.damaged]
        return {"store": opened.url, "ok": report.ok, **report._asdict(), "damaged": damaged}

    return run(work, show_repaired, as_json)


@click.command("finish")
@store_argument
@click.argument("transaction")
@json_option
def finish(store: str, transaction: str, as_json: bool) -> int:
    """Commit a transaction whose hosts have died.

    TRANSACTION is the id or name of a cooperative transaction, as listed by `tstore ls STORE --pending`. All of
    its hosts must have delivered their fragments.
    """

    async def work(progress: Progress) -> Document:
        progress.doing(f"finishing {transaction}")
        async with await tstore.open(store, "r+") as opened:
            version = await opened.finish(transaction)
        return {"store": opened.url, "transaction": transaction, "version": version}

    return run(work, show_finished, as_json)

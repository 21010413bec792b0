"""The commands that change tags: `tstore tag` and `tstore rm`."""

from __future__ import annotations

from collections.abc import Mapping

import click

import tstore
from tstore.cli.console import STEP, Progress, at_options, json_option, run, store_argument
from tstore.cli.listings import show_removed, show_tagged, show_tags
from tstore.cli.results import Removed, RemovedStep, Tag, Tagged, Tags
from tstore.core.steps import chosen_snapshot, step_tag
from tstore.core.store import Store
from tstore.core.tags import drop_tag, later_steps, move_tag, remove_step, remove_steps_after, set_tag
from tstore.errors import AlreadyExists

__all__ = ["remove", "tag"]


@click.command("tag")
@store_argument
@click.argument("name", required=False)
@at_options("The version to tag, a number or a tag; the newest step by default.")
@click.option("-f", "--move", is_flag=True, help="Move the tag if it is in use.")
@click.option("-d", "--drop", is_flag=True, help="Remove the tag.")
@json_option
def tag(store: str, name: str | None, at: int | str | None, move: bool, drop: bool, as_json: bool) -> int:
    """List the tags, or set, move or drop one.

    Each change is a commit, which takes hardly any space and changes no array. `tstore gc --keep-tag NAME` keeps
    the version that a tag names. A step is a tag that only a save sets; `tstore rm` removes it.
    """
    if name is None and (move or drop or at is not None):
        raise click.UsageError("Missing argument 'NAME': the tag to set, move or drop.")
    if drop and (move or at is not None):
        raise click.UsageError("--drop removes a tag; pass it without --move, --at and --step")

    async def list_tags(progress: Progress) -> Tags:
        async with await tstore.open(store, "r") as opened:
            progress.doing(f"reading {store}")
            tags = sorted((await opened.tags()).items(), key=lambda item: item[1])
        return Tags(opened.url, [Tag(tag, version) for tag, version in tags])

    async def change_tag(progress: Progress) -> Tagged:
        assert name is not None
        async with await tstore.open(store, "r+") as opened:
            progress.doing(f"changing the tag {name}")
            if drop:
                dropped = (await opened.tags()).get(name)
                return Tagged(opened.url, name, None, await drop_tag(opened, name), dropped)
            try:
                tagged = await (move_tag if move else set_tag)(opened, name, at)
            except AlreadyExists as error:
                message = str(error).replace(
                    "move this one with transaction(move_tag=…)", "move this one with --move"
                )
                raise AlreadyExists(message) from error
        return Tagged(opened.url, name, tagged.target, tagged.version, None)

    return run(list_tags, show_tags, as_json) if name is None else run(change_tag, show_tagged, as_json)


@click.command("rm")
@store_argument
@click.option("--step", "steps", type=STEP, multiple=True, metavar="N", help="The step to remove.")
@click.option("--after", type=STEP, metavar="N", help="Remove all steps after step N, which stays.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@json_option
def remove(store: str, steps: tuple[int, ...], after: int | None, dry_run: bool, as_json: bool) -> int:
    """Remove a step, or all steps after it.

    A commit drops the tags of the steps. The steps are then no longer listed or restored, and can be saved again.
    Their data can still be read by version number until `tstore gc` with a --keep option removes these versions.
    The head is always kept. To continue a job from an earlier step, first remove the later steps with
    --after: otherwise the next start of the job would resume from the latest step.
    """

    if len(steps) + (after is not None) != 1:
        raise click.UsageError("pass exactly one of --step N and --after N")
    number, remove_steps = (steps[0], remove_step) if after is None else (after, remove_steps_after)

    async def work(progress: Progress) -> Removed:
        progress.doing(f"removing steps of {store}")
        async with await tstore.open(store, "r" if dry_run else "r+") as opened:
            await chosen_snapshot(opened, number, None)  # raises `NotFound`, which lists the steps
            tags = await opened.tags()
            removed = await _step_rows(opened, tags, [number] if after is None else later_steps(tags, number))
            version = None if dry_run else await remove_steps(opened, number)
        return Removed(opened.url, removed, version, dry_run)

    return run(work, show_removed, as_json)


async def _step_rows(store: Store, tags: Mapping[str, int], steps: list[int]) -> list[RemovedStep]:
    versions = [tags[step_tag(step)] for step in steps]
    sizes = [record.bytes_added async for _, record in store.log.reader.each_record(versions)]
    return list(map(RemovedStep, steps, versions, sizes))

"""What a transaction does with tags, and whether the tags that are there allow it; pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tstore.errors import AlreadyExists, InvalidArgument, NotFound, inventory
from tstore.format.arguments import checked_name, checked_tag

__all__ = ["TagEdits"]


class TagEdits(NamedTuple):
    """`named` are the tags of the version to be, of which those in `moved` may name another one before.

    `dropped` name no version any more.
    """

    named: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @staticmethod
    def of(tag: str | None, move_tag: str | None, drop_tag: str | None) -> TagEdits:
        """One of each kind; `InvalidArgument` for what can't be a tag, or is to become two things at once."""
        tag = None if tag is None else checked_tag("tag", tag)
        move_tag = None if move_tag is None else checked_tag("move_tag", move_tag)
        drop_tag = None if drop_tag is None else checked_name("drop_tag", drop_tag)  # others may have set any
        names = [t for t in (tag, move_tag, drop_tag) if t is not None]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise InvalidArgument(
                f"tag {twice[0]!r} is named twice: expected in one of tag=, move_tag=, drop_tag="
            )
        moved, dropped = ((t,) if t is not None else () for t in (move_tag, drop_tag))
        return TagEdits((*((tag,) if tag is not None else ()), *moved), moved, dropped)

    def check(self, known: Mapping[str, int], where: str) -> None:
        """Raises `AlreadyExists` for one that is taken and not to be moved, `NotFound` where one is not there."""
        for tag in self.named:
            if tag in known and tag not in self.moved:
                raise AlreadyExists(
                    f"{where}: the tag {tag!r} names version {known[tag]} already; pass another tag, or move this "
                    "one by transaction(move_tag=…)"
                )
        for tag in self.dropped:
            if tag not in known:
                names = sorted(known, key=known.__getitem__)
                raise NotFound(f"{where}: there is no tag {tag!r} to drop; {inventory('tags', names)}")

    def changed(self, before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
        """The tags, readable, that `check` found there, or not there, `before` and would not find so now."""
        checked = [t for t in (*self.named, *self.dropped) if t not in self.moved]
        return [f"tag {t}" for t in checked if (t in before) != (t in now)]

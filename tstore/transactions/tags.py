"""The tags that a transaction sets, moves or drops, and whether the existing tags allow it; pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tstore.errors import AlreadyExists, InvalidArgument, NotFound, available
from tstore.format.arguments import checked_name, checked_tag
from tstore.format.bounds import MOST_TAGS

__all__ = ["TagEdits"]


class TagEdits(NamedTuple):
    """`named` are the tags of the new version; those in `moved` may name another version before.

    `dropped` name no version any more.
    """

    named: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @staticmethod
    def from_arguments(tag: str | None, move_tag: str | None, drop_tag: str | None) -> TagEdits:
        """Return the edits; raise `InvalidArgument` for an invalid tag, or one that is passed twice."""
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

    def check(self, existing: Mapping[str, int], url: str) -> None:
        """Raise `AlreadyExists` for a tag that exists and is not moved, `NotFound` for a missing one to drop.

        Raises `InvalidArgument` where there would be more tags than a version may have.
        """
        for tag in self.named:
            if tag in existing and tag not in self.moved:
                raise AlreadyExists(
                    f"{url}: the tag {tag!r} names version {existing[tag]} already; pass another tag, or move "
                    "this one with transaction(move_tag=…)"
                )
        for tag in self.dropped:
            if tag not in existing:
                names = sorted(existing, key=existing.__getitem__)
                raise NotFound(f"{url}: there is no tag {tag!r} to drop; {available('tags', names)}")
        new = sum(tag not in existing for tag in self.named)
        if new and len(existing) + new - len(self.dropped) > MOST_TAGS:
            raise InvalidArgument(
                f"{url}: there are {len(existing):,} tags, and a version has at most {MOST_TAGS:,}; drop some "
                "with transaction(drop_tag=…), or let versions expire with collect"
            )

    def changed(self, before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
        """Return the tags, in words, for which `check` would decide differently `after` than `before`."""
        checked = [t for t in (*self.named, *self.dropped) if t not in self.moved]
        return [f"tag {t}" for t in checked if (t in before) != (t in after)]

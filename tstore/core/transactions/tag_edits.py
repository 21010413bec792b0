"""The tags that a transaction sets and drops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tstore.core.format.arguments import checked_name, checked_tag
from tstore.core.format.bounds import tags_excess_message
from tstore.errors import AlreadyExists, InvalidArgument, NotFound, name_list

__all__ = ["TagEdits"]


class TagEdits(NamedTuple):
    """The tags that a transaction sets (`assigned`), which of these may exist (`moved`), and those it drops.

    Assigned tags name the version `target`, by default the version that the transaction becomes.
    """

    assigned: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    target: int | None = None

    @staticmethod
    def from_arguments(
        tag: str | None, move_tag: str | Sequence[str] | None, drop_tag: str | Sequence[str] | None
    ) -> TagEdits:
        """Return the edits; raise `InvalidArgument` for an invalid tag, or one that is passed twice."""
        if tag is None and move_tag is None and drop_tag is None:
            return _NO_EDITS
        created = () if tag is None else (checked_tag("tag", tag),)
        moved = tuple(checked_tag("move_tag", name) for name in _listed(move_tag))
        # an existing tag may have been set by another program, which accepts more than `checked_tag`
        dropped = tuple(checked_name("drop_tag", name) for name in _listed(drop_tag))
        names = [*created, *moved, *dropped]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise InvalidArgument(
                f"tag {twice[0]!r} is passed twice; pass it as one of tag=, move_tag= and drop_tag="
            )
        return TagEdits((*created, *moved), moved, dropped)

    def check(self, existing: Mapping[str, int], url: str) -> None:
        """Raise `AlreadyExists` for a tag that exists and is not moved, `NotFound` if a tag to drop is missing.

        Raise `InvalidArgument` if there would be more tags than a version may have.
        """
        for tag in self.assigned:
            if tag in existing and tag not in self.moved:
                raise AlreadyExists(
                    f"{url}: the tag {tag!r} already names version {existing[tag]}; pass another tag, or move "
                    "this one with transaction(move_tag=…)"
                )
        for tag in self.dropped:
            if tag not in existing:
                names = sorted(existing, key=existing.__getitem__)
                raise NotFound(f"{url} has no tag {tag!r} to drop; {name_list('tags', names)}")
        adds_tags = self.assigned and not existing.keys() >= set(self.assigned)
        if adds_tags and (excess := tags_excess_message((existing.keys() | self.assigned) - set(self.dropped))):
            raise InvalidArgument(
                f"{url}: there would be {excess}; drop some with transaction(drop_tag=…), or let versions expire "
                "with collect"
            )

    def changed(self, before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
        """Return descriptions of the created and dropped tags that exist in only one of `before` and `after`."""
        checked = [t for t in (*self.assigned, *self.dropped) if t not in self.moved]
        return [f"tag {t}" for t in checked if (t in before) != (t in after)]


def _listed(names: Any) -> Sequence[Any]:
    return names if isinstance(names, list | tuple) else () if names is None else (names,)


_NO_EDITS = TagEdits()

"""Checks of the values in records, manifests and roots, which any program may have written; pure, no I/O.

Each check raises `Corrupt` with the reason. Text, tags and metadata follow the rules of `arguments`, which
refuses the same values when a writer passes them.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tstore.core.format.arguments import checked_metadata_values, checked_tag
from tstore.core.format.bounds import PATH_LEVELS, json_excess_message, path_excess_message
from tstore.core.format.layout import are_packs, is_pack, is_transaction
from tstore.errors import Corrupt, InvalidArgument

__all__ = [
    "LONGEST_MESSAGE",
    "check_ascending",
    "check_documents",
    "check_keys",
    "check_metadata",
    "check_packs",
    "check_paths",
    "check_tags",
    "check_time",
    "check_transactions",
    "date_of",
]

LONGEST_MESSAGE = 64 << 10
"""The longest message of a commit, in characters."""

_END_OF_TIME = 253_402_300_800.0  # the year 10,000, beyond the range of datetime
_PLAIN_TAG = re.compile(r"step/(?:0|[1-9][0-9]{0,17})|[A-Za-z_][A-Za-z0-9_.-]{0,200}")
_PLAIN_TAGS = re.compile(rf"(?:(?:{_PLAIN_TAG.pattern})\n)*+")
_CONTROL = re.compile(r"[\x00-\x1f]")
_FORBIDDEN_NAMES = ("", ".", "..", "zarr.json")


def date_of(time: float) -> datetime.datetime:
    """Return the date of a record's time, or the nearest date if the time is outside of the calendar."""
    try:
        return datetime.datetime.fromtimestamp(time, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        nearest = datetime.datetime.max if time > 0 else datetime.datetime.min
        return nearest.replace(tzinfo=datetime.UTC)


def check_transactions(names: Iterable[str]) -> None:
    """Check the ids of transactions."""
    for name in names:
        if not is_transaction(name):
            raise Corrupt(f"{name[:60]!r} is not the id of a transaction")


def check_time(time: float) -> None:
    """Check a time in seconds since 1970."""
    if not 0 <= time < _END_OF_TIME:
        raise Corrupt(f"the time {time} is outside of the calendar")


def check_tags(tags: Iterable[str]) -> None:
    """Check tags, each of which may be listed only once."""
    listed = tuple(tags)
    if len(listed) > 1:
        if len(set(listed)) < len(listed):
            repeated = next(tag for tag, count in Counter(listed).items() if count > 1)
            raise Corrupt(f"the tag {repeated[:60]!r} is listed twice")
        lines = "\n".join((*listed, ""))
        if _PLAIN_TAGS.fullmatch(lines) and lines.count("\n") == len(listed):
            return  # the usual case, checked with one expression
    for tag in listed:
        if not _PLAIN_TAG.fullmatch(tag):
            try:
                checked_tag("tag", tag)
            except InvalidArgument as error:
                raise Corrupt(str(error)) from error


def check_paths(paths: Sequence[str]) -> None:
    """Check the paths of nodes by the rules of `tree.checked_new_path`, but all names at once."""
    joined = "/".join(("", *paths, "")) if paths else ""
    wrong = "//" in joined or "/./" in joined or "/../" in joined or "/zarr.json/" in joined
    if wrong or (not joined.isprintable() and _CONTROL.search(joined)):
        forbidden = {*_FORBIDDEN_NAMES}
        invalid = next(p for p in paths if _CONTROL.search(p) or not forbidden.isdisjoint(p.split("/")))
        raise Corrupt(f"{invalid[:60]!r} is not the path of a node")
    if len(joined) > PATH_LEVELS and max(map(len, paths)) > PATH_LEVELS:  # a shorter path has fewer levels
        for path in paths:
            if excess := path_excess_message(path):
                raise Corrupt(f"the path {path[:60]!r}… has {excess}")


def check_keys(keys: Iterable[str], allowed: Callable[[str], bool], what: str) -> None:
    """Check the keys of objects with `allowed`; `what` describes an allowed object in the error."""
    for key in keys:
        if not allowed(key):
            raise Corrupt(f"{key[:60]!r} is not the key of {what}")


def check_packs(keys: Sequence[str]) -> None:
    """Check the keys of packs."""
    if not are_packs(keys):
        check_keys(keys, is_pack, "a pack")


def check_ascending(versions: Sequence[int], what: str) -> None:
    """Check that versions are listed in ascending order, each once; `what` describes them in the error."""
    if versions and versions[0] < 1:
        raise Corrupt(f"version {versions[0]} is listed among the {what} versions")
    if any(later <= version for version, later in itertools.pairwise(versions)):
        raise Corrupt(f"the {what} versions are out of order, or one is listed twice")


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Check the metadata of a commit."""
    if metadata:
        try:
            checked_metadata_values(metadata)
        except InvalidArgument as error:
            raise Corrupt(str(error)) from error


def check_documents(documents: Iterable[bytes]) -> None:
    """Check the bounds of the metadata documents of nodes; each is parsed when its node is used."""
    for document in documents:
        if excess := json_excess_message(document):
            raise Corrupt(f"the metadata of a node has {excess}")

"""The class of views: a name, a template, and a function from a query to a document."""

from __future__ import annotations

import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tstore.core.format.arguments import quote, step_number
from tstore.core.steps import step_tag, steps_of
from tstore.core.store import Store
from tstore.errors import InvalidArgument
from tstore.service.page.results import Results
from tstore.service.page.verification import Verification

__all__ = ["Document", "Query", "View", "at_argument", "choices", "natural_order", "shell_command"]

Document: TypeAlias = dict[str, Any]
"""The content of a view, as plain JSON values."""

_MAX_CHOICES = 1000  # steps, and other tags, in a list
_MAX_DIGITS = 20
_NUMBERS = re.compile(r"([0-9]+)")
_MAX_NUMBERS = 8  # numbers in a name that count for its order


class Query(NamedTuple):
    """A request for a view: the open store, how commands name it, and the parameters of the URL.

    `address` is a path or the URL of the server. The methods raise `InvalidArgument` for a value that can't be
    read.
    """

    store: Store
    address: str
    parameters: Mapping[str, str]
    results: Results
    """The results of other requests."""
    verification: Verification
    """The job that verifies the store."""

    def text(self, name: str) -> str:
        """Return a parameter, "" if it is absent."""
        return self.parameters.get(name, "").strip()

    def version(self, name: str) -> int | str | None:
        """Return a parameter that is a version or a tag, None if it is absent: digits are a version."""
        value = self.parameters.get(name, "")
        return self.number(name) if value.isascii() and value.isdigit() else value or None

    def number(self, name: str, default: int | None = None) -> int | None:
        """Return a parameter that is a number of at least 0, or the default."""
        value = self.text(name)
        if not value:
            return default
        if not (value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS):
            raise InvalidArgument(f"{name}={quote(value)}: expected a number")
        return int(value)

    def message(self, error: object) -> str:
        """Return the text of an error, which names the store as the visitor knows it, not by its path here."""
        return str(error).replace(self.store.url, self.address)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return a parameter that is one of the choices, by default the first."""
        value = self.text(name) or choices[0]
        if value not in choices:
            raise InvalidArgument(f"{name}={quote(value)}: expected {', '.join(filter(None, choices))}")
        return value


class View(NamedTuple):
    """A view of the store.

    `name` is the end of its URL, `title` its name in the navigation ("" if it is not listed there). `template` is
    "" for a view that exists as JSON only, for scripts of the page.
    """

    name: str
    title: str
    template: str
    load: Callable[[Query], Awaitable[Document]]


def shell_command(name: str, arguments: Sequence[str], options: Sequence[str] = ()) -> str:
    """Return a tstore command for a shell; whoever pastes it runs nothing else.

    Arguments that begin with a hyphen follow "--", so that they are not options.
    """
    words, flags = map(_shell_word, arguments), map(_shell_word, options)
    if any(argument.startswith("-") for argument in arguments):
        return " ".join(["tstore", name, *flags, "--", *words])
    return " ".join(["tstore", name, *words, *flags])


def _shell_word(text: str) -> str:
    """Return a text as a word of a shell.

    Quotes do not suffice for control characters: a terminal takes those of a pasted text for keys, such as the one
    that ends a line. Marks that turn the direction of text would show another command than is copied. So a word
    with such characters is written as $'…' with octal escapes only, where no shell sees an end before the last
    character.
    """
    if text.isprintable():
        return shlex.quote(text)
    escaped = (chr(b) if chr(b).isalnum() and b < 0x80 else f"\\{b:03o}" for b in text.encode(errors="replace"))
    return f"$'{''.join(escaped)}'"


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key for names that puts "layers/2" before "layers/10"; it is short for any name."""
    parts = _NUMBERS.split(name, _MAX_NUMBERS)
    return [(len(part.lstrip("0")), part) if i % 2 else (0, part) for i, part in enumerate(parts)]


def choices(tags: Mapping[str, int]) -> Document:
    """Return the tags for choosing a version: the steps and the others, the newest first, with their versions.

    Of more than a page can list, those are left out that lie between others, the older half thinned evenly.
    """
    steps = [(step_tag(step), tags[step_tag(step)]) for step in reversed(steps_of(tags))]
    others = [(tag, tags[tag]) for tag in sorted(tags, key=lambda tag: -tags[tag]) if step_number(tag) is None]
    return {"steps": _thinned(steps), "tags": _thinned(others), "count": len(tags)}


def _thinned(listed: list[tuple[str, int]]) -> list[tuple[str, int]]:
    if len(listed) <= _MAX_CHOICES:
        return listed
    newest, older = listed[: _MAX_CHOICES // 2], listed[_MAX_CHOICES // 2 :]
    return newest + older[:: -(-2 * len(older) // _MAX_CHOICES)]


def at_argument(at: str) -> str:
    """Return a version or a tag, as a URL has it, as an argument in Python; "" for the newest."""
    return at if at.isascii() and at.isdigit() else repr(at) if at else ""

"""What an attack is: a case with a name, what it does, what has to hold, and how it is run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, TypeVar

__all__ = ["Broken", "Case", "check", "family"]

T = TypeVar("T")


class Broken(AssertionError):
    """An attack brought about what it must not; the text says what, and where to look."""


class Case(NamedTuple):
    """One attack."""

    name: str
    does: str
    held: str
    """What holds if the attack fails."""
    run: Callable[[Any], Awaitable[None]]
    """Attack what the group attacks; `Broken` if it succeeds."""


def check(held: object, message: str) -> None:
    """Raise `Broken` with the message unless something holds."""
    if not held:
        raise Broken(message)


def family(
    name: str, does: str, held: str, run: Callable[[Any, T], Awaitable[None]], members: Iterable[tuple[str, T]]
) -> list[Case]:
    """Return the cases that do the same with different things: (name, thing) each."""

    def bound(thing: T) -> Callable[[Any], Awaitable[None]]:
        return lambda target: run(target, thing)

    return [Case(f"{name}: {label}", does, held, bound(thing)) for label, thing in members]

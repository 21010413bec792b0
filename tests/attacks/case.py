"""An attack as a case: its name, what it does, the property that must hold, and how to run it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, TypeVar

__all__ = ["Broken", "Case", "check", "family"]

T = TypeVar("T")


class Broken(AssertionError):
    """An attack succeeded; the message says what it broke and where."""


class Case(NamedTuple):
    """One attack."""

    name: str
    does: str
    held: str
    """The property that must hold."""
    run: Callable[[Any], Awaitable[None]]
    """Run the attack, and raise `Broken` if it succeeds."""


def check(held: object, message: str) -> None:
    """Raise `Broken` with the message unless the condition holds."""
    if not held:
        raise Broken(message)


def family(
    name: str, does: str, held: str, run: Callable[[Any, T], Awaitable[None]], members: Iterable[tuple[str, T]]
) -> list[Case]:
    """Return a case for each member (name, argument), which all run the same function."""

    def bound(thing: T) -> Callable[[Any], Awaitable[None]]:
        return lambda target: run(target, thing)

    return [Case(f"{name}: {label}", does, held, bound(thing)) for label, thing in members]

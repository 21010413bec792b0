"""A storage whose user dies at a chosen call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["Dead", "Dying"]


class Dead(BaseException):
    """Stands for the death of the process: no code catches it."""


class Dying:
    """A storage whose user dies at the n-th call after the first with `start` in its key (a host's fragment).

    It dies before or after the call takes effect.
    """

    def __init__(self, storage: Any, nth: int, *, done: bool, start: str = "/part-") -> None:
        self._storage = storage
        self._nth = nth
        self._done = done
        self._start = start
        self._seen = -1

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        return self._mortal(method) if asyncio.iscoroutinefunction(method) else method

    def _mortal(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def mortal(*arguments: Any) -> Any:
            text = arguments[0] if arguments and isinstance(arguments[0], str) else ""
            if call.__name__ == "get" and "/part-" in text:
                return await call(*arguments)  # a hundred of them count as one step
            if self._seen >= 0 or self._start in text:
                self._seen += 1
            fatal = self._seen == self._nth
            if fatal and not self._done:
                raise Dead
            try:
                return await call(*arguments)
            finally:
                if fatal:
                    raise Dead

        return mortal

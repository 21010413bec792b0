"""Hints for errors about missing names: similar names, and the counterparts of those in other libraries."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["hinting", "no_such_name"]

F = TypeVar("F", bound=Callable[..., Any])

_NAMES = {
    "CheckpointManager": "the class is Checkpointer",
    "delete": "a step is removed by `tstore rm STORE --step N`, or by the keep= of a Checkpointer",
    "latest": "restore(url) reads the newest step, which is steps(url)[-1]",
    "latest_step": "the newest step is steps(url)[-1]",
    "load": "restore(url) reads a checkpoint",
    "load_checkpoint": "restore(url) reads a checkpoint",
    "save_checkpoint": "save(url, tree, step) writes a checkpoint",
}

_SIMILAR = 0.7  # how similar a suggested argument is, from 0 to 1

_ARGUMENTS = {
    "best_fn": 'keep=Keep(best=(3, "loss"))',
    "max_to_keep": "keep=",
    "save_interval_steps": "every=",
    "save_steps": "every=",
    "save_top_k": 'keep=Keep(best=(3, "loss"))',
    "save_total_limit": "keep=",
}


def no_such_name(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module does not have."""
    hint = f"; {_NAMES[name]}" if name in _NAMES else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def _no_such_argument(name: str, arguments: Iterable[str]) -> TypeError:
    """Return the error for an argument that a function with these arguments does not have."""
    similar = difflib.get_close_matches(name, arguments, 1, _SIMILAR)
    hint = (
        f"; did you mean {similar[0]}=?" if similar else f"; pass {_ARGUMENTS[name]}" if name in _ARGUMENTS else ""
    )
    return TypeError(f"there is no argument {name}={hint}")


def hinting(call: F) -> F:
    """Return a function that suggests a similar argument in the error for one that it does not have."""
    arguments = inspect.signature(call).parameters

    def check(names: Iterable[str]) -> None:
        for name in names:
            if name not in arguments:
                raise _no_such_argument(name, arguments)

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        check(kwargs)
        return call(*args, **kwargs)

    @functools.wraps(call)
    async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
        check(kwargs)
        return await call(*args, **kwargs)

    return async_wrapper if inspect.iscoroutinefunction(call) else wrapper  # type: ignore[return-value]

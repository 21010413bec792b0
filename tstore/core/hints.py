"""Hints for errors about missing names: the counterparts of names in other libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def hinting(call: F) -> F:
    """Return a function that suggests its own argument in the error for an argument of another library."""

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name in _ARGUMENTS:
                raise TypeError(f"there is no argument {name}=; pass {_ARGUMENTS[name]}")
        return call(*args, **kwargs)

    return wrapper  # type: ignore[return-value]

"""Smaller constants for the protocol, so that a few hosts and versions reach what otherwise takes hundreds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

__all__ = ["reduced"]


@contextlib.contextmanager
def reduced(**constants: int) -> Iterator[None]:
    """Replace module constants, such as `ROOT_EVERY=8`, in every module of tstore while the block runs.

    Raises LookupError for a name that no loaded module has.
    """
    replaced: list[tuple[ModuleType, str, int]] = []
    try:
        for name, value in constants.items():
            owners = [m for key, m in list(sys.modules.items()) if key.startswith("tstore.") and name in vars(m)]
            if not owners:
                raise LookupError(f"no module of tstore has a constant {name}")
            for owner in owners:
                replaced.append((owner, name, getattr(owner, name)))
                setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)

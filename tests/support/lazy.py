"""Modules that take seconds to import: each of pytest's workers collects all tests, but runs few of those."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["lazy"]


class _Lazy:
    """Stands for a module, which is imported when one of its names is first used."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":  # pytest asks every object of a test module for these
            raise AttributeError(name)
        if self._module is None:
            self._module = pytest.importorskip(self._name)
        return getattr(self._module, name)


def lazy(name: str) -> Any:
    """Return a stand-in for a module; the test that first uses it imports the module, or is skipped without it."""
    return _Lazy(name)

"""The result of a command line that a test has run in its own process."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Call", "failed"]

Call = Callable[..., tuple[int, str, str]]
"""Runs a command; returns its exit code, standard output and standard error."""


def failed(result: tuple[int, str, str], *words: str, code: int = 1) -> str:
    """Check that a command failed with one sentence that contains these words, and return the sentence."""
    status, out, err = result
    assert (status, out) == (code, ""), err
    assert err.startswith("tstore: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    return err

"""Formatting of text for terminals: escaped control characters, sizes, counts and ranges.

Text from a store or a file is printed with its control characters escaped.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Sequence

__all__ = ["adapt_streams", "counted", "plain", "ranges", "shortened", "sized"]

_FALLBACK = "tstore.ascii"

_ASCII = {"×": "x", "→": "->", "…": "...", "•": "*", "─": "-", "–": "-"}


def adapt_streams() -> None:
    """Make standard output and error replace characters that their encoding lacks.

    A stream closed by the parent process is replaced by one that discards its input.
    """
    codecs.register_error(_FALLBACK, _replaced)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a stream of a test or a notebook
            stream.reconfigure(errors=_FALLBACK)  # type: ignore[union-attr]


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing), error.end


def plain(text: str) -> str:
    """Return the text with control characters escaped, except line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is one: "1 version", "0 versions"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def sized(size: float) -> str:
    """Format a number of bytes with units of powers of 1000."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:  # above, rounding would show 1000.0
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def shortened(names: Sequence[str], most: int = 8) -> str:
    """Join names by commas, with a count in place of those after the first `most`."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} more"


def ranges(numbers: Sequence[int]) -> list[str]:
    """Return ascending numbers with each run of three or more consecutive ones as a range: ["1-5", "7"]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in runs]
    return [text for texts in shown for text in texts]

"""Counts, sizes, ranges and tables as plain text, and numbers as JSON has them, for reports."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

__all__ = ["finite_or_none", "format_ranges", "format_size", "pluralize", "text_table", "with_json_numbers"]


def format_size(size: float) -> str:
    """Format a number of bytes with units of powers of 1000."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:  # above, rounding would show 1000.0
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is one: "1 version", "0 versions"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_ranges(numbers: Sequence[int]) -> list[str]:
    """Return ascending numbers with each run of three or more consecutive numbers as a range: ["1-5", "7"]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in runs]
    return [text for texts in shown for text in texts]


def text_table(rows: Sequence[tuple[str, ...]], left: Collection[int] = (0,)) -> str:
    """Return rows of cells as lines of text; the columns with the numbers `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def finite_or_none(value: float | None) -> float | None:
    """Return a number as JSON can express it: None for infinity and NaN."""
    return value if value is not None and math.isfinite(value) else None


def with_json_numbers(value: Any) -> Any:
    """Return a JSON value with the numbers that JSON lacks, which zarr-python writes, as v3 has them: "NaN"."""
    if isinstance(value, dict):
        return {key: with_json_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_json_numbers(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value

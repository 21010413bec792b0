"""Text and tables for terminals.

1. Text from a store or a file is printed with its control characters escaped.
2. If the columns of a table do not fit, the least important are omitted, and then long cells are wrapped
   between words and at the separators of paths. Output that is piped or redirected has all columns, never wrapped.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from rich.cells import cell_len, chop_cells

from tstore.core.format.plain_text import format_ranges, format_size

__all__ = [
    "PATH_COLUMN",
    "Column",
    "Table",
    "abbreviate",
    "adapt_streams",
    "escape",
    "format_decibels",
    "format_ranges",
    "format_shape",
    "format_size",
    "print_rows",
    "print_table",
    "wrap",
]

_ERROR_HANDLER = "tstore.ascii"

_ASCII = {"×": "x", "→": "->", "…": "...", "•": "*", "─": "-", "–": "-"}

_GAP = 2  # spaces between columns
_MIN_WIDTH = 8  # columns of text in a wrapped column of a table

_AFTER_SPACE = re.compile(r"(?<=\s)")
_AFTER_SEPARATOR = re.compile(r"(?<=[/._:-])")


def adapt_streams() -> None:
    """Make standard output and standard error replace characters that their encoding lacks.

    A stream closed by the parent process is replaced by one that discards its input.
    """
    codecs.register_error(_ERROR_HANDLER, _replace_unencodable)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a test or a notebook may replace a stream
            stream.reconfigure(errors=_ERROR_HANDLER)  # type: ignore[union-attr]


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing), error.end


def escape(text: str) -> str:
    """Return the text with control characters escaped, except line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def format_decibels(level: float) -> str:
    """Format a ratio in decibels."""
    return f"{level:z.1f} dB"


def format_shape(lengths: Sequence[int]) -> str:
    """Format the shape of an array or of its chunks."""
    return "×".join(map(str, lengths)) or "scalar"


def abbreviate(names: Sequence[str], limit: int = 8) -> str:
    """Join names by commas, with a count in place of those after the first `limit`."""
    if len(names) <= limit:
        return ", ".join(names)
    return f"{', '.join(names[:limit])} and {len(names) - limit:,} more"


class Column(NamedTuple):
    """A column of a table.

    A column with `preferred_width` may wrap its cells. Before it becomes narrower than that, other columns are
    omitted. A column with `rank` may be omitted, the lowest rank first.
    """

    title: str
    align_right: bool = False
    preferred_width: int | None = None
    rank: int | None = None


PATH_COLUMN = Column("path", preferred_width=40)

T = TypeVar("T")
Table: TypeAlias = list[tuple[Column, Callable[[T], str]]]
"""The columns of a table, each with a function from a row to the text of its cell."""


def print_rows(table: Table[T], rows: Sequence[T]) -> None:
    """Print the rows, if there are any."""
    print_table([column for column, _ in table], [[cell(row) for _, cell in table] for row in rows])


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows, if any, under the column titles."""
    if not rows:
        return
    cells = [[escape(" ".join(cell.split("\n"))) for cell in row] for row in rows]
    widths = [max(map(cell_len, [c.title, *(row[i] for row in cells)])) for i, c in enumerate(columns)]
    terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    shown = list(range(len(columns))) if terminal is None else _fitting_columns(columns, widths, terminal)
    if terminal is not None:
        _narrow_columns(columns, widths, shown, terminal)
    lines = [[columns[i].title for i in shown], ["─" * widths[i] for i in shown]]
    for row in cells:
        wrapped = [wrap(row[i], widths[i]) for i in shown]
        for number in range(max(map(len, wrapped))):
            lines.append([parts[number] if number < len(parts) else "" for parts in wrapped])
    for line in lines:
        aligned = [_align(text, widths[i], columns[i].align_right) for i, text in zip(shown, line, strict=True)]
        print((" " * _GAP).join(aligned).rstrip())
    if omitted := [c.title for i, c in enumerate(columns) if i not in shown]:
        print(f"(not shown in {terminal} columns: {', '.join(omitted)}; --json has all)")


def _fitting_columns(columns: Sequence[Column], widths: Sequence[int], terminal: int) -> list[int]:
    """Return the indices of the columns that fit if each column that may wrap has its preferred width."""
    shown = list(range(len(columns)))
    preferred = [
        w if c.preferred_width is None else min(w, max(c.preferred_width, len(c.title)))
        for c, w in zip(columns, widths, strict=True)
    ]
    for i in sorted((i for i in shown if columns[i].rank is not None), key=lambda i: columns[i].rank or 0):
        if _total_width(preferred, shown) > terminal:
            shown.remove(i)
    return shown


def _narrow_columns(columns: Sequence[Column], widths: list[int], shown: Sequence[int], terminal: int) -> None:
    """Narrow the columns that wrap, the widest first, until all columns fit."""
    wrapping = [i for i in shown if columns[i].preferred_width is not None]
    while (excess := _total_width(widths, shown) - terminal) > 0:
        narrowable = [i for i in wrapping if widths[i] > max(_MIN_WIDTH, cell_len(columns[i].title))]
        if not narrowable:
            return
        widest = max(narrowable, key=lambda i: widths[i])
        others = [widths[i] for i in narrowable if i != widest]
        # below this width another column is the widest, and is narrowed next
        floor = max([_MIN_WIDTH, cell_len(columns[widest].title), *(w - 1 for w in others)])
        widths[widest] = max(floor, widths[widest] - excess)


def _total_width(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + _GAP * (len(shown) - 1)


def wrap(text: str, width: int) -> list[str]:
    """Wrap text to lines of at most `width` columns, between words, and within longer words at separators."""
    if cell_len(text) <= width:
        return [text]
    lines, line = [], ""
    for piece in _pieces(text, width):
        if line and cell_len(line + piece.rstrip()) > width:
            lines.append(line)
            line = ""
        *full, rest = chop_cells(piece, width) or [""]
        lines += full
        line += rest
    return [line.rstrip() for line in [*lines, line] if line.strip()]


def _pieces(text: str, width: int) -> Iterator[str]:
    """Yield the words of a text; split words longer than `width`, such as paths, at separators."""
    for word in _AFTER_SPACE.split(text):
        if cell_len(word.rstrip()) <= width:
            yield word
        else:
            yield from _AFTER_SEPARATOR.split(word)


def _align(text: str, width: int, align_right: bool) -> str:
    space = " " * max(0, width - cell_len(text))
    return space + text if align_right else text + space

"""Tables in columns that fit the terminal.

If the columns are too wide together, the least important are omitted first, then long cells wrap between words and
at the separators of paths. Output that is piped or redirected has all columns and is never wrapped.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells

from tstore.cli.text import plain

__all__ = ["Column", "print_table", "wrap"]

_GAP = 2
_NARROWEST = 8

_SPACE = re.compile(r"(?<=\s)")
_SEPARATOR = re.compile(r"(?<=[/._:-])")


class Column(NamedTuple):
    """One column.

    `min_width` is set for a column whose cells may wrap: others are omitted until it has this width. `rank` is set
    for a column that may be omitted, the lowest rank first.
    """

    title: str
    right: bool = False
    min_width: int | None = None
    rank: int | None = None


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows under the column titles."""
    cells = [[plain(" ".join(cell.split("\n"))) for cell in row] for row in rows]
    widths = [max(map(cell_len, [c.title, *(row[i] for row in cells)])) for i, c in enumerate(columns)]
    terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    shown = list(range(len(columns))) if terminal is None else _fitting(columns, widths, terminal)
    if terminal is not None:
        _narrow(columns, widths, shown, terminal)
    lines = [[columns[i].title for i in shown], ["─" * widths[i] for i in shown]]
    for row in cells:
        wrapped = [wrap(row[i], widths[i]) for i in shown]
        for number in range(max(map(len, wrapped))):
            lines.append([parts[number] if number < len(parts) else "" for parts in wrapped])
    for line in lines:
        aligned = [_aligned(text, widths[i], columns[i].right) for i, text in zip(shown, line, strict=True)]
        print((" " * _GAP).join(aligned).rstrip())
    if omitted := [c.title for i, c in enumerate(columns) if i not in shown]:
        print(f"(not shown in {terminal} columns: {', '.join(omitted)}; --json has all)")


def _fitting(columns: Sequence[Column], widths: Sequence[int], terminal: int) -> list[int]:
    """Return the columns to show, so that those that wrap have their minimum width."""
    shown = list(range(len(columns)))
    wanted = [
        w if c.min_width is None else min(w, max(c.min_width, len(c.title)))
        for c, w in zip(columns, widths, strict=True)
    ]
    for i in sorted((i for i in shown if columns[i].rank is not None), key=lambda i: columns[i].rank or 0):
        if _total(wanted, shown) > terminal:
            shown.remove(i)
    return shown


def _narrow(columns: Sequence[Column], widths: list[int], shown: Sequence[int], terminal: int) -> None:
    """Narrow the columns that wrap until all fit, the widest first."""
    wrapping = [i for i in shown if columns[i].min_width is not None]
    while (excess := _total(widths, shown) - terminal) > 0:
        wide = [i for i in wrapping if widths[i] > max(_NARROWEST, cell_len(columns[i].title))]
        if not wide:
            return
        widest = max(wide, key=lambda i: widths[i])
        others = [widths[i] for i in wide if i != widest]
        floor = max([_NARROWEST, cell_len(columns[widest].title), *(w - 1 for w in others)])
        widths[widest] = max(floor, widths[widest] - excess)


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
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
    """Yield the words of a text, longer ones (paths) split at separators."""
    for word in _SPACE.split(text):
        if cell_len(word.rstrip()) <= width:
            yield word
        else:
            yield from _SEPARATOR.split(word)


def _aligned(text: str, width: int, right: bool) -> str:
    space = " " * max(0, width - cell_len(text))
    return space + text if right else text + space

"""The Tensor view: statistics of one array, a heat map of one of its matrices, and its quantization error."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from tstore.core.array import Array
from tstore.core.format.arguments import quote
from tstore.core.format.arrays.codecs import codecs_text
from tstore.core.format.arrays.dtypes import dtype_text
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE
from tstore.core.snapshot import Snapshot
from tstore.errors import Corrupt, InvalidArgument, NotFound
from tstore.quantization.report import read_report
from tstore.service.page.views import Document, Query, at_argument, shell_command
from tstore.service.statistics.heat_map import heat_map
from tstore.service.statistics.loss import quantization_loss
from tstore.service.statistics.numbers import is_number
from tstore.service.statistics.reading import SAMPLE_BYTES
from tstore.service.statistics.summary import summarize

__all__ = ["load"]

_BUDGETS = (SAMPLE_BYTES, 100_000_000, 1_000_000_000)
_MAX_READ = 1_000_000_000  # bytes of values: the time of a view is bounded, whatever a store declares
_HEAT_BUDGET = 4 * SAMPLE_BYTES
_CELLS = (96, 128)
_PARTS = 4  # parts per side of the heat map for zooming
_WINDOW = re.compile(r"(\d{1,20}):(\d{1,20}),(\d{1,20}):(\d{1,20})", re.ASCII)
_INDEX = re.compile(r"\d{1,20}(,\d{1,20})*", re.ASCII)


async def load(query: Query) -> Document:
    """Return the statistics of an array.

    `path` names it, and `at` the version or tag. `budget` is how many bytes of values to read, `index` the
    positions on all axes but the last two, such as "0,3", and `window` the rows and columns of the heat map, such
    as "0:512,128:256". `show` is what the heat map shows of the values of a cell: "rms" or "mean".
    """
    snapshot = await query.store.snapshot(query.version("at"))
    if not query.text("path"):
        raise InvalidArgument("path: expected the path of an array, as the view Tree lists them")
    array = await snapshot.array(query.parameters.get("path", ""))
    budget = query.number("budget", SAMPLE_BYTES) or SAMPLE_BYTES
    if budget > _MAX_READ:
        raise InvalidArgument(f"budget={budget}: the page reads at most {_MAX_READ}; tstore stats reads more")
    at = query.parameters.get("at", "")
    matrix = _Matrix.of(array, query.text("index"), query.text("window"))
    document: Document = {
        "command": _command(query.address, array.path, at, budget),
        "python": _python(query.address, array, at, budget, matrix),
        "path": array.path,
        "at": at,
        "version": snapshot.version,
        "tags": [tag for tag, version in snapshot.tags.items() if version == snapshot.version],
        "dtype": dtype_text(array.dtype),
        "numeric": is_number(array.dtype),
        "complex": array.dtype.kind == "c",
        "shape": list(array.shape),
        "chunks": list(array.chunks),
        "codec": codecs_text(array.codecs),
        "attributes": {key: value for key, value in array.attributes.items() if key != RESERVED_ATTRIBUTE},
        "dimension_names": list(array.dimension_names or ()),
        "budget": budget,
        "budgets": _larger(budget, array.nbytes),
        "show": query.choice("show", ("rms", "mean")),
        "index": matrix.at,
        "window": matrix.window,
        "zooms": matrix.zooms(),
        "summary": None,
        "heat_map": None,
        "loss": None,
        "problem": None,
    }
    try:
        document["summary"] = (await summarize(array, budget=budget)).document()
        if matrix.view is not None:
            cells = await heat_map(matrix.view, cells=_CELLS, budget=max(budget, _HEAT_BUDGET))
            document["heat_map"] = cells.document()
        document["loss"] = await _loss(query, snapshot, array.path, budget)
    except (InvalidArgument, NotFound, Corrupt) as error:  # the array exists, but not all of its statistics
        document["problem"] = query.message(error)
    return document


async def _loss(query: Query, snapshot: Snapshot, path: str, budget: int) -> Document | None:
    """Return the error of the array against its source, None if it is not quantized."""
    if "quantization" not in snapshot.reserved_attributes():
        return None
    if not any(row.path == path and row.format for row in read_report(snapshot).arrays):
        return None
    return (await quantization_loss(query.store, path, snapshot.version, budget=budget)).document()


def _larger(budget: int, nbytes: int) -> list[int]:
    """Return the larger budgets to offer, up to the first that suffices for all values."""
    larger = [b for b in _BUDGETS if b > budget]
    enough = next((i for i, b in enumerate(larger) if b >= nbytes), len(larger))
    return larger[: enough + 1] if budget < nbytes else []


class _Matrix(NamedTuple):
    """The part of an array that the heat map shows: a window of the matrix at an index of the other axes."""

    view: Array | None
    """None if an axis of the array is empty."""
    shape: tuple[int, int]
    """The rows and columns of the whole matrix; a vector has one row."""
    at: list[int]
    """The positions on the other axes."""
    window: list[int]
    """The first row, the row after the last, and the same of columns."""

    @staticmethod
    def of(array: Array, index: str, window: str) -> _Matrix:
        """Return the part selected by parameters; raise `InvalidArgument` for those that do not fit."""
        others = max(0, array.ndim - 2)
        if index and not _INDEX.fullmatch(index):
            raise InvalidArgument(f"index={quote(index)}: expected positions such as 0,3")
        at = [int(i) for i in index.split(",")] if index else [0] * others
        if len(at) != others or any(i >= n for i, n in zip(at, array.shape, strict=False) if n):
            raise InvalidArgument(f"index={quote(index)}: expected {others} positions in {array.shape[:others]}")
        matrix = array[tuple(at)] if at and 0 not in array.shape else array
        rows, columns = [1, 1, *array.shape][-2:] if array.ndim else (1, 1)
        limits = [0, rows, 0, columns]
        if window:
            parsed = _WINDOW.fullmatch(window)
            limits = [int(n) for n in parsed.groups()] if parsed else []
            if not limits or not (limits[0] < limits[1] <= rows and limits[2] < limits[3] <= columns):
                raise InvalidArgument(
                    f"window={quote(window)}: expected rows and columns such as 0:8,0:16, within {rows} and "
                    f"{columns}"
                )
        if matrix.ndim == 1:
            matrix = matrix[limits[2] : limits[3]]
        elif matrix.ndim == 2:
            matrix = matrix[limits[0] : limits[1], limits[2] : limits[3]]
        return _Matrix(matrix if array.size else None, (rows, columns), at, limits)

    def zooms(self) -> list[Document]:
        """Return the parts of the window, to zoom in, with their places in percent; and the way out."""
        top, bottom, left, right = self.window
        tall, wide = (_divided(a, b) for a, b in ((top, bottom), (left, right)))
        parts = []
        if len(tall) * len(wide) > 1:
            for i, (a, b) in enumerate(tall):
                for j, (c, d) in enumerate(wide):
                    box = [100 * j / len(wide), 100 * i / len(tall), 100 / len(wide), 100 / len(tall)]
                    parts.append({"window": [a, b, c, d], "box": box})
        rows, columns = self.shape
        if (top, bottom, left, right) != (0, rows, 0, columns):
            larger = [*_widened(top, bottom, rows), *_widened(left, right, columns)]
            parts.append({"window": larger, "box": None})
        return parts


def _divided(start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of a side of a window."""
    count = min(_PARTS, stop - start)
    bounds = [start + (stop - start) * i // max(1, count) for i in range(count + 1)]
    return list(itertools.pairwise(bounds))


def _widened(start: int, stop: int, length: int) -> tuple[int, int]:
    """Return a larger side of a window around this one."""
    size = min(length, _PARTS * (stop - start))
    first = min(max(0, (start + stop - size) // 2), length - size)
    return first, first + size


def _command(address: str, path: str, at: str, budget: int) -> str:
    options = [*(["--at", at] if at else []), *(["--budget", str(budget)] if budget != SAMPLE_BYTES else [])]
    return shell_command("stats", [address, path], options)


def _python(address: str, array: Array, at: str, budget: int, matrix: _Matrix) -> str:
    top, bottom, left, right = matrix.window
    sides = [f"{top}:{bottom}", f"{left}:{right}"][-min(2, array.ndim) :] if array.ndim else []
    index = ", ".join([*map(str, matrix.at), *sides])
    return "\n".join(
        [
            "import tstore.sync as tstore",
            "",
            f"store = tstore.open({address!r}, 'r')",
            f"array = store.snapshot({at_argument(at)}).array({array.path!r})",
            f"summary = tstore.summarize(array, budget={budget})",
            "print(summary.table())  # .histogram, .exponents, .rows, .columns",
            f"print(tstore.heat_map(array{f'[{index}]' if index else ''}, cells={_CELLS}).rms)",
        ]
    )

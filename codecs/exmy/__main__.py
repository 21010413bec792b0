"""The command line of exmy: `python -m exmy formats` prints a table of the formats."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from exmy.errors import FormatError
from exmy.format import Format, formats

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and a one-line message."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit with status 2 on invalid arguments."""
    parser = _Parser(prog="python -m exmy", description="Low-bit number formats.")
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser(
        "formats",
        help="print the table of formats",
        description="Print the formats of the chosen widths, with their standard biases: largest value, "
        "smallest normal and subnormal values (to 7 digits; --json is exact), and the number of distinct values.",
    )
    table.add_argument(
        "--bits", type=_widths, default=range(2, 9), help="a width from 2 to 16, or all (default: 2 to 8)"
    )
    table.add_argument("--json", action="store_true", help="print a JSON array with one object per format")
    options = parser.parse_args(arguments)
    rows = [_row(f) for bits in options.bits for f in formats(bits)]
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        head = [name.replace("_", " ") for name in rows[0]]
        sys.stdout.writelines(_markdown([head, *([_text(cell) for cell in row.values()] for row in rows)]))


def _widths(text: str) -> Sequence[int]:
    if text == "all":
        return range(2, 17)
    try:
        bits = int(text)
        formats(bits)
    except (ValueError, FormatError) as cause:
        message = f"there are no formats of {text!r} bits; expected an integer from 2 to 16, or all"
        raise argparse.ArgumentTypeError(message) from cause
    return (bits,)


def _row(f: Format) -> dict[str, Any]:
    return {
        "name": f.name,
        "bits": f.bits,
        "bias": f.bias,
        "largest": f.max,
        "smallest_normal": f.smallest_normal,
        "smallest_subnormal": f.smallest_subnormal,
        "values": (1 << f.bits) - 1,  # +0 and -0 are one value
    }


def _text(cell: Any) -> str:
    """Format a table cell: powers of two below 1 as `2^n`, other floats to 7 digits."""
    if cell is None:
        return "none"
    if not isinstance(cell, float):
        return str(cell)
    mantissa, exponent = math.frexp(cell)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent < 1 else f"{cell:.7g}"


def _markdown(cells: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table, padded to align as plain text; the first column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = []
    for first, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |\n")
    return lines


if __name__ == "__main__":
    main()

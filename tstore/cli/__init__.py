"""The command line, `tstore`.

1. `text`: text and tables that fit the terminal. `tables`: the readable form of each command's result.
2. `console`: running a command, showing its progress, printing its result, and reporting errors.
3. `commands`: `main`, the group of all commands, and those that read a store. `transfer`, `maintenance`,
   `quantize`, `serve`: the other commands. `demo`: the job that `tstore demo` runs.
"""

from __future__ import annotations

from tstore.cli.commands import main

__all__ = ["main"]

"""The command line, `tstore`.

1. `text`, `columns`, `progress`: text, tables and progress that fit the terminal.
2. `tables`: the readable form of each command's result.
3. `console`: running a command, printing its result, and reporting errors.
4. `commands`: the group of all commands, `main`, and the short commands.
5. `bench`, `copy`, `gc`, `probe`, `quantize`, `repair`, `serve`: the longer commands. `demo`: the job that
   `tstore demo` runs.
"""

from __future__ import annotations

from tstore.cli.commands import main

__all__ = ["main"]

"""The command line, `tstore`.

1. `text`: text and tables that fit the terminal. `listings`, `tree`, `tables`: the readable form of each command's
   result.
2. `console`: running a command, showing its progress, printing its result, and reporting errors.
3. `commands`: `main` and the group of all commands. `reading`, `tags`, `transfer`, `maintenance`, `quantize`,
   `serve` (with `view`), `statistics`: the commands. `demo`: the job that `tstore demo` runs.
"""

from __future__ import annotations

from tstore.cli.commands import main

__all__ = ["main"]

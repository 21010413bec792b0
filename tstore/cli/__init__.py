"""The command line, `tstore`.

1. `text`, `columns`, `progress`: text, tables and progress that fit the terminal.
2. `tables`: what people are shown of each command's document.
3. `console`: what every command does, and how it says what went wrong.
4. `commands`: the group of all commands, `main`, and the short commands.
5. `bench`, `copy`, `gc`, `probe`, `quantize`, `repair`, `serve`: the longer commands.
   `demo`: what `tstore demo` runs.
"""

from __future__ import annotations

from tstore.cli.commands import main

__all__ = ["main"]

"""The command line, `tstore`.

1. `console`: what every command does, and how it says what went wrong.
2. `commands`: the group of all commands, `main`, and the short ones.
3. `bench`, `copy`, `gc`, `probe`, `serve`: the longer ones, one a file.
4. `tables`: what people are shown of it. `demo`: what `tstore demo` acts out.
"""

from __future__ import annotations

from tstore.cli.commands import main

__all__ = ["main"]

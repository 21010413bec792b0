"""The command line, `tstore`.

1. `results`: the result of each command, and its JSON. `text`: text and tables that fit the terminal. `listings`,
   `tree`, `tables`: the readable form of each result.
2. `console`: running a command, showing its progress, printing its result, and reporting errors.
3. `commands`: the group of all commands. `reading`, `tags`, `transfer`, `maintenance`, `quantize`, `serve` (with
   `view`), `follow`, `statistics`: the commands.

`main` imports them only when it is called: from its first line on, Ctrl-C prints one line and no traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; print an error instead of raising it."""
    if arguments is not None:  # in the process of another program
        from tstore.cli.commands import run_command

        return run_command(arguments)
    with _exiting_on_interrupt():
        from tstore.cli.commands import run_command
        from tstore.cli.console import print_warning
    warnings.showwarning = print_warning
    return run_command(sys.argv[1:])


@contextlib.contextmanager
def _exiting_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once: imports may swallow a `KeyboardInterrupt`, or raise another error."""

    def exit_process(number: int, frame: object) -> NoReturn:
        if "--json" in sys.argv:
            os.write(1, b'{"error": {"type": "Interrupted", "message": "interrupted"}}\n')
        os.write(2, b"tstore: interrupted\n")
        os._exit(130)

    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:  # such as SIG_IGN, for a background job of a script
        yield
        return
    signal.signal(signal.SIGINT, exit_process)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)

"""The script `tstore`: the command line, which Ctrl-C ends without a traceback also while its modules are loaded.

It lies beside the package, since whatever lies in it loads it first.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Runs the command line and returns its exit code."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        signal.signal(signal.SIGINT, _end)
    from tstore.cli import main as run

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _end(number: int, frame: object) -> None:
    """Ends the process at once, as nothing was begun; an exception might be swallowed by what is being loaded."""
    if "--json" in sys.argv:
        os.write(1, b'{"error": {"type": "Interrupted", "message": "interrupted"}}\n')
    os.write(2, b"tstore: interrupted\n")
    os._exit(130)

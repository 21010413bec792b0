"""What every command does: work, print one document, and say in one sentence what went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeAlias

import click

from tstore.cli.tables import Progress, plain
from tstore.errors import TStoreError

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "MISUSED",
    "PIPE_CLOSED",
    "TERMINATED",
    "Document",
    "Work",
    "fail",
    "json_option",
    "run",
    "store_argument",
    "version_or_tag",
]

Document: TypeAlias = dict[str, Any]
Work: TypeAlias = Callable[[Progress], Coroutine[Any, Any, Document | None]]

FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED, TERMINATED = 1, 2, 130, 141, 143

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
store_argument = click.argument("store")


def version_or_tag(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    """The value of an option that names a version: digits are its number, anything else is a tag."""
    return int(value) if value is not None and value.isascii() and value.isdigit() else value


def run(work: Work, show: Callable[[Mapping[str, Any]], None], as_json: bool, facts: bool = False) -> int:
    """Does the work, prints its document (None: the work has shown what there was) and returns the exit code."""
    terminations: list[int] = []
    try:
        with _terminable(terminations), Progress(facts and not as_json) as progress:
            document = asyncio.run(work(progress))
        if document is None:
            return 0
        if as_json:
            print(json.dumps(document, indent=2, allow_nan=False))
        else:
            show(document)
        sys.stdout.flush()
    except TStoreError as error:
        return fail(type(error).__name__, str(error), as_json)
    except KeyboardInterrupt:
        what, code = ("terminated", TERMINATED) if terminations else ("interrupted", INTERRUPTED)
        said = f"{what}; what was committed before stays, and nothing was committed by halves"
        return fail("Interrupted", said, as_json, code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the last flush does not fail again
        return PIPE_CLOSED
    except Exception as error:
        if os.environ.get("TSTORE_TRACEBACK"):
            raise
        said = f"{type(error).__name__}: {error}; this is a fault of tstore's, TSTORE_TRACEBACK=1 shows where"
        return fail("InternalError", said, as_json)
    return FAILED if document.get("ok") is False else 0


@contextlib.contextmanager
def _terminable(came: list[int]) -> Iterator[None]:
    """Has SIGTERM end the work as Ctrl-C does, so that its files and processes go too; notes that it `came`."""

    def end(number: int, frame: object) -> None:
        came.append(number)
        signal.raise_signal(signal.SIGINT)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # Ctrl-C is ignored, as in the background of a script
        return
    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # another thread than the first
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def fail(kind: str, message: str, as_json: bool, code: int = FAILED) -> int:
    """Says in one sentence what went wrong and returns the exit code."""
    with contextlib.suppress(OSError):
        if as_json:
            print(json.dumps({"error": {"type": kind, "message": message}}), flush=True)
        print(f"tstore: {plain(message)}", file=sys.stderr, flush=True)
    return code

"""Running a command: its arguments, its progress, its result on standard output, and its error as one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Self, TypeAlias, TypeVar

import click
import exmy
from click.core import ParameterSource
from rich.console import Console
from rich.status import Status
from rich.text import Text

from tstore.cli.results import is_ok, json_of
from tstore.cli.text import escape
from tstore.core.format.arguments import checked_step
from tstore.core.steps import step_tag
from tstore.errors import InvalidArgument, TStoreError

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "MISUSED",
    "PIPE_CLOSED",
    "STEP",
    "TERMINATED",
    "Progress",
    "Work",
    "at_options",
    "discard_output",
    "exmy_format",
    "fail",
    "fail_with",
    "json_option",
    "number_option",
    "path_or_url",
    "plot_option",
    "print_now",
    "print_warning",
    "run",
    "store_argument",
    "version_or_tag",
]

FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED, TERMINATED = 1, 2, 130, 141, 143

_KEYWORD = re.compile(r"(?<!\S)(Keep\()?(\w+)=(…|'[^']*'|[^\s'…,;:)]+)(?(1)\))")
"""An argument in a message of the library, such as "bits=0.0", "tag=…" or "Keep(tags=…)"."""

_MAX_VERSION_DIGITS = 20

_LONGEST_STEP = 0.5  # seconds of the event loop after Ctrl-C

STEP = click.IntRange(0)
"""The type of an option that is a step."""


class Progress:
    """Progress of a command: a status line on standard error if that is a terminal.

    With `milestones`, each finished part is also printed on standard output.
    """

    def __init__(self, milestones: bool = False) -> None:
        self._milestones = milestones
        self._console = Console(stderr=True, markup=False, emoji=False) if sys.stderr.isatty() else None
        self._status: Status | None = None

    def doing(self, what: str) -> None:
        """Show what the command is doing in the status line."""
        if self._console is None:
            return
        if self._status is None:
            spinner = "line" if self._console.options.ascii_only else "dots"
            self._status = self._console.status(Text(escape(what)), spinner=spinner)
            self._status.start()
        else:
            self._status.update(Text(escape(what)))

    def done(self, what: str) -> None:
        """Clear the status line; with `milestones`, also print what is finished."""
        self.stop()
        if self._milestones:
            print_now(f"• {escape(what)}")

    def stop(self) -> None:
        """Clear the status line."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


R = TypeVar("R")
Work: TypeAlias = Callable[[Progress], Coroutine[Any, Any, R | None]]
"""Returns the result of a command (`results`), or None if it prints nothing."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
path_or_url = click.Path(readable=False)
"""An argument that is a path or URL of a file or store; shells complete it with file names."""

store_argument = click.argument("store", type=path_or_url)
plot_option = click.option(
    "--plot",
    type=path_or_url,
    metavar="FILE.png",
    help="Plot each array's error against its size, and the exponents of the worst arrays (needs matplotlib).",
)


def number_option(
    name: str, unit: str, type: click.IntRange | click.FloatRange, default: float, help: str
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return an option that is a number and has a default."""
    return click.option(name, metavar=unit, type=type, default=default, show_default=True, help=help)


def version_or_tag(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    """Convert the value of an option that names a version: digits are a version number, anything else a tag."""
    if value is None or not (value.isascii() and value.isdigit()):
        return value
    if len(value) > _MAX_VERSION_DIGITS:
        raise click.BadParameter(f"a version has at most {_MAX_VERSION_DIGITS} digits")
    return int(value)


def exmy_format(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Convert the value of an option that names an eXmY format to its standard form."""
    try:
        return None if value is None else exmy.Format(value).name
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def at_options(help: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that adds --at, with this help, and --step; the command gets the version as `at`."""
    at_option = click.option("--at", callback=version_or_tag, metavar="V", help=help)
    step_option = click.option("--step", type=STEP, metavar="N", help="The number of a step, instead of --at.")

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def with_version(*args: Any, at: int | str | None, step: int | None, **options: Any) -> int:
            if at is not None and step is not None:
                raise click.UsageError("--at and --step both name a version; pass one of them")
            return command(*args, at=at if step is None else step_tag(checked_step(step)), **options)

        return at_option(step_option(with_version))

    return decorate


def run(work: Work[R], show: Callable[[R], None], as_json: bool, milestones: bool = False) -> int:
    """Run the work, print its result unless it is None, and return the exit code."""
    terminations: list[int] = []
    tasks: list[asyncio.Task[Any]] = []
    handler = signal.getsignal(signal.SIGINT)  # asyncio replaces the default one

    async def begin() -> R | None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        with _ending_long_step() if handler is signal.default_int_handler else contextlib.nullcontext():
            return await work(progress)

    try:
        with _handling_sigterm(terminations, tasks), Progress(milestones and not as_json) as progress:
            result = asyncio.run(begin())
        if result is None:
            return 0
        _print(result, show, as_json)
    except _OutputFailed as failed:
        return fail("OutputFailed", str(failed), as_json)
    except TStoreError as error:
        return fail_with(error, as_json)
    except (KeyboardInterrupt, asyncio.CancelledError):
        cause, code = ("terminated", TERMINATED) if terminations else ("interrupted", INTERRUPTED)
        return fail("Interrupted", f"{cause}; every commit is complete or absent", as_json, code)
    except BrokenPipeError:
        discard_output()
        return PIPE_CLOSED
    except Exception as error:
        if os.environ.get("TSTORE_TRACEBACK"):
            raise
        message = (
            f"{type(error).__name__}: {error}; this is a bug in tstore: run again with TSTORE_TRACEBACK=1 and "
            "report the traceback"
        )
        return fail("InternalError", message, as_json)
    return 0 if is_ok(result) else FAILED


class _OutputFailed(Exception):
    """Standard output could not be written."""


def _print(result: R, show: Callable[[R], None], as_json: bool) -> None:
    with _writing("the command succeeded, but its result can't be written to standard output"):
        if as_json:
            print(json.dumps(json_of(result), indent=2, allow_nan=False))
        else:
            show(result)


def print_now(text: str) -> None:
    """Print a line while the command is still running."""
    with _writing("standard output can't be written"):
        print(text)


@contextlib.contextmanager
def _writing(failure: str) -> Iterator[None]:
    """Flush standard output after the block; raise `_OutputFailed` with this text if that is impossible."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_output()
        raise _OutputFailed(f"{failure}: {error.strerror}; redirect the output elsewhere") from None


def discard_output() -> None:
    """Discard what was printed but not written yet, so that the flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextlib.contextmanager
def _ending_long_step() -> Iterator[None]:
    """Let Ctrl-C also end a step of the event loop that lasts long, such as the parsing of a hostile file.

    asyncio's handler cancels the task at the first Ctrl-C, and raises `KeyboardInterrupt` in it at the second.
    """
    cancel = signal.getsignal(signal.SIGINT)
    loop = asyncio.get_running_loop()
    signals: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        if not signals:
            _repeat_after_long_step(loop, number)
        signals.append(number)
        cancel(number, frame)  # type: ignore[operator, misc]

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, cancel)


def _repeat_after_long_step(loop: asyncio.AbstractEventLoop, number: int) -> None:
    """Handle a signal once more if the event loop is still busy with the same step after `_LONGEST_STEP`."""
    timer = threading.Timer(_LONGEST_STEP, signal.raise_signal, (number,))
    timer.daemon = True
    timer.start()
    loop.call_soon_threadsafe(timer.cancel)


@contextlib.contextmanager
def _handling_sigterm(received: list[int], tasks: Sequence[asyncio.Task[Any]]) -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that temporary files and processes are removed; record it in `received`.

    If Ctrl-C is ignored, cancel the task in `tasks` instead; `tasks` is empty until the work begins.
    """
    handler = signal.getsignal(signal.SIGINT)
    ignored = handler == signal.SIG_IGN  # as for a background job of a script
    if not ignored and handler is not signal.default_int_handler:
        yield  # the embedding program handles signals itself
        return

    def terminate(number: int, frame: object) -> None:
        received.append(number)
        if not ignored:
            signal.raise_signal(signal.SIGINT)
            return
        for task in tasks:
            if not task.done() and len(received) == 1:
                task.get_loop().call_soon_threadsafe(task.cancel)
                _repeat_after_long_step(task.get_loop(), number)
                return
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without the place in the code where Python shows it."""
    with contextlib.suppress(OSError):
        print(f"tstore: warning: {escape(str(message))}", file=sys.stderr, flush=True)


def fail_with(error: TStoreError, as_json: bool) -> int:
    """Print an error and return its exit code: `MISUSED` for an invalid argument, else `FAILED`.

    Python arguments in the message are replaced by options of the running command.
    """
    context = click.get_current_context(silent=True)
    parameters = () if context is None else context.command.params
    options = {p.name: p.opts[0] for p in parameters if isinstance(p, click.Option)}

    def as_option(match: re.Match[str]) -> str:
        keep_call, argument, value = match.groups()
        name = f"keep_{argument.removesuffix('s')}" if keep_call else argument
        if name not in options:
            return match[0]
        if value == "…":
            return options[name]
        assert context is not None
        # an argument that was not typed is from a policy file
        typed = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        return f"{options[name]} {value}" if typed else match[0]

    message = _KEYWORD.sub(as_option, str(error))
    code = MISUSED if type(error) is InvalidArgument else FAILED
    return fail(type(error).__name__, message, as_json, code)


def fail(error_type: str, message: str, as_json: bool, code: int = FAILED) -> int:
    """Print an error as one sentence and return the exit code."""
    with contextlib.suppress(OSError):
        if as_json:
            print(json.dumps({"error": {"type": error_type, "message": message}}), flush=True)
        print(f"tstore: {escape(message)}", file=sys.stderr, flush=True)
    return code

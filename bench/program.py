"""What the programs have in common: options, a folder to measure in, the console, and the document of `--json`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType

from bench import machine
from bench.bars import Bar, bar_table, bars_as_data

COUNT = click.IntRange(1)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

CONTEXT = {"max_content_width": 110, "show_default": True}

json_option = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file."
)
dir_option = click.option("--dir", "parent", default=".", help="Folder on the disk to measure.", type=FOLDER)


def rounds_option(default: int, text: str | None = None) -> Callable[..., Any]:
    return click.option("--rounds", default=default, type=COUNT, help=text)


def names_option(option: str, known: Sequence[str], more: str = "") -> Callable[..., Any]:
    """Return an option for comma-separated names; its value is a list of them, of all if none is passed."""

    def parse(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise click.BadParameter(f"unknown name {unknown[0]!r}; expected {', '.join(known)}")
        return names or list(known)

    text = f"Comma-separated: {', '.join(known)}{more}."
    return click.option(option, default="", show_default=False, callback=parse, help=text)


@dataclass
class Run:
    """A run of a program: its empty folder, where it prints and logs, and the description of the machine."""

    parent: Path
    folder: Path
    console: Console
    log: Callable[[str], None]
    about: dict[str, Any]
    json_file: Path | None

    def show(self, *parts: RenderableType) -> None:
        for part in parts:
            self.console.print(part)

    def write(self, bars: Sequence[Bar], **document: Any) -> None:
        """Write the file of `--json`, if there is one; a reader never sees half of it."""
        if self.json_file:
            data = {"machine": self.about, **document, "bars": bars_as_data(bars)}
            unfinished = self.json_file.with_name(self.json_file.name + ".part")
            unfinished.write_text(json.dumps(data, indent=1) + "\n")
            unfinished.replace(self.json_file)

    def finish(self, bars: Sequence[Bar], **document: Any) -> None:
        """Print the bars and write the file of `--json`."""
        self.show(bar_table(bars))
        self.write(bars, **document)


def command(text: str | None, width: int = 120) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function that takes a run, and has the option `--json`, and perhaps `--dir`.

    The run has a new folder, which is removed at the end; what the machine is has been printed.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        @wraps(function)
        def call(json_file: Path | None, parent: Path | None = None, **options: Any) -> None:
            console = Console()
            if not console.is_terminal:
                console.width = width
            with tempfile.TemporaryDirectory(prefix="tstore-bench-", dir=parent and parent.resolve()) as name:
                about = machine.describe(Path(name))
                console.print_json(json.dumps(about))
                function(
                    Run(Path(name).parent, Path(name), console, Console(stderr=True).print, about, json_file),
                    **options,
                )

        return click.command(help=text, context_settings=CONTEXT)(call)

    return decorate

"""Measure the codecs: `python -m bench.exmy speed`, `quality`, `checkpoint`, … each has its own `--help`."""

from __future__ import annotations

import click

from bench.exmy.checkpoint import checkpoint
from bench.exmy.lossless import lossless
from bench.exmy.model import model
from bench.exmy.quality import quality
from bench.exmy.speed import speed


@click.group(help=__doc__)
def main() -> None:
    pass


for command in (speed, quality, lossless, checkpoint, model):
    main.add_command(command)

if __name__ == "__main__":
    main()

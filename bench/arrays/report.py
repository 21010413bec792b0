"""The bars of `bench.arrays`, and its figures as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.arrays.peers import PEERS, RAW, RAW_CHUNKS, TENSORSTORE
from bench.arrays.rounds import READ_ALL, READ_COLD, WRITE, WRITE_DURABLE, Sizes
from bench.arrays.volume import Volume
from bench.bars import Bar, bars_as_data
from bench.figures import Figures
from bench.rounds import Results

_NONE = Figures("")
_SMALL = 64
"""The side of chunks that zarr-python's pipeline of batches is slow with."""


def bars(results: Results, volumes: Sequence[Volume]) -> list[Bar]:
    """Return the bars of the rows that ran: the time of the best of some peers ÷ that of tstore."""
    out: list[Bar] = []
    for volume in volumes:
        for row in (WRITE_DURABLE, WRITE, READ_ALL):
            work = f"{volume.title}: {row}"
            if work in results and (volume.codec == "raw" or row != READ_ALL):
                by_raw = _speed(results[work], RAW if volume.codec == "raw" else RAW_CHUNKS)
                by_tensorstore = _speed(results[work], TENSORSTORE)
                if row == READ_ALL:
                    out.append(Bar(f"{work}: tensorstore ÷ tstore", 1.2, by_tensorstore))
                elif by_raw >= 0.9:
                    out.append(Bar(f"{work}: raw ÷ tstore", 0.9, by_raw))
                else:
                    out.append(Bar(f"{work}: tensorstore ÷ tstore", 1.5, by_tensorstore))
    for work, figures in results.items():
        out.append(Bar(f"{work}: best peer ÷ tstore", 0.8, _speed(figures, PEERS)))
        # zarr-python never calls fsync, and a disk limits all alike
        if work.startswith(f"{_SMALL}³") and not work.endswith((WRITE_DURABLE, READ_COLD)):
            out.append(Bar(f"{work}: zarr-python ÷ tstore", 5, _speed(figures, ("zarr",))))
    return out


def _speed(figures: dict[str, Figures], names: Sequence[str]) -> float:
    """Return how many times as fast as the fastest of these contenders tstore is; NaN if one is absent."""
    have = [figures[name] for name in names if name in figures and figures[name].of("seconds")]
    peer = min(have, key=lambda f: f.median("seconds"), default=_NONE)
    return peer.ratio("seconds", figures.get("tstore", _NONE))


def as_data(about: dict[str, Any], results: Results, sizes: Sizes, volumes: Sequence[Volume]) -> dict[str, Any]:
    """Return the data that `--json` writes, without NaN."""
    return {
        "machine": about,
        "unit": "seconds and bytes of all reads of a row",
        "sizes": sizes._asdict(),
        "volumes": [volume._asdict() for volume in volumes],
        "works": {work: {name: f.as_data() for name, f in figures.items()} for work, figures in results.items()},
        "bars": bars_as_data(bars(results, volumes)),
    }

"""Encode and decode a tensor of more than 2^32 elements, and check every byte and value.

    python -m bench.exmy big            # takes 13 GB of memory and about two minutes

Exits with status 1 and the position of the first error, if any. The test suite covers the same arithmetic with
little memory.
"""

from __future__ import annotations

import sys
import time

import click
import exmy
import numpy as np

STEP = 1 << 20  # elements per comparison


@click.command(help=__doc__, context_settings={"max_content_width": 110})
@click.option("--values", default=(1 << 32) + 5_000_003, show_default=True, type=click.IntRange(1))
@click.option("--format", "name", default="e3m2", show_default=True)
def big(values: int, name: str) -> None:
    f = exmy.Format(name)
    block = np.random.default_rng(7).standard_normal(STEP).astype(np.float16)

    def part(low: int, high: int) -> np.ndarray:
        return np.roll(block, low // STEP)[: high - low]  # all parts differ

    bounds = [(low, min(low + STEP, values)) for low in range(0, values, STEP)]
    x = np.empty(values, np.float16)
    for low, high in bounds:
        x[low:high] = part(low, high)
    start = time.perf_counter()
    packed = exmy.encode_packed(x, f)
    encoded = time.perf_counter() - start
    for low, high in bounds:
        first, end = exmy.slice_bytes(f.bits, low, high, values)
        if not np.array_equal(packed[first:end], exmy.encode_packed(part(low, high), f)):
            sys.exit(f"the packed bytes of the elements {low} to {high} are wrong")
    x.fill(0)
    start = time.perf_counter()
    exmy.decode_packed(packed, f, values, out=x)
    decoded = time.perf_counter() - start
    for low, high in bounds:
        if not np.array_equal(x[low:high], exmy.round(part(low, high), f)):
            sys.exit(f"the decoded elements {low} to {high} are wrong")
    x[-1] = np.nan
    try:
        exmy.encode_packed(x, f, out=packed)
    except exmy.NonFiniteError as error:
        if error.index != (values - 1,):
            sys.exit(f"the NaN at {values - 1} was reported at {error.index}")
    speeds = [x.nbytes / 1e9 / seconds for seconds in (encoded, decoded)]
    print(
        f"{values} elements of {f.name}: correct; encode {speeds[0]:.1f}, decode {speeds[1]:.1f} GB/s of float16"
    )

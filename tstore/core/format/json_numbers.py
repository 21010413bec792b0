"""Numbers as JSON can express them; pure, no I/O."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["finite_or_none", "with_json_numbers"]


def finite_or_none(value: float | None) -> float | None:
    """Return a number as JSON can express it: None for infinity and NaN."""
    return value if value is not None and math.isfinite(value) else None


def with_json_numbers(value: Any) -> Any:
    """Return a JSON value with the numbers that JSON lacks, which zarr-python writes, as v3 has them: "NaN"."""
    if isinstance(value, dict):
        return {key: with_json_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_json_numbers(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value

"""Numbers as JSON can express them; pure, no I/O."""

from __future__ import annotations

import math

__all__ = ["finite_or_none"]


def finite_or_none(value: float | None) -> float | None:
    """Return a number as JSON can express it: None for infinity and NaN."""
    return value if value is not None and math.isfinite(value) else None

"""Convert the `checkpoint_id` of DCP's functions to a step."""

from __future__ import annotations

import os
import re

from tstore.core.format.arguments import quote
from tstore.errors import InvalidArgument

__all__ = ["is_step", "step_from"]

_STEP = re.compile(r"(?:(?:.*/)?(?:step|checkpoint)[-_/])?(\d+)/?")


def is_step(checkpoint_id: str | os.PathLike[str] | int) -> bool:
    """Return whether an identifier is that of a step: 100, "step/100", or a path such as "run/step-100"."""
    return _STEP.fullmatch(str(checkpoint_id)) is not None


def step_from(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """Return the step of an identifier; raise `InvalidArgument` if it names no step."""
    match = _STEP.fullmatch(str(checkpoint_id))
    if match is None:
        raise InvalidArgument(
            f"checkpoint_id={quote(str(checkpoint_id))}: expected a step, such as '100' or 'step-100'; pass "
            "the store to Writer or Reader"
        )
    return int(match[1])

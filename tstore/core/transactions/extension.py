"""The part of an array that a transaction has appended, which the commit may move."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

__all__ = ["Extension"]


class Extension:
    """The appended part of an array: on `axis`, from `start` to the end.

    The commit moves it behind the end of the newest version, and changes `start`. `kept` are the values, one array
    for each append, if the array's codecs are lossy: only these can be encoded again in other chunks.
    """

    __slots__ = ("axis", "kept", "start")

    def __init__(self, axis: int, start: int) -> None:
        self.axis = axis
        self.start = start
        self.kept: list[npt.NDArray[Any]] = []

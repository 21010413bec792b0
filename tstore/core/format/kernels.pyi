from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

def block_checks(data: memoryview, chunk: int, block: int) -> bytes: ...
def gather(
    sources: list[tuple[npt.NDArray[Any] | list[npt.NDArray[Any]], tuple[int, ...], bytes, int]],
    target: npt.NDArray[np.uint8],
    block: int,
) -> list[bytes]: ...
def scatter(data: npt.NDArray[np.uint8], target: npt.NDArray[Any], first: int, block: int) -> bytes: ...
def read_leading(
    path_of: Callable[[str, str], str], root: str, keys: Iterator[str], unless: str = ...
) -> tuple[list[bytes], list[str] | None]: ...
def scatter_region(
    data: npt.NDArray[np.uint8],
    target: npt.NDArray[Any],
    chunk: tuple[int, ...],
    start: tuple[int, ...],
    block: int,
) -> bytes: ...

"""The state of a transformer with random weights like those of a trained model: heavy tails and outlier channels.

Weights follow Student's t distribution with five degrees of freedom. Each row and column has a log-normal scale,
and a few columns are outliers, several times wider, as in trained language models. All tensors are cut from one
block of random numbers at random offsets, so that 100 MB take well under a second; the block's length is prime and
the scales differ, so that no two chunks are equal.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tstore.errors import InvalidArgument
from tstore.sharding import P

__all__ = ["advance", "spec_for", "transformer"]

_FROZEN = "embed"
_LEAST = 16_384  # bytes
_BLOCK = 1_048_583  # elements; a prime, so that rows are not aligned with it
_TAIL = 5.0  # degrees of freedom
_DATA, _MODEL = 4, 2  # the mesh of `spec_for`

Weights = np.ndarray[Any, np.dtype[np.float32]]


def transformer(size_bytes: int = 100_000_000, seed: int = 0) -> dict[str, Any]:
    """Return the state of a transformer of about that size, within 2 % from 1 MB on; the seed determines it.

        {"params": {"embed": {"tokens": (vocabulary, width)},
                    "layers": {0: {"attn": {"q", "k", "v", "o": (width, width)},
                                   "mlp": {"up": (width, 4 width), "down": (4 width, width)},
                                   "norm1", "norm2": (width,)}, 1: …},
                    "norm": (width,)},
         "step": 0}

    Weights are float32, the step is an int64 scalar, layers have int keys, and all dimensions are multiples
    of 8. Raise InvalidArgument below 16 KiB.
    """
    if size_bytes < _LEAST:
        raise InvalidArgument(f"a model of {size_bytes} bytes is too small; ask for {_LEAST} or more")
    vocabulary, width, depth = _dimensions(size_bytes // 4)
    source = _Source(np.random.default_rng(seed))
    layers = {}
    for layer in range(depth):
        layers[layer] = {
            "attn": {name: source.matrix(width, width) for name in ("q", "k", "v", "o")},
            "mlp": {"up": source.matrix(width, 4 * width), "down": source.matrix(4 * width, width)},
            "norm1": source.norm(width),
            "norm2": source.norm(width),
        }
    params = {
        "embed": {"tokens": source.matrix(vocabulary, width)},
        "layers": layers,
        "norm": source.norm(width),
    }
    return {"params": params, "step": np.int64(0)}


def advance(tree: dict[str, Any], step: int, seed: int = 0) -> dict[str, Any]:
    """Return the state at a later step: the embedding is frozen, every other weight changes by about 1 %.

    The argument is unchanged; the result shares its frozen arrays, all others are new. The tree, step and seed
    determine the result.
    """
    noise = _Source(np.random.default_rng((seed, step)))
    return {"params": noise.perturbed(tree["params"]), "step": np.int64(step)}


def spec_for(path: str, shape: tuple[int, ...]) -> P:
    """Return a sharding that divides an array evenly over a mesh {data: 4, model: 2}.

    Matrices are P("data", "model") if both axes divide them, else sharded over as many devices as possible. Arrays
    with more dimensions are sharded along the first two. Scalars, vectors and arrays that no axis divides are
    replicated. `path` is unused: rules by name have the same signature.
    """
    del path
    if len(shape) < 2 or 0 in shape:
        return P()
    candidates: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        (("data",), ("model",)),
        (("model",), ("data",)),
        (("data", "model"), ()),
        ((), ("data", "model")),
        (("data",), ()),
        ((), ("data",)),
        (("model",), ()),
        ((), ("model",)),
    ]
    for rows, columns in candidates:
        if shape[0] % _ways(rows) == 0 and shape[1] % _ways(columns) == 0:
            return P(rows, columns)
    return P()


def _ways(axes: tuple[str, ...]) -> int:
    return math.prod({"data": _DATA, "model": _MODEL}[axis] for axis in axes)


def _dimensions(parameters: int) -> tuple[int, int, int]:
    # Four fifths of the parameters are in layers of 12 width² each. There are width / 64 layers, but at least 2.
    in_layers = 0.8 * parameters
    width = min(math.cbrt(in_layers * 64 / 12), math.sqrt(in_layers / 24))
    multiple = 64 if width >= 256 else 8
    width = max(8, int(width) // multiple * multiple)
    per_layer = 12 * width**2 + 2 * width
    depth = max(2, int(in_layers) // per_layer)
    vocabulary = round((parameters - depth * per_layer) / width / 8) * 8
    return max(8, vocabulary), width, depth


class _Source:
    """Cuts tensors from one block of t-distributed numbers of unit variance."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        normal = random.standard_normal(_BLOCK, np.float32)
        # t = normal / sqrt(chi² / degrees), where chi² is twice a gamma of half the degrees
        chi2 = 2 * random.standard_gamma(_TAIL / 2, _BLOCK, np.float32)
        block = normal / np.sqrt(chi2 / (_TAIL - 2))
        self._block = np.concatenate([block, block])

    def matrix(self, rows: int, columns: int) -> Weights:
        weights = self._draw(rows * columns).reshape(rows, columns)
        across = self._scales(columns) / np.float32(math.sqrt(columns))
        outliers = self._random.choice(columns, max(1, columns // 256), replace=False)
        across[outliers] *= self._random.uniform(4, 12, outliers.size).astype(np.float32)
        weights *= across
        weights *= self._scales(rows)[:, None]
        return weights

    def norm(self, width: int) -> Weights:
        return 1 + np.float32(0.1) * self._draw(width)

    def perturbed(self, tree: dict[Any, Any]) -> dict[Any, Any]:
        moved: dict[Any, Any] = {}
        for key, value in tree.items():
            if key == _FROZEN:
                moved[key] = value
            elif isinstance(value, dict):
                moved[key] = self.perturbed(value)
            else:
                change = self._draw(value.size).reshape(value.shape)
                change *= np.float32(0.01)
                change += 1
                change *= value
                moved[key] = change
        return moved

    def _draw(self, count: int) -> Weights:
        drawn = np.empty(count, np.float32)
        at = int(self._random.integers(_BLOCK))
        for start in range(0, count, _BLOCK):
            stop = min(start + _BLOCK, count)
            drawn[start:stop] = self._block[at : at + stop - start]
        return drawn

    def _scales(self, count: int) -> Weights:
        return self._random.lognormal(0.0, 0.3, count).astype(np.float32)

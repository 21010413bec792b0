"""The state of a transformer with random weights like those of a trained model: heavy tails and outlier channels.

Weights follow Student's t distribution with five degrees of freedom. Each row and column has a log-normal scale,
and a few columns are outliers with scales several times larger, as in trained language models. All tensors are cut
from one block of random numbers at random offsets, so that 100 MB take well under a second. The block's length is
prime and the scales differ, so that no two chunks are equal.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tstore.errors import InvalidArgument
from tstore.sharding import P

__all__ = ["advance", "spec_for", "transformer"]

_FROZEN = "embed"
_MIN_BYTES = 16_384
_BLOCK = 1_048_583  # elements; a prime, so that rows are not aligned with it
_TAIL = 5.0  # degrees of freedom
_MESH = {"data": 4, "model": 2}

Weights = np.ndarray[Any, np.dtype[np.float32]]


def transformer(size_bytes: int = 100_000_000, seed: int = 0) -> dict[str, Any]:
    """Return the state of a transformer of about `size_bytes`; the seed determines it.

        {"params": {"embed": {"tokens": (vocabulary, width)},
                    "layers": {0: {"attn": {"q", "k", "v", "o": (width, width)},
                                   "mlp": {"up": (width, 4 width), "down": (4 width, width)},
                                   "norm1", "norm2": (width,)}, 1: …},
                    "norm": (width,)},
         "step": 0}

    Weights are float32, the step is an int64 scalar, layers have int keys, and all dimensions are multiples
    of 8. Above 1 MB, the size differs from `size_bytes` by at most 2 %. Raise `InvalidArgument` below 16 KiB.
    """
    if size_bytes < _MIN_BYTES:
        raise InvalidArgument(f"a model of {size_bytes} bytes is too small; ask for {_MIN_BYTES} or more")
    vocabulary, width, depth = _dimensions(size_bytes // 4)
    source = _Source(np.random.default_rng(seed))
    layers = {
        layer: {
            "attn": {name: source.matrix(width, width) for name in ("q", "k", "v", "o")},
            "mlp": {"up": source.matrix(width, 4 * width), "down": source.matrix(4 * width, width)},
            "norm1": source.norm(width),
            "norm2": source.norm(width),
        }
        for layer in range(depth)
    }
    embed = {"tokens": source.matrix(vocabulary, width)}
    return {"params": {"embed": embed, "layers": layers, "norm": source.norm(width)}, "step": np.int64(0)}


def advance(tree: dict[str, Any], step: int, seed: int = 0) -> dict[str, Any]:
    """Return the state at a later step: the embedding is frozen, every other weight changes by about 1 %.

    The tree, step and seed determine the result. The tree is not modified; the result shares its frozen arrays.
    """
    noise = _Source(np.random.default_rng((seed, step)))
    return {"params": noise.perturb(tree["params"]), "step": np.int64(step)}


def spec_for(shape: tuple[int, ...]) -> P:
    """Return a sharding that divides an array evenly over a mesh {data: 4, model: 2}.

    Matrices are P("data", "model") if the axes divide them, else sharded over as many devices as possible. Arrays
    with more dimensions are sharded along the first two. Scalars, vectors and arrays that no axis divides are
    replicated.
    """
    if len(shape) < 2 or 0 in shape:
        return P()
    data, model, both = ("data",), ("model",), ("data", "model")
    candidates: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(data, model), (model, data)]
    for axes in (both, data, model):
        candidates += [(axes, ()), ((), axes)]
    for spec in candidates:
        if all(n % math.prod(_MESH[axis] for axis in axes) == 0 for n, axes in zip(shape, spec, strict=False)):
            return P(*spec)
    return P()


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
    """A source of tensors, cut from one block of t-distributed numbers of unit variance."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        normal = random.standard_normal(_BLOCK, np.float32)
        # t = normal / sqrt(chi² / degrees), where chi² is twice a gamma of half the degrees. Division of chi² by
        # degrees - 2 instead makes the variance 1.
        chi2 = 2 * random.standard_gamma(_TAIL / 2, _BLOCK, np.float32)
        block = normal / np.sqrt(chi2 / (_TAIL - 2))
        self._block = np.concatenate([block, block])  # so that a cut of a block's length can start anywhere

    def matrix(self, rows: int, columns: int) -> Weights:
        weights = self._draw(rows * columns).reshape(rows, columns)
        column_scales = self._scales(columns) / np.float32(math.sqrt(columns))
        outliers = self._random.choice(columns, max(1, columns // 256), replace=False)
        column_scales[outliers] *= self._random.uniform(4, 12, outliers.size).astype(np.float32)
        weights *= column_scales
        weights *= self._scales(rows)[:, None]
        return weights

    def norm(self, width: int) -> Weights:
        return 1 + np.float32(0.1) * self._draw(width)

    def perturb(self, tree: dict[Any, Any]) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, value in tree.items():
            if key == _FROZEN:
                result[key] = value
            elif isinstance(value, dict):
                result[key] = self.perturb(value)
            else:
                factors = self._draw(value.size).reshape(value.shape)
                factors *= np.float32(0.01)
                factors += 1
                factors *= value
                result[key] = factors
        return result

    def _draw(self, count: int) -> Weights:
        at = int(self._random.integers(_BLOCK))
        return np.resize(self._block[at : at + min(count, _BLOCK)], count)

    def _scales(self, count: int) -> Weights:
        return self._random.lognormal(0.0, 0.3, count).astype(np.float32)

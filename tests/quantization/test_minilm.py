"""The encoder of examples/minilm.py computes the embeddings of all-MiniLM-L6-v2."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.modules import module_at
from tests.support.weights import real_weights
from tstore.convert.safetensors import open_tensors

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "minilm.py"

# Of transformers 5.23 with PyTorch 2.13 on a CPU, in float32.
COSINES = [0.857506, 0.733568, 0.891309, 0.899522, 0.800723, 0.86669, 0.871923, 0.912982]
FIRST = [-0.027331, 0.056216, 0.082923, 0.025886, -0.013256, -0.074675, -0.050345, 0.081159]


@pytest.fixture(scope="module")
def minilm() -> ModuleType:
    return module_at(EXAMPLE)


@pytest.fixture(scope="module")
def embeddings(minilm: ModuleType) -> npt.NDArray[np.float32]:
    embedded: npt.NDArray[np.float32] = encoder(minilm).embed(minilm.batches(minilm.SENTENCES))
    return embedded


def encoder(minilm: ModuleType) -> object:
    return minilm.Encoder(open_tensors(real_weights())[0])


def test_equals_pytorch(minilm: ModuleType, embeddings: npt.NDArray[np.float32]) -> None:
    pairs = embeddings[: 2 * len(minilm.PARAPHRASES)].reshape(-1, 2, embeddings.shape[1])
    np.testing.assert_allclose((pairs[:, 0] * pairs[:, 1]).sum(1), COSINES, atol=1e-5)
    np.testing.assert_allclose(embeddings[-1, :8], FIRST, atol=1e-5)


def test_paraphrases_are_near_and_other_sentences_far(
    minilm: ModuleType, embeddings: npt.NDArray[np.float32]
) -> None:
    cosines = embeddings @ embeddings.T
    for i in range(0, 2 * len(minilm.PARAPHRASES), 2):
        assert cosines[i, i + 1] > 0.7
    guitar, soup = 0, minilm.SENTENCES.index("Add a pinch of salt and let the soup simmer.")
    assert cosines[guitar, soup] < 0.3


def test_padding_changes_nothing(minilm: ModuleType, embeddings: npt.NDArray[np.float32]) -> None:
    alone = encoder(minilm).embed(minilm.batches(minilm.SENTENCES[::7], size=1))
    np.testing.assert_allclose(embeddings[::7], alone, atol=2e-6)

"""`tstore stats`, and `tstore diff --budget`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tstore.sync as blocking
from tstore.cli import main

VALUES = np.random.default_rng(0).standard_normal((256, 300)).astype("f4")


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with step 1, its quantized copy "small", and step 2."""
    url = str(tmp_path / "s")
    blocking.save(url, {"w": VALUES, "n": np.arange(3), "text": np.array(["a"])}, 1)
    blocking.quantize(url, {"w": "e4m3", "**": None}, tag="small")
    blocking.save(url, {"w": VALUES * 2, "n": np.arange(3), "text": np.array(["a"])}, 2)
    return url


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_stats_of_all_values_and_of_a_sample(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = document(capsys, "stats", store, "w", "--at", "1")
    assert result.pop("store") == store
    assert result == blocking.summarize(blocking.open(store).snapshot(1).array("w")).document()
    assert main(["stats", store, "w", "--step", "1", "--budget", "20kB"]) == 0
    text = capsys.readouterr().out
    assert "w: float32 256×300, from 19." in text
    assert "kB of 307.2 kB of values" in text
    assert "\nexponents: values by floor(log2 |x|)\n" in text
    assert "####" in text


def test_stats_of_integers_and_of_an_empty_array(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", store, "n", "--budget", "all"]) == 0
    text = capsys.readouterr().out
    assert "n: int64 3, all 3 values" in text
    with blocking.open(store).transaction() as tx:
        tx.create_array("empty", (0, 4), "float32")
    assert main(["stats", store, "empty"]) == 0
    assert "minimum         none" in capsys.readouterr().out


def test_the_loss_of_a_quantized_array(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = document(capsys, "stats", store, "w", "--at", "small", "--loss")
    assert (result["format"], result["version"], result["source"]) == ("e4m3", 2, 1)
    assert main(["stats", store, "w", "--at", "small", "--loss"]) == 0
    text = capsys.readouterr().out
    assert "e4m3 (stored, packed)" in text
    assert "w of version 2 against version 1: max error" in text
    assert "lowest SQNR:" in text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["w", "--budget", "0"], 2, "'0' is not a number of bytes, such as 500kB, 8MB or 2GB, or all"),
        (["w", "--budget", "-5"], 2, "'-5' is not a number of bytes"),
        (["w", "--budget", "9" * 40], 2, "is not a number of bytes"),
        (["w", "--at", "nine"], 1, "no tag 'nine'"),
        (["w", "--at", "1", "--step", "1"], 2, "both name a version"),
        (["v"], 1, "no array 'v'"),
        (["text"], 2, "text has dtype U1, whose values are not numbers"),
        (["w", "--loss", "--at", "3"], 1, "version 3"),
        (["n", "--loss", "--at", "small"], 2, "n is exact in version 2"),
        ([], 2, "Missing argument 'PATH'"),
    ],
)
def test_bad_input_is_one_sentence(
    store: str, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", store, *words]) == code
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_diff_within_a_budget(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = document(capsys, "diff", store, "1", "3", "--budget", "40kB")
    [array] = result["arrays"]  # type: ignore[misc]
    assert array["values"] == VALUES.size
    assert 1000 < array["values_compared"] <= 5000
    assert array["relative_norm"] == 1
    assert main(["diff", store, "1", "3", "--budget", "40kB"]) == 0
    assert "of 76,800 values in chunks that differ" in capsys.readouterr().out
    assert main(["diff", store, "1", "3", "--budget", "none"]) == 2
    assert "'none' is not a number of bytes" in capsys.readouterr().err

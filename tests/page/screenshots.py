"""Make the screenshots of the guide: `python -m tests.page.screenshots [FOLDER]`."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import urljoin

import numpy as np

import tstore.sync as tstore
from tests.support.browser import browser, viewing
from tests.support.documents import ROOT

STEPS = 48


def training_run(folder: Path) -> None:
    """Save a store with the steps of a small model, one of them quantized."""
    rng = np.random.default_rng(7)
    names = {"attention": ("query", "key", "value", "out"), "mlp": ("up", "down")}
    shapes = {"up": (192, 768), "down": (768, 192)}
    layers = {
        str(layer): {
            group: {name: rng.normal(0, 0.05, shapes.get(name, (192, 192))).astype("float32") for name in members}
            for group, members in names.items()
        }
        for layer in range(6)
    }
    params = {"embedding": rng.normal(0, 0.02, (3000, 192)).astype("float32"), "layers": layers}
    for number in range(STEPS):
        trained = str(number % 6)  # layers are trained in turn; the others are shared with the step before
        for group in layers[trained].values():
            for name in group:
                group[name] = group[name] + rng.normal(0, 0.001, group[name].shape).astype("float32")
        progress = number / STEPS
        metrics = {
            "loss": 1.8 + 2.4 * math.exp(-5 * progress) + 0.05 * rng.normal(),
            "accuracy": 0.71 - 0.6 * math.exp(-4 * progress) + 0.008 * rng.normal(),
            "learning rate": 3e-4 * (1 + math.cos(math.pi * progress)) / 2 + 1e-6,
        }
        tstore.save(folder, {"params": params}, step=500 * number, metrics=metrics)
    last = 500 * (STEPS - 1)
    tstore.quantize(folder, {"**": "e4m3"}, at=f"step/{last}")
    tstore.quantize(folder, bits=5, at=f"step/{last}", tag="small")


def main(target: Path) -> None:
    folder = Path(tempfile.gettempdir(), "run")  # the pictures show its path
    folder.mkdir()  # it must not exist
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        window = stack.enter_context(browser(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        window.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        training_run(folder)
        with viewing(folder) as entrance, tstore.open(folder) as store:
            name = f"step/{500 * STEPS}"
            members = [store.transaction(name=name, host=host, hosts=16, attempt="job-3.0") for host in range(16)]
            for host, member in enumerate(members):
                member.create_array(f"host/{host}", shape=(4,), dtype="int32").write(np.arange(4, dtype="int32"))
            commits = [threading.Thread(target=member.commit) for member in members]
            for commit in commits[:9]:
                commit.start()
            window.show(entrance, width=1290, height=1130)
            window.sees(f"{name} under way", "#hosts")  # after the first heartbeats
            window.sees("9 delivered", "#hosts")
            window.sees("finite", ".status")  # after the first poll
            window.wait(lambda: all(cell.text for cell in window.all("[data-shared]")[:8]))  # the rows in sight
            window.screenshot(target / "page_run.png")
            window.show(urljoin(entrance, "/-/page/tree?at=small"), width=1200, height=880, theme="dark")
            window.wait(lambda: len(window.all(".twist:not([hidden])")) == 20)  # of the groups
            window.screenshot(target / "page_tree.png")
            for commit in commits[9:]:
                commit.start()
            for commit in commits:
                commit.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "examples" / "guides")

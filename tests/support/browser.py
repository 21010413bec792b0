"""A headless Chromium for tests of the page, with checks of accessibility and of what the console says."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.processes import start_tstore

T = TypeVar("T")

DEADLINE = 120.0  # seconds
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_AXE = """
    const [rules, done] = arguments;
    const options = {resultTypes: ["violations"], ...(rules.length ? {runOnly: rules} : {})};
    axe.run(document, options).then(done);
"""
_OF_COLORS = ("color-contrast",)
"""The rules of axe whose results depend on the theme."""


def missing() -> str:
    """Return why there is no browser for tests, "" if there is one."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} missing; on Debian: apt-get install chromium chromium-driver" if absent else ""


class Browser:
    """A window of a browser."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def show(self, url: str, *, width: int = 1280, height: int = 900, theme: str = "light") -> None:
        """Open a URL in a window of this size, in a theme that the system prefers."""
        self.look(width=width, height=height, theme=theme)
        self.driver.get(url)

    def look(self, *, width: int = 1280, height: int = 900, theme: str = "light") -> None:
        """Change the size of the window, and the theme that the system prefers."""
        media = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def wait(self, condition: Callable[[], T]) -> T:
        """Return the first true result of a condition; fail after `DEADLINE` seconds.

        The page may replace an element while the condition looks at it: then it is tried again.
        """
        waiting = WebDriverWait(self.driver, DEADLINE, 0.05, ignored_exceptions=[StaleElementReferenceException])
        return waiting.until(lambda _: condition())

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "body") -> str:
        return " ".join(element.text for element in self.all(selector))

    def sees(self, text: str, selector: str = "body") -> None:
        """Wait until an element has the text."""
        self.wait(lambda: self.script("return document.querySelector(arguments[0])?.innerText", selector))
        self.wait(
            lambda: text in self.script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def press(self, *keys: str) -> None:
        """Press keys, whatever has the focus."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(getattr(Keys, key, key))

    def focus(self) -> WebElement:
        return self.driver.switch_to.active_element

    def complaints(self) -> list[str]:
        """Return what the console has said since the last call: errors, and violations of the policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def barriers(self) -> list[str]:
        """Return the serious and critical barriers for people that axe finds."""
        self.driver.execute_script(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
        return self._violations()

    def illegible(self) -> list[str]:
        """Return the barriers that the colors make, of a page whose other barriers have been sought."""
        return self._violations(*_OF_COLORS)

    def _violations(self, *rules: str) -> list[str]:
        found = self.driver.execute_async_script(_AXE, rules)["violations"]
        return [
            f"{violation['id']}: {violation['help']}: {[node['html'][:200] for node in violation['nodes'][:3]]}"
            for violation in found
            if violation["impact"] in ("serious", "critical")
        ]

    def overflow(self) -> int:
        """Return how many pixels the content is wider than the window."""
        root = "document.documentElement"
        overflow: int = self.script(f"return {root}.scrollWidth - {root}.clientWidth")  # without the scroll bar
        return overflow

    def screenshot(self, path: Path) -> None:
        self.driver.save_screenshot(str(path))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Run a browser with a new profile in a folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


@contextlib.contextmanager
def viewing(store: Path, *options: str) -> Iterator[str]:
    """Run `tstore view` on a store; yield the address that signs in one browser."""
    arguments = ["view", store, "--no-browser", "--json", *options]
    with start_tstore(*arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["entrance"]
        finally:
            process.kill()

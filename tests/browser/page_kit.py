"""What tests do with the page: open it, find what a user sees, wait for it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

T = TypeVar("T")
WAIT_S = 60.0
"""Longest wait for what should come soon, on a busy machine."""
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


def new_driver(folder: Path) -> Chrome:
    """Starts Chromium with a profile of its own."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    browser.set_page_load_timeout(60)
    browser.set_script_timeout(60)
    return browser


class Page:
    """The page in a browser."""

    def __init__(self, driver: Chrome, address: str) -> None:
        self.driver = driver
        self.address = address

    # -- the browser --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Goes to a new tab, with nothing kept: that belongs to a tab or an address, and ports are given out twice."""
        old = self.driver.current_window_handle
        self.driver.switch_to.new_window("tab")
        new = self.driver.current_window_handle
        self.driver.switch_to.window(old)
        self.driver.close()
        self.driver.switch_to.window(new)
        kept = {"origin": self.address, "storageTypes": "local_storage"}
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", kept)
        self.look(width=1200)
        self.faults()

    def look(self, *, width: int = 1200, height: int = 900, dark: bool = False, scale: float = 1.0) -> None:
        """Sets the size of the window, and light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        # What moves keeps a processor busy, and is in no picture.
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})

    def faults(self) -> list[str]:
        """Returns errors of scripts and violations of the security policy since the last call."""
        logged = [one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"]
        # Requests that fail, as some tests want them to.
        return [text for text in logged if not re.search(r"Failed to load resource|net::ERR", text)]

    def open(self, view: str = "talk", *, speed: int = 1) -> Page:
        """Loads the page; with another speed its timers end earlier, as those that ask again."""
        timers = f"const timer = setTimeout; window.setTimeout = (work, ms) => timer(work, ms / {speed})"
        added = self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": timers})
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}/#{view}")
        self.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
        return self

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    # -- what is there ------------------------------------------------------------------------------------------------

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def is_shown(self, selector: str) -> bool:
        return any(one.is_displayed() for one in self.all(selector))

    def text(self, selector: str) -> str:
        """Returns the text of all shown elements, without line breaks."""
        return " ".join(" ".join(one.text for one in self.all(selector) if one.is_displayed()).split())

    def wait(self, found: Callable[[], T], what: str) -> T:
        """Waits until something is true; says what if it never is."""
        wait = WebDriverWait(self.driver, WAIT_S, 0.05, (StaleElementReferenceException,))
        try:
            return wait.until(lambda _: found())
        except TimeoutException:
            raise AssertionError(f"{what}; the page shows: {self.text('body')[:2000]}") from None

    def wait_text(self, selector: str, text: str) -> None:
        self.wait(lambda: text in self.text(selector), f"{text!r} is not in {selector}")

    # -- what a user does ---------------------------------------------------------------------------------------------

    def click(self, selector: str) -> None:
        self.wait(lambda: self.is_shown(selector) and self.one(selector).is_enabled(), f"{selector} cannot be clicked")
        next(one for one in self.all(selector) if one.is_displayed()).click()

    def say(self, text: str) -> None:
        """Types a message and sends it by Enter."""
        self.wait(lambda: self.one("#model").is_enabled(), "the models are not there")
        self.one("#prompt").send_keys(text, Keys.ENTER)

    def type_into(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    @property
    def answers(self) -> list[str]:
        return [one.text for one in self.all(".message.assistant .text")]

    def wait_answer(self, text: str) -> None:
        """Waits until the last answer is this, and complete."""
        self.wait(lambda: self.answers[-1:] == [text] and self.is_shown("#send"), f"the last answer is not {text!r}")

"""A real Chromium, and the page next to an API that answers as a test says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_api import FakeApi
from page_kit import Page, new_driver
from selenium.webdriver import Chrome
from web_kit import served

NEEDED = ("chromium", "chromedriver")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """One browser for all tests of a process: it takes seconds to start."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} (on Debian: apt-get install chromium chromium-driver)")
    browser = new_driver(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.quit()


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    with served(fake.app()) as fake.address:
        yield fake
        fake.going_on.set()


@pytest.fixture
def page(driver: Chrome, api: FakeApi, tmp_path: Path) -> Iterator[Page]:
    """The page of `api`, in an empty tab: nothing is open, stored or emulated."""
    page = Page(driver, api.address)
    page.reset()
    yield page
    assert page.faults() == [], "the browser has complained"
    driver.get("about:blank")

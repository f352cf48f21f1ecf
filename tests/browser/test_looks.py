"""What holds for every look of the page: light, dark and as wide as a phone."""

from __future__ import annotations

import pytest
from axe_core_python.selenium import Axe
from fake_api import Answer, FakeApi, broken
from page_kit import Page

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

LOOKS = {
    "light": {"width": 1200, "dark": False},
    "dark": {"width": 1200, "dark": True},
    "phone": {"width": 360, "height": 740, "dark": False},
}
VIEWS = ["welcome", "talk", "swarm"]


def bring(page: Page, api: FakeApi, view: str) -> None:
    """Opens a view with as much in it as it can show."""
    if view == "swarm":
        api.state = broken()
        page.open("swarm").wait_text(".gap", "no server")
        return
    page.open().click("#toggle")
    page.wait_text("#welcome-title", "Talk with")
    if view == "talk":
        parts = ("Some text\n```\n", f"code {'x' * 200}", "\n```\n", "x" * 300)
        api.answers = [Answer(parts), Answer(error="it failed")]
        page.say("Hello")
        page.wait(lambda: page.is_shown("#again"), "no answer")
        page.say("y" * 300)
        page.wait_text(".message .notice", "It failed.")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_serious(page: Page, api: FakeApi, look: str, view: str) -> None:
    page.look(**LOOKS[look])
    bring(page, api, view)
    found = Axe().run(page.driver)["violations"]
    serious = {one["id"]: [node["html"] for node in one["nodes"]][:3] for one in found if one["impact"] != "minor"}
    assert serious == {}


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_wider_than_a_phone(page: Page, api: FakeApi, view: str) -> None:
    page.look(**LOOKS["phone"])
    bring(page, api, view)
    assert page.run("return document.documentElement.scrollWidth") <= 360
    wide = page.run(
        "return [...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > 361"
        " && !e.closest('pre, code, .away')).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


@pytest.mark.parametrize("view", VIEWS)
def test_everything_comes_from_this_server(page: Page, api: FakeApi, view: str) -> None:
    bring(page, api, view)
    loaded = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert any(name.endswith("style.css") for name in loaded)
    assert [name for name in loaded if not name.startswith(f"{api.address}/")] == []

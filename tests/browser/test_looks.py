"""What holds for every look of the page: light, dark and as wide as a phone."""

from __future__ import annotations

import pytest
from axe_core_python.selenium import Axe
from fake_api import Answer, FakeApi, broken
from page_kit import Page

pytestmark = pytest.mark.browser

LOOKS = {
    "light": {"width": 1200, "dark": False},
    "dark": {"width": 1200, "dark": True},
    "phone": {"width": 320, "height": 640, "dark": False},
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
        api.answers = [Answer(({"reasoning_content": "z" * 300}, *parts)), Answer(error="it failed")]
        page.say("Hello")
        page.wait(lambda: page.is_shown("#again"), "no answer")
        page.click(".thought summary")
        page.say("y" * 300)
        page.wait_text(".message .notice", "It failed.")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("look", LOOKS)
def test_everybody_can_use_it(page: Page, api: FakeApi, look: str, view: str) -> None:
    page.look(**LOOKS[look])
    bring(page, api, view)
    # Dark differs in its colors alone.
    only = {"runOnly": ["color-contrast"]} if look == "dark" else {}
    found = Axe().run(page.driver, options=only)["violations"]
    serious = {one["id"]: [node["html"] for node in one["nodes"]][:3] for one in found if one["impact"] != "minor"}
    assert serious == {}
    width = LOOKS[look]["width"]
    assert page.run("return document.documentElement.scrollWidth") <= width
    wide = page.run(
        "return [...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > arguments[0]"
        " && !e.closest('pre, code, .away')).map((e) => e.outerHTML.slice(0, 80))",
        width + 1,
    )
    assert wide == []
    loaded = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert any(name.endswith("style.css") for name in loaded)
    assert [name for name in loaded if not name.startswith(f"{api.address}/")] == []

"""What holds for every look of the page: light, dark and as wide as a phone."""

from __future__ import annotations

import pytest
from axe_core_python.selenium import Axe
from fake_api import Answer, FakeApi, broken, running
from page_kit import Page
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.browser

LOOKS = {
    "light": {"width": 1200, "dark": False},
    "dark": {"width": 1200, "dark": True},
    "phone": {"width": 320, "height": 640, "dark": False},
}
VIEWS = ["welcome", "talk", "swarm", "training"]


def bring(page: Page, api: FakeApi, view: str) -> None:
    """Opens a view with as much in it as it can show."""
    if view == "swarm":
        api.state = broken()
        page.open("swarm").wait_text(".gap", "no server")
        return
    if view == "training":
        api.progress = {"runs": [running(), running(1, has_reward=False), running(0)], "num_open": 2}
        page.open("training").wait_text("#runs", "No step yet")
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
        # The list of conversations lies over them on a phone.
        page.click("#list-toggle")


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


@pytest.mark.parametrize(("width", "height"), [(320, 640), (360, 740), (390, 844), (412, 915)])
def test_the_bars_take_a_tenth_of_a_phone(page: Page, api: FakeApi, width: int, height: int) -> None:
    page.look(width=width, height=height)
    page.open().say("Hello")
    page.wait_answer("Hello there.")
    bars = page.run(
        "return [...document.querySelectorAll('.top, .composer')].map((one) => one.getBoundingClientRect().height)"
    )
    assert len(bars) == 2
    assert sum(bars) <= height / 10
    assert page.run("return document.querySelector('#scroll').clientHeight") >= 0.9 * height - 1


def test_the_list_lies_over_the_conversation_on_a_phone(page: Page) -> None:
    page.look(width=360, height=740)
    page.open().say("Hello")
    page.wait_answer("Hello there.")
    assert not page.is_shown("#list")
    page.click("#list-toggle")
    assert page.run("return document.activeElement.textContent") == "Hello"
    assert page.run("return document.querySelector('#chat').inert")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not page.is_shown("#list")
    assert page.run("return document.activeElement.id") == "list-toggle"
    page.click("#list-toggle")
    page.click("#conversations .open")
    assert not page.is_shown("#list")
    assert not page.run("return document.querySelector('#chat').inert")

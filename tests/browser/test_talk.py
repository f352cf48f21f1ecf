"""The view to talk, in Chromium, with an API that answers as the test says."""

from __future__ import annotations

import re

import pytest
from fake_api import ADAPTER, MODEL, PEERS, Answer, FakeApi
from page_kit import Page
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

pytestmark = pytest.mark.browser


@pytest.mark.quick
def test_an_answer_streams_and_says_who_computed_it(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(("The sky", " scatters", " blue", " light."), hold_after=2)]
    page.open().say("Why is the sky blue?")
    page.wait(lambda: page.answers == ["The sky scatters"], "the first half does not come alone")
    assert page.is_shown("#stop")
    assert page.one("#messages").get_attribute("aria-busy") == "true"
    assert page.text(".message.user .text") == "Why is the sky blue?"
    api.going_on.set()
    page.wait_answer("The sky scatters blue light.")
    page.wait_text(".facts", "12.3 tokens/s")
    for fact in ("4 tokens", "24 cached", PEERS[0][-8:], PEERS[1][-8:]):
        assert fact in page.text(".facts")
    assert page.one("#messages").get_attribute("aria-busy") == "false"
    assert page.one("#announcer").get_attribute("textContent") == "The answer is complete"
    [asked] = api.asked
    assert asked == {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    }


def test_the_answer_is_never_html(page: Page, api: FakeApi) -> None:
    hostile = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script><b>bold</b>'
    api.answers = [Answer((f"{hostile}\n```html\n", hostile, "\n```\nend &amp; more"))]
    page.open().say(hostile)
    page.wait(lambda: page.is_shown("#again"), "no answer")
    assert page.one(".assistant .text p").text == hostile
    assert page.one(".text pre code").text == hostile
    assert page.text(".assistant .text").endswith("end & more")
    assert page.text(".message.user .text") == hostile
    assert not page.all("#messages img, #messages script, #messages b")
    assert page.run("return window.hacked") is None


def test_stop_keeps_what_has_come_and_frees_the_server(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(("One", " two", " three"), hold_after=2)]
    page.open().say("Count")
    page.wait(lambda: page.answers == ["One two"], "the answer does not begin")
    page.click("#stop")
    page.wait_text(".note", "Stopped.")
    assert api.left.wait(20), "the server still computes"
    assert page.answers == ["One two"]
    assert page.run("return document.activeElement.id") == "prompt"
    page.say("Go on")
    page.wait_answer("Hello there.")
    assert [one["content"] for one in api.asked[1]["messages"]] == ["Count", "One two", "Go on"]


def test_escape_stops_too(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(hold_after=1)]
    page.open().say("Hello")
    page.wait(lambda: page.answers == ["Hello"], "the answer does not begin")
    page.one("#prompt").send_keys(Keys.ESCAPE)
    page.wait_text(".note", "Stopped.")


def test_thoughts_are_shown_apart_and_are_not_sent_again(page: Page, api: FakeApi) -> None:
    thoughts = ({"reasoning_content": "Rayleigh"}, {"reasoning_content": " again."})
    api.answers = [Answer((*thoughts, "Because."), hold_after=2)]
    page.open().say("Why?")
    page.wait_text(".thought summary", "Thinking")
    assert not page.is_shown(".waiting")
    page.click(".thought summary")
    page.wait_text(".thought p", "Rayleigh again.")
    api.going_on.set()
    page.wait_answer("Because.")
    assert page.text(".thought") == "Thoughts Rayleigh again."
    page.say("Sure?")
    page.wait_answer("Hello there.")
    assert api.asked[1]["messages"][1] == {"role": "assistant", "content": "Because."}
    assert len([one for one in page.all(".thought") if one.is_displayed()]) == 1


def test_the_focus_stays_when_buttons_change_places(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(hold_after=1)]
    page.open()
    page.wait(lambda: page.one("#model").is_enabled(), "the models are not there")
    page.one("#prompt").send_keys("Hello", Keys.TAB)
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.wait(lambda: page.answers == ["Hello"], "the answer does not begin")
    assert page.driver.switch_to.active_element == page.one("#stop")
    api.going_on.set()
    page.wait_answer("Hello there.")
    assert page.driver.switch_to.active_element == page.one("#prompt")


def test_regenerate_asks_the_same_again(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(("First",)), Answer(("Second",)), Answer(("Third",))]
    page.open().say("Say something")
    page.wait_answer("First")
    page.click("#again")
    page.wait_answer("Second")
    assert page.answers == ["Second"]
    assert api.asked[0] == api.asked[1]
    page.say("More")
    page.wait_answer("Third")
    assert len(page.all("#again")) == 1, "only the last answer is made anew"


def test_settings_and_adapters_go_into_the_request(page: Page, api: FakeApi) -> None:
    page.open()
    page.wait_text("#welcome-title", "Talk with SmolLM2-135M-Instruct")
    picker = Select(page.one("#model"))
    assert [one.text for one in picker.options] == ["SmolLM2-135M-Instruct", "with me/sotu-adapter@v1"]
    page.click("#toggle")
    settings = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "max_tokens": "64", "seed": "7"}
    for name, value in settings.items():
        page.type_into(f"#{name}", value)
    page.say("Hello")
    page.wait_answer("Hello there.")
    picker.select_by_value(ADAPTER)
    page.say("And now?")
    page.wait(lambda: len(api.asked) == 2, "the second message is not sent")
    page.wait_answer("Hello there.")
    first, second = api.asked
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: first[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 64,
        "seed": 7,
    }
    assert (first["model"], second["model"]) == (MODEL, ADAPTER)
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant", "user"]


def test_a_setting_out_of_range_is_not_sent(page: Page, api: FakeApi) -> None:
    page.open().click("#toggle")
    page.type_into("#temperature", "3")
    page.click("#toggle")
    page.say("Hello")
    page.wait(lambda: page.is_shown("#temperature"), "the settings do not open")
    assert page.run("return document.activeElement.id") == "temperature"
    assert api.asked == []
    assert page.one("#prompt").get_attribute("value") == "Hello"


def test_a_conversation_outlives_a_reload_and_ends_by_a_button(page: Page, api: FakeApi) -> None:
    page.open().say("Hello")
    page.wait_answer("Hello there.")
    page.driver.refresh()
    page.wait_answer("Hello there.")
    page.say("Again")
    page.wait(lambda: len(api.asked) == 2, "it is not sent")
    assert len(api.asked[1]["messages"]) == 3
    page.wait_answer("Hello there.")
    page.click("#new")
    assert page.is_shown("#welcome")
    assert page.answers == []


def test_a_new_conversation_ends_the_answer_of_the_old_one(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(("Old", " end"), hold_after=1), Answer(("New",))]
    page.open().say("Hello")
    page.wait(lambda: page.answers == ["Old"], "the answer does not begin")
    page.click("#new")
    assert api.left.wait(20), "the server still computes"
    page.say("Hello")
    page.wait_answer("New")
    assert page.answers == ["New"]
    assert len(api.asked[1]["messages"]) == 1


def test_everything_can_be_done_by_keyboard(page: Page, api: FakeApi) -> None:
    page.open()
    page.wait_text("#welcome-title", "Talk with SmolLM2")
    reached = []
    for _ in range(14):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        name, outline = page.run(
            "const e = document.activeElement; const s = getComputedStyle(e);"
            "return [e.id || e.className || e.hash, s.outlineStyle + s.outlineWidth]"
        )
        reached.append(name)
        assert re.fullmatch(r"(solid|auto)[1-9]px", outline), f"the focus on {name} cannot be seen: {outline}"
        if name == "prompt":
            break
    assert reached[0] == "skip"
    assert {"#talk", "#swarm", "model", "toggle", "scroll", "prompt"} <= set(reached)
    page.driver.switch_to.active_element.send_keys("One line", Keys.SHIFT, Keys.ENTER)
    page.driver.switch_to.active_element.send_keys(Keys.NULL, "another", Keys.ENTER)
    page.wait_answer("Hello there.")
    assert api.asked[0]["messages"][-1]["content"] == "One line\nanother"


def test_without_a_swarm_there_is_no_view_of_it(page: Page, api: FakeApi) -> None:
    api.state = None
    page.open("swarm")
    page.wait_text("#welcome-title", "Talk with SmolLM2")
    page.wait(lambda: not page.is_shown("nav a[href='#swarm']"), "there is a view of it")
    assert not page.is_shown("#trust")

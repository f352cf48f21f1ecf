"""What the view to talk does when something goes wrong, in Chromium, with an API that answers as the test says."""

from __future__ import annotations

import pytest
from fake_api import Answer, FakeApi
from page_kit import Page
from selenium.webdriver.common.keys import Keys

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

STORED_KEY = "return sessionStorage.getItem('swarm.key')"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        pytest.param(Answer(status=400, error="the prompt is too long"), "The prompt is too long.", id="refused"),
        pytest.param(Answer(("Part",), error="no server holds blocks 0:4"), "No server holds blocks 0:4.", id="midway"),
        pytest.param(Answer(("Part",), breaks_off=True), "The answer broke off", id="broken off"),
    ],
)
def test_a_failure_is_one_sentence_and_can_be_tried_again(page: Page, api: FakeApi, answer: Answer, shown: str) -> None:
    api.answers = [answer, Answer(("Fine now",))]
    page.open().say("Hello")
    page.wait_text(".message .notice", shown)
    assert page.answers == (["Part"] if answer.status == 200 else [""])
    assert page.text("#again") == "Try again"
    page.click("#again")
    page.wait_answer("Fine now")
    assert not page.is_shown(".message .notice")
    assert api.asked[0] == api.asked[1]


def test_an_answer_that_cannot_be_read_is_not_generated_further(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(("Part", None, " more"), hold_after=2)]
    page.open().say("Hello")
    page.wait_text(".message .notice", "a part of it is not JSON.")
    assert api.left.wait(20), "the server still computes"
    assert page.answers == ["Part"]


def test_a_question_without_an_answer_is_not_sent_again(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(("One",)), Answer(status=503, error="no server"), Answer(("Three",))]
    page.open().say("First")
    page.wait_answer("One")
    page.say("Second")
    page.wait_text(".message .notice", "No server.")
    page.say("Third")
    page.wait_answer("Three")
    assert [one["content"] for one in api.asked[1]["messages"]] == ["First", "One", "Second"]
    assert [one["content"] for one in api.asked[2]["messages"]] == ["First", "One", "Third"]


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        pytest.param(Answer(finish="length"), "as many tokens as are allowed", id="cut"),
        pytest.param(Answer(()), "The answer has no text.", id="empty"),
    ],
)
def test_an_answer_that_is_cut_or_empty_says_so(page: Page, api: FakeApi, answer: Answer, note: str) -> None:
    api.answers = [answer]
    page.open().say("Hello")
    page.wait_text(".note", note)


def test_a_reload_in_the_middle_of_an_answer_loses_no_text(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(("Part", " more"), hold_after=1)]
    page.open().say("Question")
    page.wait(lambda: page.answers == ["Part"], "the answer does not begin")
    assert "Question" in page.run("return JSON.stringify(localStorage)"), "a crash loses the question"
    page.driver.refresh()
    page.wait_text(".message .notice", "The answer broke off")
    assert page.text(".message.user .text") == "Question"
    assert page.answers == ["Part"]
    assert api.left.wait(20), "the server still computes"
    page.wait(lambda: page.one("#model").is_enabled(), "the models are not there")
    page.click("#again")
    page.wait_answer("Hello there.")
    assert api.asked[0] == api.asked[1]


def test_a_key_is_asked_for_and_kept_in_this_tab_alone(page: Page, api: FakeApi) -> None:
    api.key = "right"
    page.open()
    page.wait(lambda: page.is_shown("#key"), "no key is asked for")
    page.type_into("#key", "wrong")
    page.one("#key").send_keys(Keys.ENTER)
    page.wait_text("#key-wrong", "does not accept this key")
    page.type_into("#key", "right")
    page.click("#key-form .main")
    page.wait_text("#welcome-title", "Talk with SmolLM2")
    page.say("Hello")
    page.wait_answer("Hello there.")
    assert page.run("return sessionStorage.getItem('swarm.key')") == "right"
    assert "right" not in page.run("return JSON.stringify(localStorage)")


def test_a_key_that_cannot_be_sent_is_neither_taken_nor_kept(page: Page, api: FakeApi) -> None:
    api.key = "r1gh~t-"
    page.open()
    for wrong in ("clé€", "   ", "two words"):
        page.wait(lambda: page.is_shown("#key"), "no key is asked for")
        page.type_into("#key", wrong + Keys.ENTER)
        assert page.run("return document.querySelector('#key').validity.patternMismatch"), wrong
        assert page.is_shown("#key")
        assert page.run(STORED_KEY) is None
    page.run("sessionStorage.setItem('swarm.key', 'clé€')")
    page.driver.refresh()
    page.wait(lambda: page.is_shown("#key"), "no key is asked for")
    page.type_into("#key", f" {api.key} {Keys.ENTER}")
    page.wait_text("#welcome-title", "Talk with SmolLM2")
    assert page.run(STORED_KEY) == api.key


def test_without_a_key_it_says_what_is_missing(page: Page, api: FakeApi) -> None:
    api.key = "right"
    page.open()
    page.wait(lambda: page.is_shown("#key"), "no key is asked for")
    page.click("#key-cancel")
    page.wait_text("#welcome-title", "This server asks for an API key.")
    page.click(".give-key")
    page.wait(lambda: page.is_shown("#key"), "the key is not asked for again")
    page.type_into("#key", f"right{Keys.ENTER}")
    page.wait_text("#welcome-title", "Talk with SmolLM2")
    assert not page.is_shown(".give-key")


def test_a_key_that_was_not_given_is_asked_for_with_the_next_try(page: Page, api: FakeApi) -> None:
    page.open().say("Hello")
    page.wait_answer("Hello there.")
    api.key = "right"
    page.say("More")
    page.wait(lambda: page.is_shown("#key"), "no key is asked for")
    page.one("#key").send_keys(Keys.ESCAPE)
    page.wait_text(".message .notice", "This server asks for an API key.")
    page.click("#again")
    page.wait(lambda: page.is_shown("#key"), "the key is not asked for again")
    page.type_into("#key", f"right{Keys.ENTER}")
    page.wait_answer("Hello there.")
    assert len(page.answers) == 2


def test_a_server_that_is_not_there_yet_is_waited_for(page: Page, api: FakeApi) -> None:
    api.models = []
    page.open(speed=10)
    page.wait_text("#welcome-title", "This server offers no model.")
    assert not page.one("#send").is_enabled()
    api.models = ["here-now"]
    page.wait_text("#welcome-title", "Talk with here-now")


def test_a_new_test_finds_nothing_of_the_one_before(page: Page, api: FakeApi) -> None:
    page.open().say("Hello")
    page.wait_answer("Hello there.")
    page.reset()
    page.open().wait_text("#welcome-title", "Talk with SmolLM2")
    assert page.answers == []

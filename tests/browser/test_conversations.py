"""Conversations that the browser keeps, messages that are edited, files that go along: in Chromium."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_api import ADAPTER, MODEL, Answer, FakeApi
from page_kit import Page
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

pytestmark = pytest.mark.browser

KEPT = "return Object.entries(localStorage).filter(([key]) => key.startsWith('swarm.talk.')).map(([, text]) => text)"


def ask(page: Page, text: str, number: int = 1) -> None:
    """Asks; the conversation then has so many answers."""
    page.say(text)
    page.wait(lambda: len(page.answers) == number and page.is_shown("#again"), "no answer")


def listed(page: Page) -> list[str]:
    return [one.text for one in page.all("#conversations .open")]


def choose(page: Page, name: str) -> None:
    next(one for one in page.all("#conversations .open") if one.text == name).click()


# -- the list ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_conversations_outlive_the_tab_and_are_found_in_the_list(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(("First answer",)), Answer(("Second answer",))]
    page.open()
    Select(page.one("#model")).select_by_value(ADAPTER)
    ask(page, "First question")
    page.click("#new")
    Select(page.one("#model")).select_by_value(MODEL)
    ask(page, "Second question")
    assert listed(page) == ["Second question", "First question"]
    kept = page.run("return {...localStorage}")
    page.reset()
    page.open()
    page.run("for (const [key, text] of Object.entries(arguments[0])) localStorage.setItem(key, text)", kept)
    page.open().wait_text("#welcome-title", "Talk with SmolLM2")
    assert page.answers == [], "a new tab begins with a new conversation"
    choose(page, "First question")
    page.wait_answer("First answer")
    assert page.one("#model").get_attribute("value") == ADAPTER, "who answered there is not chosen"
    assert page.one("#conversations [aria-current]").text == "First question"
    page.driver.refresh()
    page.wait_answer("First answer")
    ask(page, "More", 2)
    assert [one["content"] for one in api.asked[2]["messages"]] == ["First question", "First answer", "More"]
    assert listed(page) == ["First question", "Second question"], "the last used one is not first"
    assert "this browser alone" in page.text("#bound")


def test_a_conversation_is_renamed_and_deleted(page: Page, api: FakeApi) -> None:
    page.open()
    ask(page, "One")
    page.click("#new")
    ask(page, "Two")
    page.click("#conversations li:first-child .rename")
    page.driver.switch_to.active_element.send_keys("Not this", Keys.ESCAPE)
    assert listed(page) == ["Two", "One"]
    page.click("#conversations li:first-child .rename")
    page.driver.switch_to.active_element.send_keys(Keys.CONTROL, "a", Keys.NULL, "<b>Zwei</b>", Keys.ENTER)
    page.wait(lambda: listed(page) == ["<b>Zwei</b>", "One"], "it is not renamed")
    page.driver.refresh()
    page.wait(lambda: listed(page) == ["<b>Zwei</b>", "One"], "the name is not kept")
    page.click("#conversations [aria-current] ~ .delete")
    page.wait_text("#confirm", "Delete “<b>Zwei</b>”?")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert len(listed(page)) == 2
    page.click("#conversations [aria-current] ~ .delete")
    page.click("#confirm-yes")
    page.wait(lambda: listed(page) == ["One"], "it is not deleted")
    assert page.answers == []
    page.click("#forget")
    page.click("#confirm-yes")
    page.wait(lambda: page.run(KEPT) == [], "something is kept")
    page.wait_text("#nothing", "No conversation yet.")


def test_opening_another_conversation_stops_the_answer_and_keeps_its_text(page: Page, api: FakeApi) -> None:
    page.open()
    ask(page, "Old")
    page.click("#new")
    api.answers = [Answer(("Half", " whole"), hold_after=1)]
    page.say("New")
    page.wait(lambda: page.answers == ["Half"], "the answer does not begin")
    choose(page, "Old")
    assert api.left.wait(20), "the server still computes"
    page.wait_answer("Hello there.")
    choose(page, "New")
    page.wait_answer("Half")
    page.wait_text(".note", "Stopped.")


def entry(number: int, chars: int = 10) -> str:
    question = {"role": "user", "content": f"Old {number} {'x' * chars}", "id": 1}
    return json.dumps({"title": f"Old {number}", "at": number, "model": "", "messages": [question]})


FILL = "for (const [index, text] of arguments[0].entries()) localStorage.setItem(`swarm.talk.old-${index}`, text)"


@pytest.mark.parametrize(
    ("entries", "others"),
    [
        pytest.param([entry(number) for number in range(200)], 0, id="too many"),
        pytest.param([entry(number, 1_000_000) for number in range(4)], 0, id="too long"),
        pytest.param([entry(number, 1_000_000) for number in range(2)], 3_000_000, id="the browser is full"),
    ],
)
def test_the_oldest_makes_room_and_it_is_said(page: Page, api: FakeApi, entries: list[str], others: int) -> None:
    page.open()
    page.run(f"{FILL}; localStorage.setItem('other', 'x'.repeat(arguments[1]))", entries, others)
    page.driver.refresh()
    page.wait(lambda: len(listed(page)) == len(entries), "the list is not there")
    api.answers = [Answer(("y" * 300_000,))]
    ask(page, "New")
    page.wait_text("#said", "Deleted to make room in this browser: “Old 0”.")
    kept = [f"Old {number}" for number in range(len(entries) - 1, 0, -1)]
    assert listed(page) == ["New", *kept]
    assert len(page.run(KEPT)) == len(entries)


def test_a_conversation_that_cannot_be_kept_says_so(page: Page, api: FakeApi) -> None:
    page.open()
    ask(page, "Kept")
    page.click("#new")
    page.run("localStorage.setItem('other', 'x'.repeat(5_200_000))")
    api.answers = [Answer(("y" * 300_000,))]
    ask(page, "New")
    page.wait_text("#said", "cannot be kept")
    assert "Kept" in listed(page), "it has lost another one in vain"


def test_what_is_no_conversation_is_left_out(page: Page) -> None:
    page.open()
    broken = [
        "{",
        "[]",
        "null",
        '{"messages": []}',
        '{"title": "", "at": 1, "messages": [{"role": "system", "content": "", "id": 1}]}',
    ]
    page.run(FILL, [*broken, entry(7)])
    page.driver.refresh()
    page.wait(lambda: listed(page) == ["Old 7"], "the whole one is not there alone")


def test_another_tab_shows_what_this_one_does(page: Page, api: FakeApi) -> None:
    page.open()
    ask(page, "Here")
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    page.open()
    page.wait(lambda: listed(page) == ["Here"], "the other tab has no list")
    choose(page, "Here")
    ask(page, "There", 2)
    page.driver.close()
    page.driver.switch_to.window(first)
    page.wait(lambda: len(page.answers) == 2, "the first tab has the old conversation")


def test_a_list_of_many_can_be_searched(page: Page) -> None:
    page.open()
    page.run(FILL, [entry(number) for number in range(12)])
    page.driver.refresh()
    page.wait(lambda: page.is_shown("#find"), "there is no search")
    page.one("#find").send_keys("old 11")
    page.wait(lambda: listed(page) == ["Old 11"], "it is not found")
    page.one("#find").send_keys("1")
    page.wait_text("#nothing", "None of them is called so.")


# -- messages ---------------------------------------------------------------------------------------------------------


def test_an_edited_message_replaces_what_follows(page: Page, api: FakeApi) -> None:
    page.open()
    ask(page, "One")
    ask(page, "Two", 2)
    page.all(".edit")[0].click()
    page.driver.switch_to.active_element.send_keys(" of many", Keys.ESCAPE)
    assert [one.text for one in page.all(".message.user .text")] == ["One", "Two"]
    page.all(".edit")[0].click()
    page.driver.switch_to.active_element.send_keys(" of many", Keys.ENTER)
    page.wait(lambda: len(api.asked) == 3 and page.is_shown("#again"), "it is not sent")
    assert [one["content"] for one in api.asked[2]["messages"]] == ["One of many"]
    assert [one.text for one in page.all(".message.user .text")] == ["One of many"]
    page.one("#prompt").send_keys(Keys.ARROW_UP)
    assert page.driver.switch_to.active_element.get_attribute("value") == "One of many"


def test_nothing_is_edited_while_an_answer_arrives(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(hold_after=1)]
    page.open().say("Hello")
    page.wait(lambda: page.answers == ["Hello"], "the answer does not begin")
    assert not page.all(".edit")
    api.going_on.set()
    page.wait(lambda: page.all(".edit"), "it cannot be edited")


def test_who_has_answered_is_said_where_several_have(page: Page, api: FakeApi) -> None:
    page.open()
    ask(page, "One")
    assert "SmolLM2" not in page.text(".facts")
    Select(page.one("#model")).select_by_value(ADAPTER)
    ask(page, "Two", 2)
    texts = [one.text for one in page.all(".facts")]
    assert ["SmolLM2-135M-Instruct" in texts[0], "with me/sotu-adapter@v1" in texts[1]] == [True, True]


def test_who_reads_above_stays_there_and_finds_the_end(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(("line\n\n" * 100, "line\n\n" * 100), hold_after=1)]
    page.open().say("Hello")
    page.wait(lambda: len(page.all(".text p")) >= 100, "the answer does not begin")
    page.run("document.querySelector('#scroll').scrollTop = 5")
    page.wait(lambda: page.is_shown("#end"), "no way to the end")
    api.going_on.set()
    page.wait(lambda: page.is_shown("#again"), "no answer")
    assert page.run("return document.querySelector('#scroll').scrollTop") == 5
    page.click("#end")
    page.wait(lambda: not page.is_shown("#end"), "the end is not shown")


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_of_text_go_along(page: Page, api: FakeApi, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("Some `code`:\n```\nä\n```\n")
    (tmp_path / "extra.txt").write_text("more")
    page.open()
    page.one("#pick").send_keys(f"{tmp_path / 'notes.md'}\n{tmp_path / 'extra.txt'}")
    page.wait(lambda: len(page.all("#files .chip")) == 2, "no chips")
    page.click("#files .chip:last-child button")
    ask(page, "Summarize it")
    sent = "File notes.md:\n````\nSome `code`:\n```\nä\n```\n````\n\nSummarize it"
    assert api.asked[0]["messages"][0]["content"] == sent
    assert page.text(".message.user .chip") == "notes.md 24 B"
    assert page.text(".message.user .text") == "Summarize it"
    assert not page.is_shown("#files")
    page.click(".message.user .chip summary")
    assert "ä" in page.text(".message.user .chip pre")
    page.driver.refresh()
    page.wait_answer("Hello there.")
    page.all(".edit")[0].click()
    page.driver.switch_to.active_element.send_keys("!", Keys.ENTER)
    page.wait(lambda: len(api.asked) == 2 and page.is_shown("#again"), "it is not sent")
    assert api.asked[1]["messages"][0]["content"] == f"{sent}!"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"\x89PNG\r\n\x1a\n\x00\xff", "“file.txt” is not text in UTF-8", id="picture"),
        pytest.param(b"a\0b", "“file.txt” is not text in UTF-8", id="zeros"),
        pytest.param(b"x" * 131_073, "“file.txt” has 131 kB: a file may have 131 kB", id="long"),
    ],
)
def test_a_file_that_cannot_go_along_says_why(page: Page, tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "file.txt").write_bytes(content)
    page.open()
    page.one("#pick").send_keys(str(tmp_path / "file.txt"))
    page.wait_text("#said", why)
    assert not page.all("#files .chip")


def test_files_are_bounded_together(page: Page, tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("x" * 100)
        (tmp_path / f"long-{number}.txt").write_text("x" * 100_000)
    page.open()
    page.one("#pick").send_keys("\n".join(str(tmp_path / f"long-{number}.txt") for number in range(3)))
    page.wait_text("#said", "These files have 300 kB together")
    page.one("#pick").send_keys("\n".join(str(tmp_path / f"{number}.txt") for number in range(9)))
    page.wait_text("#said", "A message may have 8 files.")
    assert not page.all("#files .chip")


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("new ClipboardEvent('paste', {clipboardData: all, bubbles: true})", "#prompt"),
        ("new DragEvent('drop', {dataTransfer: all, bubbles: true})", "#scroll"),
    ],
    ids=["pasted", "dropped"],
)
def test_files_are_pasted_and_dropped(page: Page, kind: str, target: str) -> None:
    page.open()
    page.run(
        "const all = new DataTransfer(); all.items.add(new File(['text'], 'a.txt'));"
        f"document.querySelector(arguments[0]).dispatchEvent({kind})",
        target,
    )
    page.wait_text("#files .chip", "a.txt")

"""The view of the swarm, in Chromium, with states that the test makes up."""

from __future__ import annotations

import pytest
from fake_api import ADDRESS, PEERS, FakeApi, broken, healthy, server, state
from page_kit import Page
from selenium.webdriver.common.keys import Keys
from web_kit import served

pytestmark = pytest.mark.browser


def pasted(page: Page) -> str:
    """Returns what is in the clipboard, by pasting it."""
    page.run("const e = document.createElement('textarea'); e.id = 'pasted'; document.querySelector('main').append(e)")
    area = page.one("#pasted")
    area.send_keys(Keys.CONTROL, "v")
    text = area.get_attribute("value")
    page.run("arguments[0].remove()", area)
    assert text is not None
    return text


@pytest.mark.quick
def test_the_map_shows_who_holds_what(page: Page, api: FakeApi) -> None:
    page.open("swarm")
    page.wait_text(".model h2", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert page.text(".model > .head .pill") == "Every block has a server"
    assert page.text(".summary").startswith("3 servers online · 30 blocks")
    rows = page.all(".map .row")
    assert len(rows) == 5  # ticks, coverage, three servers
    places = [page.run("const s = arguments[0].style; return [s.left, s.width]", bar) for bar in page.all(".bar")]
    assert [tuple(float(one.rstrip("%")) for one in each) for each in places] == [
        (0, 50),
        (50, 50),
        (pytest.approx(100 / 3, abs=0.01), pytest.approx(100 / 3, abs=0.01)),
    ]
    assert page.text(".cover") == "\u00d71 \u00d72 \u00d71"
    card = page.text(f"#server-{PEERS[0]}")
    for fact in ("online", "0:15", "42 %", "46.6 k of 65.5 k free", "48.2 k tokens/s", "bfloat16", "0.1.0", "12.3 ms"):
        assert fact in card
    assert f"…{PEERS[1][-8:]} 3 ms" in card
    assert "me/sotu-adapter@v1" in page.text(f"#server-{PEERS[1]}")
    assert "bfloat16, int8" in page.text(f"#server-{PEERS[2]}")


def test_a_gap_appears_within_one_refresh_with_its_command(page: Page, api: FakeApi) -> None:
    page.open("swarm")
    page.wait_text(".model > .head .pill", "Every block has a server")
    page.run("window.still = true")
    asked = api.num_states
    api.state = broken()
    page.wait_text(".model > .head .pill", "15 of 30 blocks have no server")
    assert api.num_states <= asked + 2, "it took more than one refresh"
    assert page.run("return window.still"), "the page was loaded again"
    assert "Blocks 15:30: no server." in page.text(".gap")
    assert page.text(".run.gap") == "gap"
    liar, gone = (page.text(f"#server-{peer}") for peer in PEERS[1:])
    assert "quarantined" in liar
    assert "wrong forward of blocks 15:22" in liar
    assert "unreachable" in gone
    assert "connection refused" in gone
    assert "Left out for 12 s after 3 failures: the stream broke" in gone
    assert "15 of 30 blocks" in page.one("#announcer").get_attribute("textContent")
    page.click(".gap .copy")
    page.wait_text(".gap .copy", "Copied")
    assert pasted(page).endswith(f"--blocks 15:30 --initial-peers {ADDRESS}")
    api.state = healthy()
    page.wait(lambda: not page.is_shown(".gap"), "the gap stays")


def test_the_line_to_join_is_copied(page: Page, api: FakeApi) -> None:
    page.open("swarm")
    page.click(".join .copy")
    page.wait_text(".join .copy", "Copied")
    assert pasted(page) == healthy()["models"][0]["join"]


def test_a_browser_that_does_not_copy_says_so(page: Page, api: FakeApi) -> None:
    page.open("swarm")
    page.run("navigator.clipboard.writeText = () => Promise.reject(); document.execCommand = () => false")
    page.click(".join .copy")
    page.wait_text(".join .copy", "Not copied")


def test_what_is_focused_stays_focused_when_the_state_changes(page: Page, api: FakeApi) -> None:
    page.open("swarm", speed=10)
    page.wait(lambda: page.is_shown(".map a"), "there is no map")
    link = page.all(".map a")[1]
    page.run("arguments[0].focus()", link)
    api.state = broken()
    page.wait(lambda: page.is_shown(".gap"), "the state does not change")
    assert page.driver.switch_to.active_element == link
    link.send_keys(Keys.ENTER)
    page.wait(lambda: page.run("return document.activeElement.id") == f"server-{PEERS[1]}", "the card is not focused")


def test_a_server_of_an_answer_leads_to_its_card(page: Page, api: FakeApi) -> None:
    page.open().say("Hello")
    page.wait_answer("Hello there.")
    page.click(".facts a")
    page.wait(lambda: page.run("return document.activeElement.id") == f"server-{PEERS[0]}", "the card is not focused")
    assert page.driver.title == "Swarm"


def test_nothing_is_asked_while_the_tab_is_hidden(page: Page, api: FakeApi) -> None:
    page.open("swarm", speed=10)
    page.wait(lambda: api.num_states >= 2, "it is not asked again")
    hide = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => arguments[0]});"
    turn = f"{hide} document.dispatchEvent(new Event('visibilitychange'))"
    page.run(turn.replace("arguments[0]", "true"))
    # A request that was under way ends, and that of a timer that ran; they ask for no further one.
    page.run("return new Promise((done) => timer(done, 500))")
    hidden = api.num_states
    page.run("return new Promise((done) => timer(done, 700))")
    assert api.num_states == hidden
    page.run(turn.replace("arguments[0]", "false"))
    page.wait(lambda: api.num_states > hidden, "it is not asked when it is shown again")


def test_a_survey_that_fails_and_a_server_that_is_gone_are_said(page: Page, api: FakeApi) -> None:
    page.open("swarm", speed=10)
    page.wait_text("#freshness", "Live")
    api.state = {**healthy(), "error": "none of the initial peers can be reached"}
    page.wait_text("#trouble", "none of the initial peers can be reached. What you see is from")
    assert page.is_shown(".map"), "what was known is gone"
    api.state = healthy()
    page.wait_text("#freshness", "Live")
    assert not page.is_shown("#trouble")


def test_a_request_that_hangs_is_given_up(page: Page, api: FakeApi) -> None:
    page.open("swarm", speed=10)
    page.wait_text("#freshness", "Live")
    page.run("const timeout = AbortSignal.timeout; AbortSignal.timeout = (ms) => timeout.call(AbortSignal, ms / 100)")
    api.is_hanging = True
    page.wait_text("#trouble", "The server of this page does not answer.")
    api.is_hanging = False
    page.wait_text("#freshness", "Live")


def test_without_any_answer_there_is_only_the_reason(page: Page, api: FakeApi) -> None:
    api.state = {**state(error="no peer answers"), "surveyed_at": None}
    api.state_status = 503
    page.open("swarm")
    page.wait_text("#trouble", "no peer answers. ")
    assert not page.is_shown("#skeleton")


def test_an_empty_swarm_says_how_to_begin(page: Page, api: FakeApi) -> None:
    api.state = state()
    page.open("swarm")
    page.wait_text("#empty", f"swarm serve MODEL --initial-peers {ADDRESS}")


def test_names_of_strangers_are_never_html(page: Page, api: FakeApi) -> None:
    hostile = '<img src=x onerror="window.hacked=1">'
    found = healthy()
    found["models"][0]["model"] = hostile
    found["models"][0]["servers"][0] |= {"peer": hostile, "software": hostile, "adapters": [hostile], "reason": hostile}
    found["models"][0]["servers"][0]["is_reachable"] = False
    found["models"][0]["gaps"] = [{"blocks": [0, 1], "experts": None, "command": hostile}]
    api.state = found
    page.open("swarm")
    page.wait_text(".model h2", hostile)
    assert hostile in page.text(".cards")
    assert not page.all("#models img")
    assert page.run("return window.hacked") is None


def test_spans_in_motion_and_experts_are_drawn(page: Page, api: FakeApi) -> None:
    api.state = state(
        server(PEERS[0], 0, 30, needs=((0, 30, 0, 4),), target=(10, 30), leaving=(0, 5)),
        server(PEERS[1], 0, 30, experts=(0, 4)),
    )
    page.open("swarm")
    page.wait_text(f"#server-{PEERS[0]}", "0:5 → 0:30 → 10:30")
    assert len(page.all(".bar.ghost")) == len(page.all(".bar.coming")) == len(page.all(".bar.experts")) == 1
    assert "Holds experts 0:4 of 0:30" in page.text(f"#server-{PEERS[1]}")
    assert "Fetches experts 0:4 of blocks 0:30" in page.text(f"#server-{PEERS[0]}")


def test_without_a_chat_only_the_swarm_is_shown(page: Page, api: FakeApi) -> None:
    with served(api.app(chat=False, training=False)) as address:
        alone = Page(page.driver, address).open("talk")
        alone.wait_text(".model h2", "SmolLM2")
        assert not alone.is_shown("nav a, #composer")

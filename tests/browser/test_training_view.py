"""The view of training: runs with their curves, and who computes them."""

from __future__ import annotations

import pytest
from fake_api import PEERS, FakeApi, running
from page_kit import Page

pytestmark = pytest.mark.browser


def test_runs_and_their_curves_grow(page: Page, api: FakeApi) -> None:
    api.progress = {"runs": [], "num_open": 0}
    page.open("training", speed=10).wait_text("#no-runs", "No run is under way")
    api.progress = {"runs": [running(1, has_reward=False)], "num_open": 3}
    page.wait_text(".summary", "rank 16 · 1 step")
    page.wait_text("#training-freshness", "3 calls under way")
    assert [one.text for one in page.all(".plot .label")] == ["Loss of a token", "Tokens/s, training"]
    grown = running(40)
    grown["run"] = api.progress["runs"][0]["run"]
    api.progress = {"runs": [grown], "num_open": 0}
    page.wait_text(".summary", "40 steps")
    page.wait_text(".plots", "Reward of a text")
    drawn = page.run("return [...document.querySelectorAll('.line')].map((one) => one.points.numberOfItems)")
    assert drawn == [40, 40, 40]
    told = page.one(".plot svg").get_attribute("aria-label")
    assert told.startswith("Loss of a token: 3.07 at step 1, ")
    assert told.endswith("at step 40")


def test_who_holds_the_blocks_leads_to_the_swarm(page: Page, api: FakeApi) -> None:
    page.open("training").wait_text("#holders", "0:15 · 42 % busy")
    page.click(f"#holders a[href='#swarm={PEERS[0]}']")
    page.wait_text("#swarm-title", "Swarm")
    page.wait(lambda: page.is_shown(f"#server-{PEERS[0]}"), "the server is not shown")


def test_without_a_swarm_the_server_itself_computes(page: Page, api: FakeApi) -> None:
    api.state = None
    page.open("training").wait_text("#holders", "This server itself")

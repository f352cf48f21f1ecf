"""The view of the swarm in Chromium, with real servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_kit import Page
from selenium.webdriver import Chrome
from web_kit import served

from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.connection import connect
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.web.swarm_state import SwarmSource, watching_app

pytestmark = [pytest.mark.browser, pytest.mark.swarm]

NUM_STATES = "return performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/state')).length"


def test_a_killed_server_leaves_a_gap_within_one_refresh(driver: Chrome, tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny-llama")
    with LocalSwarm(model, spans=[(0, 2), (2, 4)], dtype="float32", kv_bytes="16MB") as swarm:
        first, second = swarm.servers
        with connect(first.addresses, SwarmConfig()) as connection:
            # As `swarm status --web` does it, without a third process that imports everything.
            with served(watching_app(SwarmSource(connection))) as address:
                page = Page(driver, address)
                page.reset()
                page.open("swarm").wait_text(".model > .head .pill", "Every block has a server")
                assert page.text("h2") == "tiny-llama"
                assert "Round trip" in page.text(f"#server-{second.peer_id}")
                second.kill()
                before = page.run(NUM_STATES)
                page.wait_text(".gap", "Blocks 2:4: no server.")
                # One that was under way, and the next.
                assert page.run(NUM_STATES) <= before + 2
                assert "unreachable" in page.text(f"#server-{second.peer_id}")
                assert f"--blocks 2:4 --initial-peers {first.addresses[0]}" in page.text(".gap code")
                assert page.faults() == []
            page.wait_text("#trouble", "The server of this page does not answer.")
            driver.get("about:blank")

"""The page in Chromium, with real servers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from page_kit import Page
from selenium.webdriver import Chrome

from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.testing.models import save_tiny

pytestmark = [pytest.mark.browser, pytest.mark.swarm, pytest.mark.xdist_group("browser")]

NUM_STATES = "return performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/state')).length"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def address_in(line: str) -> str:
    return next(word for word in line.split() if word.startswith("http")).rstrip("/")


def test_a_killed_server_leaves_a_gap_within_one_refresh(driver: Chrome, model: Path) -> None:
    with LocalSwarm(model, spans=[(0, 2), (2, 4)], dtype="float32", kv_bytes="16MB") as swarm:
        first, second = swarm.servers
        command = [sys.executable, "-m", "swarm_plugins", "status", "--web", "--initial-peers", first.addresses[0]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                page = Page(driver, address_in(process.stdout.readline()))
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
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=60) == 130
                page.wait_text("#trouble", "The server of this page does not answer.")
                driver.get("about:blank")
            finally:
                process.kill()

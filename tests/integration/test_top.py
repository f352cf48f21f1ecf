"""`swarm top` in a terminal, on real servers."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from swarm_plugins import LocalSwarm
from swarm_plugins.testing.models import save_tiny

SCREEN_S = 120.0


class Terminal:
    """A program in a terminal of 120 x 40."""

    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self.process = process
        self._screen = screen
        self.text = ""

    def wait_for(self, words: str) -> None:
        """Reads what is drawn until it has some words."""
        deadline = time.monotonic() + SCREEN_S
        while words not in self.text:
            assert time.monotonic() < deadline, self.text[-4000:]
            if select.select([self._screen], [], [], 1.0)[0]:
                self.text += os.read(self._screen, 65536).decode(errors="replace")

    def press(self, key: str) -> None:
        os.write(self._screen, key.encode())

    def ended(self) -> int:
        """Returns the exit code; reads meanwhile what is still drawn."""
        deadline = time.monotonic() + SCREEN_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self._screen], [], [], 0.1)[0]:
                self.text += os.read(self._screen, 65536).decode(errors="replace")
        return self.process.wait(1.0)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    screen, inside = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
    command = [sys.executable, "-m", "swarm_plugins", "top", "--interval", "0.5", *arguments]
    process = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env=environment, start_new_session=True
    )
    try:
        yield Terminal(process, screen)
    finally:
        process.kill()
        process.wait()
        os.close(inside)
        os.close(screen)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    model = save_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")
    with LocalSwarm(model, num_servers=2) as running:
        yield running


@pytest.mark.swarm
def test_it_is_live_until_ctrl_c(swarm: LocalSwarm) -> None:
    with terminal("--initial-peers", swarm.initial_peers[0]) as top:
        top.wait_for("coverage: 0:4 x1")
        top.wait_for("q ends it")
        swarm.servers[1].kill()
        top.wait_for("missing blocks: 2:4")
        top.process.send_signal(signal.SIGINT)
        assert top.ended() == 130
        assert "Traceback" not in top.text
        assert "\x1b[?1049l" in top.text, "the screen is as it was before"


@pytest.mark.swarm
def test_q_ends_it(swarm: LocalSwarm) -> None:
    with terminal("--initial-peers", swarm.initial_peers[0]) as top:
        top.wait_for("q ends it")
        top.press("xq")
        assert top.ended() == 0
        assert "Traceback" not in top.text


@pytest.mark.swarm
def test_a_swarm_that_does_not_answer_is_one_sentence() -> None:
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWApEShz4n5KuL88TVJAAbyU4udP5iyNqB8iocfren7Wnb"
    with terminal("--initial-peers", nobody) as top:
        top.wait_for("swarm top: ")
        assert top.ended() == 1
        assert "Traceback" not in top.text

"""The page "Train together", followed word for word: a server, and two peers that improve one adapter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing.models import save_tiny

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/how-to/train-together.md"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADDRESS = re.compile(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+")


class Terminal:
    """Runs lines of a console in a shell; what they write is in a file."""

    def __init__(self, lines: str, log: Path, environment: dict[str, str]) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                # exec: a signal to the shell reaches the command.
                ["bash", "-ec", re.sub(r"^(swarm )", r"exec \1", lines, flags=re.MULTILINE)],
                cwd=log.parent,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    def shows(self, pattern: str, *, wait_s: float = 200.0) -> str:
        until = time.monotonic() + wait_s
        while (found := re.search(pattern, self.text)) is None:
            assert self._process.poll() is None, self.text[-3000:]
            assert time.monotonic() < until, self.text[-3000:]
            time.sleep(0.1)
        return found.group()

    def ended(self) -> int:
        return self._process.wait(timeout=300)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.mark.slow
@pytest.mark.swarm
@pytest.mark.timeout(600)
def test_two_terminals_can_follow_the_page(tmp_path: Path) -> None:
    serve, *peers = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[:3]
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    terminals: list[Terminal] = []
    with LocalHub() as hub:
        # A tiny model by the name, and with the number of blocks, of the page's.
        hub.add(MODEL, save_tiny("llama", tmp_path / "model", num_layers=30))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SWARM_"))} | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

        def open_terminal(lines: str) -> Terminal:
            terminals.append(Terminal(lines, tmp_path / f"{len(terminals)}.log", environment))
            return terminals[-1]

        try:
            address = open_terminal(serve).shows(ADDRESS.pattern)
            for lines in peers:
                assert "/p2p/12D3Koo..." in lines
            first, second = [open_terminal(re.sub(r"/ip4/\S+", address, lines)) for lines in peers]
            for peer in (first, second):
                assert peer.ended() == 0, peer.text[-3000:]
                # Not the number of peers, which the one that ends later no longer sees: a round has the work of both.
                assert float(re.findall(r"run/samples ([\d.]+)", peer.text)[-1]) > 100 * 4, peer.text[-3000:]
        finally:
            for terminal in reversed(terminals):
                terminal.close()
    kept = [load_file(tmp_path / "runs" / name / "adapter_model.safetensors") for name in ("first", "second")]
    assert sorted(kept[0]) == sorted(kept[1])
    # B is zero before the first round.
    assert all(one.any() for adapter in kept for name, one in adapter.items() if "lora_B" in name)

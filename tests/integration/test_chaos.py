"""Generation, prefill, training and adapter uploads go on, unchanged, while servers fail on a schedule.

`make chaos` runs this for ten minutes; the seed is printed, and ``CHAOS_SEED`` repeats it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chaos_kit import storm
from session_check import bytes_left, sessions_left

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm
from swarm_plugins.client import SwarmConfig, connect
from swarm_plugins.testing import InProcessSwarm, Nemesis, save_tiny, tiny_model

SECONDS = float(os.environ.get("CHAOS_SECONDS", "15"))
SEED = int(os.environ["CHAOS_SEED"]) if "CHAOS_SEED" in os.environ else None
CONFIG = SwarmConfig(refresh_s=1.0, info_timeout_s=2.0, request_timeout_s=10.0, verify="on")
SPANS = [(0, 2), (0, 2), (2, 4), (2, 4)]
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A model, and one of the same shape with other weights."""
    other = tmp_path / "other"
    tiny_model(request.param, seed=5).save_pretrained(other)
    return save_tiny(request.param, tmp_path / "model"), other


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


both_kinds = pytest.mark.parametrize("models", ["llama", "mixtral"], indirect=True)


def server_memory(swarm: LocalSwarm) -> list[int]:
    return [psutil.Process(server.pid).memory_info().rss for server in swarm.servers]


@both_kinds
def test_faults_in_process(models: tuple[Path, Path]) -> None:
    directory, other = models
    files = psutil.Process().num_fds()
    with InProcessSwarm(directory, spans=SPANS, config=CONFIG) as swarm:
        nemesis = Nemesis(swarm, seed=SEED, duration_s=SECONDS, other_model=other)
        sys.stdout.write(f"{nemesis}\n")
        done = storm(
            directory,
            lambda: AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection),
            nemesis,
        )
        sys.stdout.write(f"{done}\n")
        assert nemesis.num_struck == len(nemesis.schedule)
        assert sessions_left(swarm) == 0
        assert bytes_left(swarm) == 0
    assert swarm.transport.num_live_channels == 0
    assert psutil.Process().num_fds() <= files + 2


@pytest.mark.swarm
@both_kinds
def test_faults_of_processes(models: tuple[Path, Path], temporary: Path) -> None:
    directory, other = models
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    files = psutil.Process().num_fds()
    with LocalSwarm(directory, spans=SPANS[::2], replicas=2) as swarm:
        nemesis = Nemesis(swarm, seed=SEED, duration_s=SECONDS, other_model=other, length_s=(0.5, 6.0))
        sys.stdout.write(f"{nemesis}\n")
        peers = swarm.initial_peers
        done = storm(
            directory,
            lambda: AutoSwarmModelForCausalLM.from_pretrained(directory, initial_peers=peers, swarm=CONFIG),
            nemesis,
        )
        sys.stdout.write(f"{done}\nserver memory: {[f'{rss / 1e6:.0f} MB' for rss in server_memory(swarm)]}\n")
        assert nemesis.num_struck == len(nemesis.schedule)
        connect(peers, CONFIG).close()
    left = {process.pid for process in psutil.Process().children(recursive=True)} - before
    assert not left
    assert psutil.Process().num_fds() <= files + 2
    # A killed process cannot remove its socket; the next one does, a minute later.
    kills = sum(fault.kind in ("kill", "other_version") for fault in nemesis.schedule)
    assert len([path for path in temporary.rglob("*") if path.is_socket()]) <= 2 * kills

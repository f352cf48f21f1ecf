"""Generation, prefill, training and adapter uploads go on, unchanged, while servers fail on a schedule.

`make chaos` runs this for ten minutes; the seed is printed, and ``CHAOS_SEED`` repeats it.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from chaos_kit import storm
from session_check import sessions_left

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.client import SwarmConfig
from swarm_plugins.testing import InProcessSwarm, Nemesis, save_tiny, tiny_model

SECONDS = float(os.environ.get("CHAOS_SECONDS", "5"))
SEED = int(os.environ["CHAOS_SEED"]) if "CHAOS_SEED" in os.environ else None
CONFIG = SwarmConfig(refresh_s=1.0, info_timeout_s=1.0, request_timeout_s=10.0, verify="auto")
SPANS = [(0, 2), (0, 2), (2, 4), (2, 4)]
PROCESSES_S = 2 * SECONDS
GROWTH_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A model, and one of the same shape with other weights."""
    other = tmp_path / "other"
    tiny_model(request.param, seed=5).save_pretrained(other)
    return save_tiny(request.param, tmp_path / "model"), other


both_kinds = pytest.mark.parametrize("models", ["llama", "mixtral"], indirect=True)


@both_kinds
def test_faults_in_process(models: tuple[Path, Path]) -> None:
    directory, other = models
    files = psutil.Process().num_fds()
    with InProcessSwarm(directory, spans=SPANS, config=CONFIG) as swarm:
        nemesis = Nemesis(swarm, seed=SEED, duration_s=SECONDS, other_model=other)
        print(nemesis)
        done = storm(
            directory,
            lambda: AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection),
            nemesis,
        )
        print(done)
        assert nemesis.num_struck == len(nemesis.schedule)
        assert sessions_left(swarm) == 0
        for service in swarm.services.values():
            assert service.ledger.held("local-client") == 0
    assert swarm.transport.num_live_channels == 0
    assert psutil.Process().num_fds() <= files + 2

"""Each family once per session: its directory, the local model, and the same model over a swarm in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from offload_models import Toys, save_toy
from session_check import CLOSE_S, sessions_left
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

pytest.register_assert_rewrite("adapter_cases")  # says by how much gradients differ

FAMILIES = (
    "llama",
    "mixtral",
    "mixtral_sliding",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v3",
    "gpt_oss",
)


# As blocks of a server on a CPU: their gradients have these bits.
EXPERTS: dict[str, Any] = {"experts_implementation": "swarm_table"}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One family's toy: locally, and with its blocks on a swarm."""

    family: str
    directory: Path
    local: PreTrainedModel
    """The untouched model of transformers, float32, in evaluation mode."""
    remote: PreTrainedModel
    swarm: InProcessSwarm

    def load_remote(self, **kwargs: object) -> PreTrainedModel:
        """Loads the remote model once more, for a test that changes it."""
        return AutoSwarmModelForCausalLM.from_pretrained(self.directory, connection=self.swarm.connection, **kwargs)

    def load_local(self, **kwargs: object) -> PreTrainedModel:
        """Loads the local model once more, for a test that changes it."""
        return AutoModelForCausalLM.from_pretrained(self.directory, **{**EXPERTS, **kwargs}).eval()


@pytest.fixture(scope="session", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair of each family; ``parametrize("pair", [...], indirect=True)`` takes fewer."""
    directory = save_tiny(request.param, tmp_path_factory.mktemp(request.param))
    local = AutoModelForCausalLM.from_pretrained(directory, **EXPERTS).eval()
    with InProcessSwarm(directory) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        yield Pair(family=request.param, directory=directory, local=local, remote=remote, swarm=swarm)


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """Returns the directory of a family's toy with experts, which is written once and only read."""
    root = tmp_path_factory.mktemp("toys")

    def directory(family: str, *, is_fused: bool = False) -> Path:
        path = root / f"{family}-{is_fused}"
        if not path.exists():
            save_toy(family, path, is_fused=is_fused)
        return path

    return directory


@pytest.fixture
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The smallest family with a swarm of its own, for tests that break things."""
    directory = save_tiny("llama", tmp_path_factory.mktemp("llama"))
    local = AutoModelForCausalLM.from_pretrained(directory, **EXPERTS).eval()
    with InProcessSwarm(directory) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        yield Pair(family="llama", directory=directory, local=local, remote=remote, swarm=swarm)


@pytest.fixture(autouse=True)
def _leaves_no_sessions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sessions are closed when their cache is collected."""
    swarms = [request.getfixturevalue(name).swarm for name in ("pair", "llama") if name in request.fixturenames]
    yield
    for swarm in swarms:
        left = sessions_left(swarm)
        assert left == 0, f"{left} sessions are still open {CLOSE_S:g} s after the test"

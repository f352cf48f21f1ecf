"""Blocks that only run together are recomputed and opened together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch
from lies_kit import HONEST, IDS, finish_checks, verifier_of
from type_models import save_type

from kits.liars import Liar, Lie, LyingSwarm
from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig
from swarm_plugins.errors import ProtocolError
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.verification import Quarantine
from swarm_plugins.verification.evidence import read_evidence
from swarm_plugins.verification.local_blocks import LocalBlocks
from swarm_plugins.verification.replay import replay

WHOLE = SwarmConfig(verify="on")
OPENED = SwarmConfig(verify="on", verify_bytes=1)
"""No two blocks fit in memory."""


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose blocks 1 and 2 use what block 0 has chosen; block 3 runs apart."""
    return save_type("glm_moe_dsa", tmp_path_factory.mktemp("glm"))


def gradient(swarm: InProcessSwarm, directory: Path) -> torch.Tensor:
    model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
    model(input_ids=IDS, labels=IDS).loss.backward()
    found = model.get_input_embeddings().weight.grad
    assert found is not None
    return found


@pytest.mark.parametrize("config", [WHOLE, OPENED], ids=["whole", "opened"])
def test_honest_servers_pass(tied: Path, cache: Path, config: SwarmConfig) -> None:
    with InProcessSwarm(tied, spans=[(0, 4)], config=config) as swarm:
        model = AutoSwarmModelForCausalLM.from_pretrained(tied, connection=swarm.connection)
        model(input_ids=IDS, labels=IDS).loss.backward()
        model.generate(IDS, max_new_tokens=4, do_sample=False)
        finish_checks(model)
        assert set(verifier_of(model).checker.checked) == set(swarm.peers)
    assert not Quarantine(cache / "quarantine").peers()


@pytest.mark.parametrize("config", [WHOLE, OPENED], ids=["whole", "opened"])
@pytest.mark.parametrize("lie", ["scaled", "flipped_gradients"])
def test_liars_are_caught(tied: Path, cache: Path, config: SwarmConfig, lie: Lie) -> None:
    with InProcessSwarm(tied, spans=[(0, 4)], config=HONEST) as swarm:
        expected = gradient(swarm, tied)
    with LyingSwarm(tied, spans=[(0, 4), (0, 4)], config=config, liars={0: Liar(lie)}) as swarm:
        assert torch.allclose(gradient(swarm, tied), expected, atol=1e-6)  # a checked answer is waited for
        ((peer, caught),) = Quarantine(cache / "quarantine").peers().items()
        assert peer == swarm.peers[0]
    found = read_evidence(Path(caught.evidence))
    blocks = LocalBlocks(lambda: Checkpoint.open(tied), limit_bytes=0)
    assert any(verdict.is_wrong for verdict in asyncio.run(replay(found, blocks)))
    if found.opening is not None:
        # Who makes evidence does not say which states lie between blocks that run apart.
        changed = msgspec.structs.replace(found.opening, tied=(1,))
        with pytest.raises(ProtocolError):
            asyncio.run(replay(msgspec.structs.replace(found, opening=changed), blocks))

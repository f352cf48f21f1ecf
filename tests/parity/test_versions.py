"""A server of blocks that the next version of a model has too serves users of both versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lies_kit import finish_checks, verifier_of
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, SwarmConfig
from swarm_plugins.book import judging
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.unchanged import unchanged_blocks
from swarm_plugins.errors import MissingBlocksError
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

PROMPT = torch.randint(3, 100, (1, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The next version: blocks 2 and 3, the norm and the head are trained further."""
    model, folder = AutoModelForCausalLM.from_pretrained(old), tmp_path_factory.mktemp("new")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.0." not in name and "layers.1." not in name and "embed" not in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=["off", "on"], ids=["plain", "verified"])
def swarm(request: pytest.FixtureRequest, old: Path, new: Path) -> Iterator[InProcessSwarm]:
    """Servers of the old version's 0:3 and 2:4, and one of the new version's 2:4."""
    # Without memory for two blocks, servers open the states in between: that also names the version.
    config = SwarmConfig(micro_batches=1, verify=request.param, verify_bytes=0)
    with InProcessSwarm(old, spans=[(0, 3), (2, 4), (2, 4)], config=config) as running:
        running.kill(running.peers[2])
        running.restart(running.peers[2], directory=new)
        one, other = Checkpoint.open(old), Checkpoint.open(new)
        running.services[running.peers[0]].unchanged = {other.version.key: unchanged_blocks(one, other, range(3))}
        yield running


def loaded(folder: Path, swarm: InProcessSwarm) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Returns the model with remote blocks, and the local one."""
    remote = AutoSwarmModelForCausalLM.from_pretrained(folder, connection=swarm.connection)
    if swarm.config.verify == "on":
        verifier_of(remote).checker.chance = lambda: 0.0
    return remote, AutoModelForCausalLM.from_pretrained(folder).eval()


def check_servers(model: PreTrainedModel, swarm: InProcessSwarm, used: set[str]) -> None:
    """Checks that every answer was found right, if answers are checked at all, and that no other server was used."""
    assert not judging.bans(swarm.connection.peers.book)
    if swarm.config.verify == "on":
        finish_checks(model)
        assert set(verifier_of(model).checker.checked) == used


def tokens(model: PreTrainedModel, number: int = 8) -> Tensor:
    return model.generate(PROMPT, max_new_tokens=number, do_sample=False)


def test_users_of_both_versions_get_their_versions_tokens(swarm: InProcessSwarm, old: Path, new: Path) -> None:
    found, number = [], 8 if swarm.config.verify == "off" else 2
    for folder in (new, old, new):
        remote, local = loaded(folder, swarm)
        found.append(tokens(remote, number))
        assert torch.equal(found[-1], tokens(local, number))
        check_servers(remote, swarm, {swarm.peers[0], swarm.peers[1 if folder == old else 2]})
    # Else the versions could be mixed up without a trace.
    assert not torch.equal(found[0], found[1])


def test_gradients_are_those_of_the_new_version(swarm: InProcessSwarm, new: Path) -> None:
    grads, (remote, local) = [], loaded(new, swarm)
    for model in (remote, local):
        torch.manual_seed(0)
        tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        tuned(input_ids=PROMPT, labels=PROMPT).loss.backward()
        grads.append([one.grad for one in tuned.parameters() if one.requires_grad])
    for there, here in zip(*grads, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-6)
    check_servers(remote, swarm, {swarm.peers[0], swarm.peers[2]})


def test_a_block_that_has_changed_is_served_by_nobody_else(swarm: InProcessSwarm, new: Path) -> None:
    swarm.kill(swarm.peers[2])
    with pytest.raises(MissingBlocksError, match=r"no living server holds blocks 2:4 of new"):
        loaded(new, swarm)

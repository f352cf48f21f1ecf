"""`swarm serve --offload`: servers whose experts stay on disk answer as others do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from programs import Programs
from tuning_kit import assert_trained_alike

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, SwarmConfig
from swarm_plugins.client import connect
from swarm_plugins.testing.models import save_tiny, tiny_model


@pytest.mark.swarm
def test_generation_and_a_training_step_are_those_of_the_local_model(tiny_mixtral: Path) -> None:
    local = tiny_model("mixtral").eval()
    ids = torch.arange(5, 15)[None]
    # Four of the eight experts of a span.
    options = {"offload": "fast=74KB,prefetch=on", "kv_bytes": "16MB"}
    with (
        LocalSwarm(tiny_mixtral, num_servers=2, **options) as swarm,
        connect(swarm.initial_peers, SwarmConfig()) as connection,
    ):
        remote = AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=connection)
        arguments = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(remote.generate(ids, **arguments), local.generate(ids, **arguments))
        assert_trained_alike(remote, local, ids, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", "--offload fast=1MB", "has no experts"),
        # The blocks are named, and the budget does not hold one expert of them.
        ("mixtral", "--blocks 1:4 --offload fast=1KB", "--offload fast is 1000, but at least 55296 bytes are needed"),
        ("mixtral", "--offload quick=1GB", "expected NAME=VALUE with a name out of fast, ram"),
    ],
)
def test_wrong_uses_end_in_one_sentence(
    family: str, options: str, message: str, tmp_path: Path, programs: Programs
) -> None:
    command = [sys.executable, "-m", "swarm_plugins", "serve", str(save_tiny(family, tmp_path / family))]
    ended = programs.run([*command, *options.split()], timeout=120)
    assert ended.returncode != 0
    assert message in ended.stderr.replace("\n", " ")
    assert "Traceback" not in ended.stderr

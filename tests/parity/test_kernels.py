"""Servers with every kernel of float32: the same tokens as transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from swarm_plugins.backbone.auto import AutoSwarmModelForCausalLM
from swarm_plugins.blocks.load import load_span
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.testing.models import save_tiny, tiny_model
from swarm_plugins.weights.choice import candidates
from swarm_plugins.weights.formats.plain import PlainFormat

KERNELS = [name for name in candidates(PlainFormat((64, 64), torch.float32)) if name != "plain"]
# Fused blocks, blocks that run as they are with biases, and fused experts.
FAMILIES = ("llama", "gpt_oss", "mixtral")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
@torch.no_grad()
def test_a_float32_server_says_what_transformers_says(
    family: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tiny(family, tmp_path / family)
    monkeypatch.setattr("swarm_plugins.testing.in_process.load_span", partial(load_span, kernel=kernel))
    local = tiny_model(family).eval()
    prompts = torch.arange(10).view(2, 5) + 3
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    with InProcessSwarm(directory) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        for rows in (prompts[:1], prompts):
            assert remote.generate(rows, **options).tolist() == local.generate(rows, **options).tolist()

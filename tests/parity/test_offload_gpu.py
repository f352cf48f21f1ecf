"""Experts in pinned RAM and on disk, computed with on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offload_models import save_toy, tokens

from swarm_plugins.offload import OffloadConfig, load_offloaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXPERT_BYTES = 18_432  # of the toy


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixtral")
    save_toy("mixtral", directory)
    return directory


def load(directory: Path, **config: Any) -> Any:
    return load_offloaded(directory, OffloadConfig(**config), device="cuda")


def generate(model: Any) -> torch.Tensor:
    return model.generate(tokens(2).cuda(), max_new_tokens=16, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize("ram", [0, 4, 18])
@pytest.mark.parametrize("fast", [4, 9])
@torch.no_grad()
def test_every_budget_computes_the_same_bits(directory: Path, fast: int, ram: int) -> None:
    everything = load(directory, fast_bytes=18 * EXPERT_BYTES)
    bounded = load(directory, fast_bytes=fast * EXPERT_BYTES, ram_bytes=ram * EXPERT_BYTES, prefetch=True)
    for seed in range(5):
        ids = tokens(2, seed=seed).cuda()
        assert torch.equal(bounded(ids).logits, everything(ids).logits)
    assert torch.equal(generate(bounded), generate(everything))


@torch.no_grad()
def test_what_is_in_ram_is_not_read_again(directory: Path) -> None:
    model = load(directory, fast_bytes=4 * EXPERT_BYTES, ram_bytes=18 * EXPERT_BYTES)
    for seed in range(10):
        model(tokens(2, seed=seed).cuda())
    stats = model.offload_stats()
    assert stats.bytes_read <= 18 * EXPERT_BYTES
    assert stats.misses > 18


def test_gradients_flow_through_experts_that_come_and_go(directory: Path) -> None:
    gradients = []
    for fast in (4, 18):
        model = load(directory, fast_bytes=fast * EXPERT_BYTES, ram_bytes=6 * EXPERT_BYTES)
        states = model.get_input_embeddings()(tokens(2).cuda()).detach().requires_grad_()
        model(inputs_embeds=states).logits.square().mean().backward()
        gradients.append(states.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@torch.no_grad()
def test_converted_experts_are_converted_on_the_device(directory: Path) -> None:
    model = load(directory, fast_bytes=18 * EXPERT_BYTES, ram_bytes=6 * EXPERT_BYTES, expert_bits=8)
    exact = load(directory, fast_bytes=18 * EXPERT_BYTES)
    ids = tokens(2).cuda()
    # 8 bits a weight, three layers.
    torch.testing.assert_close(model(ids).logits, exact(ids).logits, atol=0.1, rtol=0.1)

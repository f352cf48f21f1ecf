"""Routers from hidden states."""

from __future__ import annotations

import pytest
import torch

from swarm_plugins.demo.clusters import load_entropy, router_of, uses


def states(num_states: int = 600, width: int = 16) -> torch.Tensor:
    """Three groups of very different sizes around a large common mean, as hidden states are."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(3, width, generator=generator) * 2
    group = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), num_states, replacement=True, generator=generator)
    return centres[group] + 5 + torch.randn(num_states, width, generator=generator)


@pytest.mark.parametrize("num_experts", [4, 8])
def test_experts_are_used_about_equally(num_experts: int) -> None:
    found = states()
    router = router_of(found, num_experts, top_k=2, generator=torch.Generator().manual_seed(0))
    used = uses(found, router, 2)
    assert used.sum(1).unique().tolist() == [2.0]
    # A random router does about .9 on these; one expert for all would be 0.
    assert load_entropy(used) > 0.98


def test_similar_states_go_to_the_same_experts() -> None:
    found = states()
    router = router_of(found, 4, top_k=2, generator=torch.Generator().manual_seed(0))
    moved = found + 0.02 * torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    same = (uses(found, router, 2) * uses(moved, router, 2)).sum(1).mean()
    assert same > 1.9


def test_the_same_seed_gives_the_same_router() -> None:
    one, same, other = (
        router_of(states(), 4, top_k=2, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_entropy_is_one_for_equal_use_and_zero_for_one_expert() -> None:
    assert load_entropy(torch.ones(5, 4)) == pytest.approx(1)
    assert load_entropy(torch.eye(4)[[0, 0, 0]]) == pytest.approx(0, abs=1e-6)

"""The load-balancing loss of one layer, against sums by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.moe.losses import load_balancing_loss


def by_hand(logits: list[list[float]], picks: int, counts: list[bool]) -> float:
    num_experts = len(logits[0])
    chosen, probable, total = [0.0] * num_experts, [0.0] * num_experts, 0
    for row, is_counted in zip(logits, counts, strict=True):
        if not is_counted:
            continue
        total += 1
        norm = sum(map(math.exp, row))
        for expert in range(num_experts):
            probable[expert] += math.exp(row[expert]) / norm
        for expert in sorted(range(num_experts), key=lambda one: -row[one])[:picks]:
            chosen[expert] += 1 / picks
    if not total:
        return 0.0
    return num_experts * sum(a / total * b / total for a, b in zip(chosen, probable, strict=True))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 4), st.integers(1, 5), st.integers(1, 7), st.data())
def test_it_is_the_sum_by_hand(seed: int, rows: int, length: int, num_experts: int, data: st.DataObject) -> None:
    picks = data.draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows * length, num_experts, generator=generator) * 2
    mask = torch.rand(rows, length, generator=generator) < 0.7
    everything = [True] * (rows * length)
    assert float(load_balancing_loss(logits, picks)) == pytest.approx(
        by_hand(logits.tolist(), picks, everything), rel=1e-4
    )
    assert float(load_balancing_loss(logits, picks, mask.long())) == pytest.approx(
        by_hand(logits.tolist(), picks, mask.flatten().tolist()), rel=1e-4
    )


def test_its_gradient_moves_load_away_from_the_crowded_expert() -> None:
    logits = torch.zeros(16, 4)
    logits[:, 1] = 1.0
    logits.requires_grad_()
    load_balancing_loss(logits, 1).backward()
    assert logits.grad is not None
    assert (logits.grad[:, 1] > 0).all()
    assert (logits.grad[:, [0, 2, 3]] < 0).all()


@pytest.mark.parametrize("has_mask", [False, True])
def test_the_loss_does_not_depend_on_the_default_type(has_mask: bool, default_bfloat16: None) -> None:
    logits = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    mask = torch.ones(4, 500, dtype=torch.int64) if has_mask else None
    found = load_balancing_loss(logits, 2, mask)
    torch.set_default_dtype(torch.float32)
    assert found == load_balancing_loss(logits, 2, mask)

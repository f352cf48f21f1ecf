"""Gating against brute force: which experts, which weights, who gets a seat."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.errors import NumericError
from swarm_plugins.moe.gating import capacity, top_k_gate, within_capacity

SEEDS = st.integers(0, 2**31 - 1)


def logits_of(seed: int, num_tokens: int, num_experts: int) -> torch.Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(0, 9), st.integers(1, 7), st.data())
def test_the_most_probable_experts_are_chosen(
    seed: int, num_tokens: int, num_experts: int, data: st.DataObject
) -> None:
    picks = data.draw(st.integers(1, num_experts))
    logits = logits_of(seed, num_tokens, num_experts)
    weights, index = top_k_gate(logits, picks)
    assert weights.shape == index.shape == (num_tokens, picks)
    for row, chosen, given_weights in zip(logits.double().tolist(), index.tolist(), weights.tolist(), strict=True):
        assert sorted(chosen, key=lambda expert: -row[expert]) == chosen
        assert {*chosen} == {*sorted(range(num_experts), key=lambda expert: -row[expert])[:picks]}
        total = sum(map(math.exp, row)) if picks == 1 else sum(math.exp(row[expert]) for expert in chosen)
        assert given_weights == pytest.approx([math.exp(row[expert]) / total for expert in chosen], rel=1e-5)


def test_a_single_weight_is_a_probability_and_has_a_gradient() -> None:
    logits = logits_of(0, 5, 4).requires_grad_()
    weights, _ = top_k_gate(logits, 1)
    assert weights.max() < 1
    weights.sum().backward()
    assert logits.grad is not None
    assert logits.grad.norm() > 0.01


def seats_by_hand(index: list[list[int]], num_experts: int, room: int) -> list[list[bool]]:
    """First choices before second ones, then by position."""
    taken = [0] * num_experts
    kept = [[False] * len(row) for row in index]
    for choice in range(len(index[0]) if index else 0):
        for token, row in enumerate(index):
            kept[token][choice] = taken[row[choice]] < room
            taken[row[choice]] += 1
    return kept


def test_a_factor_counts_as_it_is_written() -> None:
    # 50 * 1.1 is 55.00000000000001 in binary.
    assert capacity(200, 4, 1, 1.1) == 55
    assert capacity(201, 4, 1, 1.1) == 56
    assert capacity(5, 4, 1, 2.0, least=4) == 4


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(0, 12), st.integers(1, 6), st.floats(0.05, 4.0), st.data())
def test_seats_go_by_choice_and_position(
    seed: int, num_tokens: int, num_experts: int, factor: float, data: st.DataObject
) -> None:
    picks = data.draw(st.integers(1, min(3, num_experts)))
    index = logits_of(seed, num_tokens, num_experts).topk(picks).indices
    room = math.ceil(num_tokens * picks * Fraction(str(factor)) / num_experts)
    assert capacity(num_tokens, num_experts, picks, factor) == room
    kept = within_capacity(index, num_experts, factor)
    assert kept.shape == index.shape
    assert kept.tolist() == seats_by_hand(index.tolist(), num_experts, room)
    for expert in range(num_experts):
        wanted = int((index == expert).sum())
        assert int((kept & (index == expert)).sum()) == min(wanted, room)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(0, 12), st.integers(1, 6), st.integers(0, 5))
def test_seats_by_lot_are_as_many_and_no_fewer_than_the_least(
    seed: int, num_tokens: int, num_experts: int, least: int
) -> None:
    index = logits_of(seed, num_tokens, num_experts).topk(1).indices
    room = max(least, math.ceil(num_tokens / num_experts * 0.5))
    for is_random in (False, True):
        kept = within_capacity(index, num_experts, 0.5, least=least, is_random=is_random)
        for expert in range(num_experts):
            wanted = int((index == expert).sum())
            assert int((kept & (index == expert)).sum()) == min(wanted, room)


def test_by_lot_the_end_of_a_batch_gets_seats_too() -> None:
    index = torch.zeros(64, 1, dtype=torch.long)
    torch.manual_seed(0)
    first, second = (within_capacity(index, 2, 0.5, is_random=True) for _ in range(2))
    assert not first.equal(second)
    assert first[16:].any()
    assert within_capacity(index, 2, 0.5)[:16].all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_named(bad: float) -> None:
    logits = logits_of(0, 5, 4)
    logits[1, 2] = logits[3, 0] = bad
    with pytest.raises(
        NumericError, match="router logits of 2 of 5 tokens are NaN or infinite: lower the learning rate"
    ):
        top_k_gate(logits, 1)


def test_an_excluded_expert_is_no_error() -> None:
    logits = logits_of(0, 5, 4)
    logits[:, 1] = -math.inf
    assert not (top_k_gate(logits, 2)[1] == 1).any()

"""Expert parallelism on several gloo processes against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_checks import (
    equal_to_one_process,
    largest_gradient,
    messages,
    optimizer_steps,
    same_bits,
    with_capacity,
)
from parallel_kit import run_ranks

# The ranks are forked from one process that has imported everything.

ANY_WORLD = [
    {"ep_size": "auto"},
    {"family": "qwen3_moe", "ep_size": [1, 2]},
    {"family": "olmoe", "ep_size": 2, "ep_implementation": "all_to_all"},
    {"ep_size": 2, "ep_implementation": "hierarchical_all_to_all", "ranks_per_node": 2},
    {"ep_size": 1, "expert_slices": 2},
    {"family": "qwen3_moe", "tp": 2, "ep_size": 2, "ep_implementation": "coordinated_all_to_all"},
    {"family": "qwen3_moe", "tp": 2, "frozen_first": True},
    {"family": "olmoe", "tp": 2, "ep_size": 1, "expert_slices": 2},
    {"tp": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
    {"family": "prmoe"},
    {"family": "prmoe", "tp": 2, "ep_size": [1, 2]},
    {"family": "prmoe-tied", "tp": 2, "ep_size": [1, 2]},
    {"family": "prmoe-gpt", "ep_size": 1, "expert_slices": 2},
    {"family": "prmoe-bias", "ep_size": 1, "expert_slices": 2},
]
FOUR = [
    {"family": "olmoe", "ep_size": {0: 4, 1: 2}},
    {"ep_size": 4, "ep_implementation": "hierarchical_all_to_all", "ranks_per_node": 2},
    {"ep_size": 2, "expert_slices": 2},
    {"family": "prmoe-gpt", "ep_size": 2, "expert_slices": 2},
    {"tp": 2, "ep_size": 4},
    {"tp": 2, "ep_size": 4, "ep_implementation": "coordinated_all_to_all"},
    {"tp": 2, "ep_size": 2, "expert_slices": 2, "ep_implementation": "coordinated_all_to_all"},
    {"tp": 2, "ep_size": [2, 4], "ep_implementation": "hierarchical_all_to_all", "ranks_per_node": 2},
]


EIGHT = [
    {"ep_size": 8},
    {"family": "prmoe"},
    {"ep_size": [2, 4], "ep_implementation": "hierarchical_all_to_all", "ranks_per_node": 2},
    {"ep_size": 8, "ep_implementation": "hierarchical_all_to_all", "ranks_per_node": 4},
    {"tp": 2, "ep_size": 8, "ep_implementation": "coordinated_all_to_all"},
    {"tp": 2, "ep_size": [2, 4], "expert_slices": 2, "ep_implementation": "coordinated_all_to_all"},
]


@pytest.mark.parametrize(
    ("world_size", "cases"), [(2, ANY_WORLD), (4, ANY_WORLD + FOUR), (8, EIGHT)], ids=["2", "4", "8"]
)
def test_logits_gradients_and_their_norm_are_those_of_one_process(world_size: int, cases: list[dict[str, Any]]) -> None:
    for errors in run_ranks(world_size, equal_to_one_process, cases):
        for case, one in zip(cases, errors, strict=True):
            assert max(one.values()) < 1e-4, (case, one)


def test_optimizers_make_the_steps_of_one_process_whatever_kernels_they_would_take() -> None:
    options: list[dict[str, bool]] = [{}, {"foreach": True}, {"fused": True}]
    cases = [(cls, one) for cls in (torch.optim.AdamW, torch.optim.Adagrad) for one in options]
    for found in run_ranks(4, optimizer_steps, cases):
        assert max(found) < 1e-3


def test_the_largest_gradient_is_that_of_all_ranks_and_no_number_is_lost() -> None:
    for found in run_ranks(2, largest_gradient, [-3.0, float("inf"), float("nan")]):
        assert found == [3.0, float("inf"), float("inf")]


def test_tokens_over_capacity_are_not_sent() -> None:
    cases: list[dict[str, Any]] = [
        {"ep_size": 2},
        {"ep_size": 2, "ep_implementation": "hierarchical_all_to_all", "ranks_per_node": 2},
        {"ep_size": 1, "expert_slices": 2},
    ]
    for found in run_ranks(2, with_capacity, cases):
        for case, (error, sent, sent_of_all) in zip(cases, found, strict=True):
            assert error < 1e-5, case
            assert sent < sent_of_all or "expert_slices" in case, case


HIERARCHICAL = "hierarchical_all_to_all"
COORDINATED = "coordinated_all_to_all"


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (4, [{"ep_size": 4}, {"ep_size": 4, "ep_implementation": HIERARCHICAL, "ranks_per_node": 2}]),
        (
            8,
            [{"ep_size": 8}, *({"ep_size": 8, "ep_implementation": HIERARCHICAL, "ranks_per_node": n} for n in (2, 4))],
        ),
        (4, [{"tp": 2, "ep_size": 4}, {"tp": 2, "ep_size": 4, "ep_implementation": COORDINATED}]),
    ],
    ids=["hierarchical-4", "hierarchical-8", "coordinated"],
)
def test_the_way_of_the_tokens_changes_no_bit(world_size: int, cases: list[dict[str, Any]]) -> None:
    for different in run_ranks(world_size, same_bits, cases):
        assert different == [[]] * (len(cases) - 1)


def test_the_flat_exchange_has_the_bits_of_transformers_own() -> None:
    for (different,) in run_ranks(4, same_bits, [{"ep_size": 4}, {"ep_size": 4, "ep_implementation": "all_to_all"}]):
        # transformers sorts without keeping the order of tokens, so that an expert's rows are summed in another order.
        assert all(".experts." in name for name in different)


@pytest.mark.parametrize(("world_size", "per_node"), [(4, 2), (8, 2), (8, 4)])
def test_a_hierarchical_exchange_sends_few_messages(world_size: int, per_node: int) -> None:
    flat = {"ep_size": world_size}
    cases = [flat, {**flat, "ep_implementation": HIERARCHICAL, "ranks_per_node": per_node}]
    # Counts, tokens, results: three exchanges.
    wanted = [3 * (world_size - 1), 3 * (per_node - 1 + world_size // per_node - 1)]
    for found in run_ranks(world_size, messages, cases):
        assert found == [(count, count) for count in wanted]


def test_a_coordinated_exchange_sends_only_to_ranks_of_its_index() -> None:
    cases = [{"tp": 2, "ep_size": 4}, {"tp": 2, "ep_size": 4, "ep_implementation": COORDINATED}]
    for (flat, flat_sent), (coordinated, coordinated_sent) in run_ranks(4, messages, cases):
        # 3 exchanges among 4, and the all-gather of the results among 2.
        assert (flat, flat_sent) == (3 * 3 + 1, 3 * 3)
        # 3 exchanges among 2 ranks of one index; counts, tokens, results and the batch among the 2 that share it,
        # the results by a reduce-scatter.
        assert (coordinated, coordinated_sent) == (3 + 4, 3 + 1)

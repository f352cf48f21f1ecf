"""Bad input and lost ranks: one sentence on every rank, and no rank waits for ever."""

from __future__ import annotations

import re

import pytest
from parallel_failures import (
    empty_batch,
    layouts_refused,
    rank_dies,
    rank_is_missing,
    routing_refused,
    uneven_tokens,
)
from parallel_kit import run_ranks

# The ranks are forked from one process that has imported everything.

IMPLEMENTATIONS = [
    {"ep_size": 2},
    {"ep_size": 2, "ep_implementation": "hierarchical_all_to_all", "ranks_per_node": 1},
    {"ep_size": 2, "ep_implementation": "all_to_all"},
    {"ep_size": 1, "expert_slices": 2},
]


def test_layouts_that_cannot_be_are_refused_on_every_rank() -> None:
    wanted = [
        r"ConfigError: ep_size does not divide .* 2 ranks: layer 0 has 8 experts, ep_size 3, valid are \[1, 2\]",
        r"ConfigError: ranks \[[01]\] and rank [01] differ in model, mesh and sizes: give every rank the same",
        r"ConfigError: (rank 0 refused: )?ep_size does not divide",
        r"ConfigError: ranks \[[01]\] and rank [01] differ in model, mesh and sizes",
        r"ConfigError: unknown ep_implementation 'carrier_pigeon'; known: .*coordinated_all_to_all.*flat_all_to_all",
        r"ConfigError: coordinated_all_to_all needs ranks that share a batch: give the mesh",
        r"ConfigError: hierarchical_all_to_all: ranks_per_node is 0",
        r"ConfigError: ep_implementation 'all_to_all' knows no expert_slices: use flat_all_to_all",
        r"ConfigError: MixtralForCausalLM is already parallel: load it again",
        r"UnsupportedError: Linear holds no Hugging Face model: expert parallelism needs one with experts",
        r"ConfigError: ep_implementation 'all_reduce' needs groups .*: layer 0 has ep_size 2, and 1 ranks share",
        r"ConfigError: ranks \[[01]\] and rank [01] differ in model, mesh and sizes",
        r"UnsupportedError: .*mlp.experts: MuseSparkExperts normalize what each expert returns",
        r"ConfigError: the mesh has the ranks in the order \[1, 0\]: make it of \[0, 1\], in this order",
    ]
    for found in run_ranks(2, layouts_refused):
        for text, pattern in zip(found, wanted, strict=True):
            assert re.match(pattern, text), text


def test_router_logits_that_are_nan_are_an_error_on_every_rank() -> None:
    cases = [{**case, "family": family} for case in IMPLEMENTATIONS for family in ("mixtral", "prmoe")]
    for rank, found in enumerate(run_ranks(2, routing_refused, cases)):
        for case, (first, second) in zip(cases, found, strict=True):
            if case["family"] == "mixtral":
                assert re.match(r"NumericError: .*layers.1.mlp.experts: on rank 1, 12 of 12 tokens have .* NaN", first)
            elif rank == 1:
                # PR-MoE's router looks itself.
                assert re.match(r"NumericError: router logits of 12 of 12 tokens are NaN", first), first
            else:
                assert re.match(r"TransportError: .*layers.1.mlp.experts: rank 1 raised an error", first), first
            assert second == "no error"


def test_ranks_may_have_no_tokens_and_experts_all_of_them() -> None:
    for found in run_ranks(2, uneven_tokens, IMPLEMENTATIONS):
        assert max(found) < 1e-4, dict(zip(map(str, IMPLEMENTATIONS), found, strict=True))


def test_an_empty_batch_is_an_error_on_every_rank() -> None:
    for rank, found in enumerate(run_ranks(4, empty_batch)):
        for first, second in zip(found[::2], found[1::2], strict=True):
            if rank == 1:
                assert re.match(
                    r"ConfigError: the batch of rank 1 is empty, its shape is \[0, 6\]: give the rank a row of its own",
                    first,
                )
            else:
                assert re.match(
                    r"TransportError: .*experts: rank \d raised an error before this layer's experts", first
                )
            assert second == "no error"


@pytest.mark.parametrize("when", ["forward", "backward", "synchronization"])
def test_the_others_end_when_a_rank_is_killed(when: str) -> None:
    for rank, answer in enumerate(run_ranks(4, rank_dies, when, 20.0, ep_size=2, may_die=(1,))):
        if rank != 1:
            text, seconds = answer
            assert re.match(rf"TransportError: rank {rank} lost its group in .*: another rank died, raised", text), text
            assert ". " not in text
            # Bounded by the deadline of one exchange, 20 s; what comes late comes from a busy machine.
            assert seconds < 120


def test_the_others_end_when_a_rank_is_late() -> None:
    for rank, answer in enumerate(run_ranks(2, rank_dies, "late", 3.0, ep_size=2, may_die=(1,))):
        if rank != 1:
            text, seconds = answer
            assert re.match(rf"TransportError: rank {rank} lost its group in .*: another rank .* was too late", text)
            assert 2 < seconds < 55, "the late one sleeps for 60"


def test_the_others_end_when_a_rank_does_not_come() -> None:
    text, seconds = run_ranks(2, rank_is_missing, may_die=(1,))[0]
    assert re.match(r"TransportError: rank 0 lost its group in building the groups: another rank .* was too late", text)
    assert 1 < seconds < 28, "the other one comes after 30"

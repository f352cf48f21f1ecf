"""Caches of experts, guesses about them, and the command that measures both."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.benchmarks.papers.caches import POLICIES, best_possible, counted, last_used
from recipes.benchmarks.papers.reuse import AS_IT_IS, REUSE, WITH_MEAN, figures_of
from recipes.benchmarks.papers.traces import ranking, traces
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.offload.ahead.prefetch import find_routers
from swarm_plugins.testing.models import save_tiny


@pytest.mark.parametrize(
    ("policy", "hits"),
    [
        # 0 1 2 0 1 2 with room for two: the least recently used one is always the one that is needed next.
        pytest.param(last_used, [False] * 6, id="lru"),
        pytest.param(best_possible, [False, False, False, True, True, False], id="best"),
    ],
)
def test_a_cycle_through_one_expert_too_many(policy: object, hits: list[bool]) -> None:
    assert policy([[0], [1], [2], [0], [1], [2]], 3, 2) == hits  # type: ignore[operator]


def test_counting_keeps_what_is_used_often() -> None:
    uses = [[0], [0], [0], [1], [2], [0]]
    assert counted(uses, 3, 2)[-1]
    assert last_used([*uses[:4], [2], [1], [0]], 3, 2)[-1] is False


def test_a_token_keeps_its_own_experts_while_it_fetches_them() -> None:
    for policy in POLICIES.values():
        assert policy([[0, 1], [0, 1]], 4, 2) == [False, False, True, True]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nothing_beats_the_best_possible(size: int) -> None:
    """Not even the best of all choices, tried out."""
    dice = random.Random(size)
    for _ in range(20):
        uses = [dice.sample(range(4), 2) for _ in range(8)]
        states = {frozenset[int](): 0}
        for experts in uses:
            after: dict[frozenset[int], int] = {}
            for cached, hits in states.items():
                num_hits = hits + len(cached & set(experts))
                for kept in itertools.combinations(cached | set(experts), min(size, len(cached | set(experts)))):
                    after[frozenset(kept)] = max(after.get(frozenset(kept), 0), num_hits)
            states = after
        assert sum(best_possible(uses, 4, size)) == max(states.values())
        assert all(sum(policy(uses, 4, size)) <= max(states.values()) for policy in POLICIES.values())


def test_figures_of_a_mixture(tmp_path) -> None:  # type: ignore[no-untyped-def]
    directory = save_tiny("mixtral", tmp_path, num_layers=3)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    pieces = torch.randint(3, 60, (4, 64), generator=torch.Generator().manual_seed(0))
    routers, found = find_routers(model), traces(model, pieces, lambda: None)
    for router, inputs, picks in zip(routers, found[0].inputs, found[0].picks, strict=True):
        first = ranking(router, inputs)[:, : picks.shape[1]]
        assert torch.equal(first.sort(dim=1).values, picks.sort(dim=1).values)  # asked in time, a router is right
    figures = figures_of(routers, found)
    assert [*figures["hits"]] == [*POLICIES]
    assert [*figures["recall"][AS_IT_IS]] == ["1", "2"]
    for kind in (AS_IT_IS, WITH_MEAN):
        shares = [values[0] for values in figures["recall"][kind]["1"].values()]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0  # all experts
    models = {"models": {"tiny": figures}}
    assert len(REUSE.tables(models)) == 2
    assert len(REUSE.verdicts(models)) == 3


def test_a_dense_model_has_nothing_to_trace(tiny_llama) -> None:  # type: ignore[no-untyped-def]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with pytest.raises(UnsupportedError, match="give a mixture of experts"):
        traces(model, torch.zeros(1, 4, dtype=torch.long), lambda: None)

"""Which experts stay: those used most, counted over all layers, older uses for less."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.offload.cache.policy import Residency, UseCounts
from swarm_plugins.offload.interfaces import ExpertKey

COUNTS = {0: 4, 3: 3, 7: 5}
SIZES = {0: 10, 3: 10, 7: 25}
KEYS = [ExpertKey(layer, expert) for layer, count in COUNTS.items() for expert in range(count)]


def filled(*keys: tuple[int, int], num_layers: int = 1, num_experts: int = 8) -> Residency:
    """A policy with room for these experts and no more, each used once."""
    layers = range(num_layers)
    policy = Residency(dict.fromkeys(layers, num_experts), dict.fromkeys(layers, 1), len(keys))
    for layer, expert in keys:
        policy.admit(ExpertKey(layer, expert))
        policy.use(layer, [expert])
    return policy


@settings(max_examples=300, deadline=None)
@given(
    budget=st.integers(25, 160),
    steps=st.lists(
        st.tuples(st.sampled_from(KEYS), st.sampled_from(["use", "use", "hold", "release", "drop"])),
        min_size=40,
        max_size=90,
    ),
)
def test_the_least_used_for_their_size_go_and_no_more_than_have_to(
    budget: int, steps: list[tuple[ExpertKey, str]]
) -> None:
    policy, calls = Residency(COUNTS, SIZES, budget), dict.fromkeys(COUNTS, 0)
    resident, holds = set[ExpertKey](), dict.fromkeys(KEYS, 0)
    used: dict[ExpertKey, list[int]] = {key: [] for key in KEYS}

    def worth(key: ExpertKey) -> float:
        return math.fsum(2 ** ((call - calls[key.layer]) / 16) for call in used[key]) / SIZES[key.layer]

    for key, action in steps:
        if action == "hold" and key in resident:
            policy.hold(key)
            holds[key] += 1
        elif action == "release" and holds[key]:
            policy.release(key)
            holds[key] -= 1
        elif action == "drop" and key in resident and not holds[key]:
            policy.drop(key)
            resident.remove(key)
        elif action == "use":
            if key not in resident:
                victims = policy.admit(key)
                sizes = [SIZES[one.layer] for one in victims or ()]
                may_go = [one for one in resident if not holds[one]]
                if victims is None:
                    least = sum(SIZES[one.layer] for one in resident if holds[one])
                    assert least + SIZES[key.layer] > budget
                else:
                    assert set(victims) <= set(may_go)
                    staying = [worth(one) for one in may_go if one not in victims]
                    assert all(worth(one) <= least + 1e-9 for one in victims for least in staying)
                    before = sum(SIZES[one.layer] for one in resident) + SIZES[key.layer]
                    assert not victims or before - sum(sizes[:-1]) > budget
                    resident = resident - set(victims) | {key}
            calls[key.layer] += 1
            used[key].append(calls[key.layer])
            policy.use(key.layer, [key.expert])
        assert [one for one in KEYS if policy.is_held(one)] == [one for one in KEYS if holds[one]]
        assert {ExpertKey(layer, one) for layer, some in policy.residents.items() for one in some} == resident
        assert policy.used_bytes == sum(SIZES[one.layer] for one in resident) <= budget


def test_what_is_held_stays_and_a_full_memory_says_so() -> None:
    policy = filled((0, 0), (0, 1))
    for expert in (0, 1):
        policy.hold(ExpertKey(0, expert))
    assert policy.admit(ExpertKey(0, 2)) is None
    assert policy.residents[0] == {0, 1}
    policy.release(ExpertKey(0, 1))
    assert policy.admit(ExpertKey(0, 2)) == [ExpertKey(0, 1)]


def test_between_equals_of_a_layer_the_last_used_stays_longest() -> None:
    counts = UseCounts(4)
    counts.use([2, 0])
    assert counts.order == [2, 0, 1, 3]


def test_what_was_used_often_outlives_what_was_used_last_but_not_for_ever() -> None:
    policy = filled((0, 0), (0, 1))
    for expert in (0, 0, 0, 1):
        policy.use(0, [expert])
    assert policy.admit(ExpertKey(0, 2)) == [ExpertKey(0, 1)]
    for _ in range(6):
        policy.use(0, [2])
    assert policy.admit(ExpertKey(0, 3)) == [ExpertKey(0, 0)]


def test_counts_survive_a_million_uses() -> None:
    counts = UseCounts(2)
    counts._weight = 1e99
    counts._scores = [1e99, 0.0]
    for _ in range(100):
        counts.use([1])
    assert max(counts._scores) < 1e101
    assert counts.order == [1, 0]
    assert counts.uses(0) == pytest.approx(2 ** (-100 / 16))


def test_the_layer_that_reuses_more_gets_more_of_the_memory() -> None:
    policy = Residency({0: 8, 1: 8}, {0: 1, 1: 1}, 8)
    for step in range(200):
        # Two experts are all that one layer needs; the other needs six in turn.
        for layer, expert in ((0, step % 2), (1, step % 6)):
            if expert not in policy.residents[layer]:
                policy.admit(ExpertKey(layer, expert))
            policy.use(layer, [expert])
    assert policy.residents == {0: {0, 1}, 1: set(range(6))}


@pytest.mark.parametrize("budget", [0, 9])
def test_a_budget_of_nothing_admits_nothing(budget: int) -> None:
    assert Residency(COUNTS, SIZES, budget).admit(ExpertKey(0, 0)) is None


def test_between_equals_this_layer_gives_and_then_the_one_used_last() -> None:
    keys = [(layer, 0) for layer in range(4)]
    assert filled(*keys, num_layers=4).admit(ExpertKey(2, 1)) == [ExpertKey(2, 0)]
    policy = filled(*keys, num_layers=4)
    policy.hold(ExpertKey(2, 0))
    # Layer 3 has just been used: it comes again after all others.
    assert policy.admit(ExpertKey(2, 1)) == [ExpertKey(3, 0)]

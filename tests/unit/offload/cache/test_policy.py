"""Who stays: checked against a model that does the same the slow way."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.offload.cache.policy import LayerNeed, Residency, busiest, share_budget
from swarm_plugins.offload.interfaces import ExpertKey

COUNTS = {0: 4, 3: 3, 7: 5}
SIZES = {0: 10, 3: 10, 7: 25}


@dataclass
class SlowModel:
    """The rules word for word: time stamps, and a search through everybody."""

    budget: int
    quotas: dict[int, int]
    now: int = 0
    last: dict[ExpertKey, int] = field(default_factory=dict)
    last_of_layer: dict[int, int] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    uses: dict[ExpertKey, list[int]] = field(default_factory=dict)
    """Of each expert, which calls of its layer used it."""
    resident: set[ExpertKey] = field(default_factory=set)
    holds: dict[ExpertKey, int] = field(default_factory=dict)

    def use(self, layer: int, experts: list[int]) -> None:
        self.calls[layer] = self.calls.get(layer, 0) + 1
        # The first of a call counts as the most recent.
        for expert in reversed(experts):
            self.now += 1
            self.last[ExpertKey(layer, expert)] = self.now
            self.uses.setdefault(ExpertKey(layer, expert), []).append(self.calls[layer])
        self.last_of_layer[layer] = self.now

    def score(self, key: ExpertKey) -> float:
        # A use counts half of one sixteen calls later.
        return round(sum(2 ** ((use - self.calls[key.layer]) / 16) for use in self.uses.get(key, [])), 9)

    def admit(self, key: ExpertKey) -> set[ExpertKey] | None:
        resident, victims = self.resident | {key}, set()
        while sum(SIZES[one.layer] for one in resident) > self.budget:
            may_go = [one for one in resident if one != key and not self.holds.get(one)]
            if not may_go:
                return None

            def rank(one: ExpertKey) -> tuple[int, bool, int, int, float, int]:
                excess = sum(other.layer == one.layer for other in resident) - self.quotas[one.layer]
                # Never used: the later in the layer, the sooner it goes.
                age = self.last.get(one, -one.expert - 1)
                last = -self.last_of_layer.get(one.layer, 0)
                return -excess, one.layer != key.layer, last, one.layer, self.score(one), age

            victim = min(may_go, key=rank)
            resident.remove(victim)
            victims.add(victim)
        self.resident = resident
        return victims


Uses = st.integers(0, 2).flatmap(
    lambda place: st.tuples(
        st.just(list(COUNTS)[place]),
        st.lists(st.integers(0, list(COUNTS.values())[place] - 1), min_size=1, max_size=3, unique=True),
    )
)


@settings(max_examples=300, deadline=None)
@given(
    budget=st.integers(25, 160),
    steps=st.lists(
        st.tuples(Uses, st.sampled_from(["use", "use", "hold", "release", "drop"])), min_size=25, max_size=40
    ),
)
def test_admission_does_what_the_slow_model_does(budget: int, steps: list[tuple[tuple[int, list[int]], str]]) -> None:
    policy = Residency(COUNTS, SIZES, budget)
    model = SlowModel(budget, dict(policy.quotas))
    for (layer, experts), action in steps:
        for expert in experts:
            key = ExpertKey(layer, expert)
            if action == "hold" and key in model.resident:
                policy.hold(key)
                model.holds[key] = model.holds.get(key, 0) + 1
            elif action == "release" and model.holds.get(key):
                policy.release(key)
                model.holds[key] -= 1
            elif action == "drop" and key in model.resident and not model.holds.get(key):
                policy.drop(key)
                model.resident.remove(key)
            elif action == "use" and key not in model.resident:
                victims, expected = policy.admit(key), model.admit(key)
                assert (victims if victims is None else set(victims)) == expected
            assert policy.is_held(key) == bool(model.holds.get(key))
        if action == "use":
            policy.use(layer, experts)
            model.use(layer, experts)
        assert {ExpertKey(one, expert) for one in COUNTS for expert in policy.residents[one]} == model.resident
        assert policy.used_bytes == sum(SIZES[key.layer] for key in model.resident) <= budget


def test_what_is_held_stays_and_a_full_memory_says_so() -> None:
    policy = Residency({0: 4}, {0: 1}, 2)
    for expert in (0, 1):
        assert policy.admit(ExpertKey(0, expert)) == []
        policy.hold(ExpertKey(0, expert))
    assert policy.admit(ExpertKey(0, 2)) is None
    assert policy.residents[0] == {0, 1}
    policy.release(ExpertKey(0, 1))
    assert policy.admit(ExpertKey(0, 2)) == [ExpertKey(0, 1)]


def test_of_equally_used_experts_the_least_recently_used_goes_first() -> None:
    policy = Residency({0: 8}, {0: 1}, 3)
    for expert in (0, 1, 2):
        policy.admit(ExpertKey(0, expert))
        policy.use(0, [expert])
    policy.use(0, [0])
    assert policy.admit(ExpertKey(0, 3)) == [ExpertKey(0, 1)]


def test_what_was_used_often_outlives_what_was_used_last_but_not_for_ever() -> None:
    policy = Residency({0: 8}, {0: 1}, 2)
    for expert in (0, 1):
        policy.admit(ExpertKey(0, expert))
    for expert in (0, 0, 0, 1):
        policy.use(0, [expert])
    assert policy.admit(ExpertKey(0, 2)) == [ExpertKey(0, 1)]
    for _ in range(4):
        policy.use(0, [2])
    assert policy.admit(ExpertKey(0, 3)) == [ExpertKey(0, 0)]


def test_scores_survive_a_million_uses() -> None:
    need = LayerNeed(2)
    need._weight = 1e99
    need._scores = [1e99, 0.0]
    for _ in range(100):
        need.use([1])
    assert max(need._scores) < 1e101
    assert need.order == [1, 0]


def test_equal_layers_get_equal_shares() -> None:
    assert Residency(dict.fromkeys(range(4), 8), dict.fromkeys(range(4), 1), 12).quotas == dict.fromkeys(range(4), 3)


def test_the_layer_that_reuses_more_gets_more_of_the_budget() -> None:
    policy = Residency({0: 8, 1: 8}, {0: 1, 1: 1}, 8)
    for step in range(200):
        policy.use(0, [0])  # one expert is all that this layer needs
        policy.use(1, [step % 6])  # six are needed in turn
    assert policy.quotas[1] >= 6
    assert sum(policy.quotas.values()) == 8


def test_a_layer_below_its_share_takes_from_the_one_above() -> None:
    policy = Residency({0: 4, 1: 4}, {0: 1, 1: 1}, 4)
    for expert in range(4):
        policy.admit(ExpertKey(0, expert))
    for expert in range(2):
        (victim,) = policy.admit(ExpertKey(1, expert)) or []
        assert victim.layer == 0
    (victim,) = policy.admit(ExpertKey(1, 2)) or []
    assert victim.layer == 1


def test_the_busiest_are_pinned_and_go_only_if_nothing_else_can() -> None:
    policy = Residency({0: 6}, {0: 1}, 3, pinned_share=0.4)
    policy.admit(ExpertKey(0, 5))
    for _ in range(20):
        policy.use(0, [5])
    assert policy.pinned[0] == {5}
    for expert in range(4):
        policy.admit(ExpertKey(0, expert))
        policy.use(0, [expert])
        assert 5 in policy.residents[0]
    for expert in policy.residents[0] - {5}:
        policy.hold(ExpertKey(0, expert))
    assert policy.admit(ExpertKey(0, 4)) == [ExpertKey(0, 5)]


@settings(max_examples=100, deadline=None)
@given(uses=st.lists(st.integers(0, 5), min_size=1, max_size=60), size=st.integers(1, 6))
def test_measured_gains_are_the_hits_of_a_cache_of_the_first_in_the_order(uses: list[int], size: int) -> None:
    need, hits = LayerNeed(6), 0
    for expert in uses:
        hits += expert in need.order[:size]
        need.use([expert])
    assert sum(need._hits[:size]) == hits


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_gains_never_rise_and_promise_no_less_than_was_measured(values: list[float]) -> None:
    need = LayerNeed(len(values))
    need._hits = list(values)
    gains = need.gains()
    assert all(left >= right - 1e-9 for left, right in pairwise(gains))
    for size in range(1, len(values) + 1):
        assert sum(gains[:size]) >= sum(values[:size]) - 1e-6


def test_shares_never_exceed_the_budget_or_the_layer() -> None:
    needs = {layer: LayerNeed(count) for layer, count in COUNTS.items()}
    for budget in range(0, 300, 7):
        quotas = share_budget(needs, SIZES, budget)
        assert sum(quotas[layer] * SIZES[layer] for layer in quotas) <= budget
        assert all(quotas[layer] <= COUNTS[layer] for layer in quotas)


def test_busiest_counts_by_byte() -> None:
    needs = {layer: LayerNeed(count) for layer, count in COUNTS.items()}
    for _ in range(4):
        needs[7].use([1])
    for _ in range(2):
        needs[0].use([2])
    assert busiest(needs, SIZES, 35) == {0: frozenset({2}), 3: frozenset(), 7: frozenset({1})}
    assert busiest(needs, SIZES, 20) == {0: frozenset({2}), 3: frozenset(), 7: frozenset()}


@pytest.mark.parametrize("budget", [0, 9])
def test_a_budget_of_nothing_admits_nothing(budget: int) -> None:
    assert Residency(COUNTS, SIZES, budget).admit(ExpertKey(0, 0)) is None


def test_between_equal_layers_the_one_used_last_gives_first() -> None:
    policy = Residency(dict.fromkeys(range(4), 2), dict.fromkeys(range(4), 1), 8)
    policy.budget_bytes = 4
    policy.quotas = dict.fromkeys(range(4), 1)
    for layer in (0, 1, 2, 3):
        policy.admit(ExpertKey(layer, 0))
    for layer in (0, 1):
        policy.use(layer, [0])
    policy.hold(ExpertKey(2, 0))
    # Layer 3 is the next but one; layer 1 has just been used, and comes again after all others.
    assert policy.admit(ExpertKey(2, 1)) == [ExpertKey(1, 0)]

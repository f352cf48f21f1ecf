"""The paper's policy against a plain model of it: k experts a layer by last use, and guesses that replace nothing."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.errors import CapacityError
from swarm_plugins.offload.cache.layer_lru import NUM_STAGED, LayerLru
from swarm_plugins.offload.interfaces import ExpertKey

NUM_EXPERTS = {0: 8, 2: 8, 5: 6}
SIZES = {0: 10, 2: 10, 5: 20}


def made(per_layer: int) -> LayerLru:
    return LayerLru(NUM_EXPERTS, SIZES, per_layer * sum(SIZES.values()) + NUM_STAGED * max(SIZES.values()))


experts = st.sampled_from([ExpertKey(layer, expert) for layer, count in NUM_EXPERTS.items() for expert in range(count)])


@settings(max_examples=200, deadline=None)
@given(per_layer=st.integers(1, 4), steps=st.lists(st.tuples(experts, st.booleans()), max_size=120))
def test_each_layer_keeps_those_used_last(per_layer: int, steps: list[tuple[ExpertKey, bool]]) -> None:
    policy = made(per_layer)
    kept: dict[int, OrderedDict[int, None]] = {layer: OrderedDict() for layer in NUM_EXPERTS}
    for key, is_guess in steps:
        if key.expert not in policy.residents[key.layer]:
            before = {layer: set(one) for layer, one in kept.items()}
            victims = policy.admit(key, is_guess=is_guess)
            assert victims is not None
            if is_guess:
                assert all(victim.expert not in before[victim.layer] for victim in victims)
        if not is_guess:
            policy.use(key.layer, [key.expert])
            kept[key.layer][key.expert] = None
            kept[key.layer].move_to_end(key.expert)
            if len(kept[key.layer]) > per_layer:
                kept[key.layer].popitem(last=False)
        for layer, mine in kept.items():
            assert set(mine) <= policy.residents[layer]
        assert sum(map(len, policy.residents.values())) - sum(map(len, kept.values())) <= NUM_STAGED
        assert policy.used_bytes <= policy.budget_bytes


def test_experts_in_use_stay_and_the_one_too_many_is_staged() -> None:
    policy = made(1)
    for number in range(1 + NUM_STAGED):
        assert policy.admit(ExpertKey(0, number)) == []
        policy.hold(ExpertKey(0, number))
    assert policy.admit(ExpertKey(0, 7)) is None
    policy.release(ExpertKey(0, 2))
    assert policy.admit(ExpertKey(0, 7)) == [ExpertKey(0, 2)]


def test_bookkeeping_is_rebuilt_after_an_interruption() -> None:
    policy = made(2)
    for number in range(2):
        policy.admit(ExpertKey(0, number))
    policy.admit(ExpertKey(2, 3), is_guess=True)
    policy.restore([ExpertKey(0, 1), ExpertKey(2, 3), ExpertKey(2, 4)], [ExpertKey(0, 1)])
    assert policy.residents == {0: {1}, 2: {3, 4}, 5: set()}
    assert policy.is_held(ExpertKey(0, 1))
    assert policy.admit(ExpertKey(2, 5)) == []
    assert policy.admit(ExpertKey(2, 6)) == [ExpertKey(2, 4)]


def test_a_budget_without_room_for_one_of_each_layer_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"119 bytes: one .* of 3 layers and 4 .* take 120, all experts 280; raise"):
        LayerLru(NUM_EXPERTS, SIZES, 119)


def test_a_budget_for_all_keeps_all_whatever_is_read_ahead() -> None:
    policy = LayerLru({0: 2, 1: 3}, {0: 10, 1: 10}, 50)
    keys = [ExpertKey(layer, expert) for layer, count in ((0, 2), (1, 3)) for expert in range(count)]
    for key in keys:
        assert policy.admit(key, is_guess=key.expert == 1) == []
        policy.use(key.layer, [key.expert])
    assert policy.residents == {0: {0, 1}, 1: {0, 1, 2}}
    with pytest.raises(CapacityError, match=r"49 bytes: .* take 60, all experts 50; raise"):
        LayerLru({0: 2, 1: 3}, {0: 10, 1: 10}, 49)

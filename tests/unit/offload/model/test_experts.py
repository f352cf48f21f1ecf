"""The experts implementation against transformers' own, with every flag of its registry."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from experts_kit import FLAGS, INNER, NUM_EXPERTS, WIDTH, ListCache, pair, routed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.moe import ExpertDelta
from swarm_plugins.offload.model.experts import IMPLEMENTATION, adapted, run_offloaded

# Sums of six to eight products, in another order.
ROUNDING = 1e-5
flags_of = pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)


@flags_of
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_results_are_those_of_the_grouped_implementation(flags: dict[str, bool], num_tokens: int) -> None:
    plain, offloaded, _ = pair(**flags)
    arguments = routed(num_tokens)
    with torch.no_grad():
        expected, found = plain(*arguments), offloaded(*arguments)
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


@flags_of
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_the_order_in_which_experts_arrive_changes_no_bit(flags: dict[str, bool], num_tokens: int) -> None:
    arguments = routed(num_tokens, 3)
    _, forwards, _ = pair(**flags)
    _, backwards, cache = pair(is_backwards=True, **flags)
    hidden = arguments[0].clone().requires_grad_()
    twin = arguments[0].clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(forwards(*arguments), backwards(*arguments))
    forwards(hidden, *arguments[1:]).square().sum().backward()
    backwards(twin, *arguments[1:]).square().sum().backward()
    assert torch.equal(hidden.grad, twin.grad)
    assert cache.num_open == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_routing_gives_the_results_of_the_grouped_implementation(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 7))
    row = st.permutations(range(NUM_EXPERTS)).map(lambda order: order[:3])
    index = torch.tensor([data.draw(row) for _ in range(num_tokens)])
    hidden, _, weights = routed(num_tokens, 3, seed=data.draw(st.integers(0, 99)))
    plain, offloaded, cache = pair(has_bias=True)
    with torch.no_grad():
        torch.testing.assert_close(
            offloaded(hidden, index, weights), plain(hidden, index, weights), rtol=ROUNDING, atol=ROUNDING
        )
    assert [sorted(asked) for asked in cache.asked] == [sorted(set(index.flatten().tolist()))], "each expert once"


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_experts_that_live_elsewhere_contribute_nothing(num_tokens: int) -> None:
    _, offloaded, cache = pair()
    hidden, index, weights = routed(num_tokens)
    here = offloaded(hidden, index[:, :1], weights[:, :1])
    index[:, 1] = NUM_EXPERTS
    assert torch.equal(offloaded(hidden, index, weights), here)
    assert all(expert < NUM_EXPERTS for asked in cache.asked for expert in asked)
    index[:] = NUM_EXPERTS
    assert not offloaded(hidden, index, weights).any()


def test_an_empty_batch_borrows_nothing() -> None:
    _, offloaded, cache = pair()
    found = offloaded(torch.empty(0, WIDTH), torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2))
    assert found.shape == (0, WIDTH)
    assert cache.asked == [[]]


def test_the_same_expert_twice_for_one_token_counts_twice() -> None:
    plain, offloaded, _ = pair()
    hidden, _, weights = routed(1)
    index = torch.tensor([[3, 3]])
    with torch.no_grad():
        torch.testing.assert_close(offloaded(hidden, index, weights), plain(hidden, index, weights))


def test_the_type_of_hidden_states_is_kept() -> None:
    plain, offloaded, _ = pair()
    hidden, index, weights = routed(3)
    found = offloaded(hidden.bfloat16(), index, weights)
    assert found.dtype == torch.bfloat16
    # Two digits and a half: inputs and intermediate results are rounded to bfloat16.
    torch.testing.assert_close(found.float(), plain(hidden, index, weights), rtol=0.05, atol=0.2)


def test_autocast_does_not_reach_the_experts() -> None:
    _, offloaded, _ = pair()
    arguments = routed(3)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = offloaded(*arguments)
    assert torch.equal(found, offloaded(*arguments))


@flags_of
def test_gradients_are_those_of_the_grouped_implementation(flags: dict[str, bool]) -> None:
    plain, offloaded, cache = pair(**flags)
    if plain.has_post_expert_norm:
        plain.post_expert_norm.requires_grad_(True)
        offloaded.post_expert_norm.requires_grad_(True)
    found = []
    for module in (plain, offloaded):
        hidden, index, weights = routed(7)
        leaves = [hidden.requires_grad_(), weights.requires_grad_()]
        module(hidden, index, weights).square().sum().backward()
        norms = [module.post_expert_norm.weight] if plain.has_post_expert_norm else []
        found.append([one.grad for one in (*leaves, *norms)])
    for expected, offloaded_grad in zip(*found, strict=True):
        torch.testing.assert_close(offloaded_grad, expected, rtol=ROUNDING, atol=1e-4)
    assert len(cache.asked) == 2
    assert cache.num_open == 0


def test_the_activation_of_offloaded_experts_is_frozen_and_training_it_is_refused() -> None:
    _, offloaded, _ = pair(activation=torch.nn.PReLU())
    assert not offloaded.act_fn.weight.requires_grad
    offloaded(*routed(3))
    offloaded.act_fn.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"activation of offloaded experts .* gets no gradient: freeze it"):
        offloaded(*routed(3))


def delta(parameter: str, sizes: tuple[int, int], rank: int = 2) -> ExpertDelta:
    size_in, size_out = sizes
    return ExpertDelta(
        parameter,
        NUM_EXPERTS,
        torch.randn(rank * NUM_EXPERTS, size_in, requires_grad=True),
        torch.randn(size_out, rank * NUM_EXPERTS, requires_grad=True),
        0.5,
        lambda num_tokens: None,
    )


def widened(name: str, weight: Tensor, deltas: list[ExpertDelta]) -> Tensor:
    for one in deltas:
        if one.parameter == name:
            factor_a, factor_b = one.factors()
            weight = weight + one.scaling * torch.einsum("ore,eri->eoi", factor_b, factor_a)
    return weight


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_adapters_of_experts_add_the_product_of_their_factors_and_get_its_gradient(num_tokens: int) -> None:
    plain, offloaded, _ = pair()
    deltas = [
        delta("gate_up_proj", (WIDTH, 2 * INNER)),
        delta("down_proj", (INNER, WIDTH)),
        delta("down_proj", (12, 8)),
    ]
    arguments = routed(num_tokens)
    names = ("gate_up_proj", "down_proj")
    weights = {name: widened(name, getattr(plain, name), deltas) for name in names}
    facade = SimpleNamespace(
        **weights, num_experts=NUM_EXPERTS, has_gate=True, has_bias=False, is_transposed=False,
        has_post_expert_norm=False, _is_expert_parallel=False, _apply_gate=plain._apply_gate,
    )  # fmt: skip
    expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](facade, *arguments)
    factors = [factor for one in deltas for factor in (one.factor_a, one.factor_b)]
    grads = torch.autograd.grad(expected.square().sum(), factors)
    with adapted(offloaded, deltas[:1]), adapted(offloaded, deltas[1:]):
        found = offloaded(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for grad, expected_grad in zip(torch.autograd.grad(found.square().sum(), factors), grads, strict=True):
        assert (grad - expected_grad).norm() <= 1e-5 * expected_grad.norm()
    with torch.no_grad(), adapted(offloaded, deltas):
        torch.testing.assert_close(offloaded(*arguments), expected, rtol=1e-4, atol=1e-4)


def test_a_product_that_fails_gives_back_what_was_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    _, offloaded, cache = pair()

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(offloaded._loans._form), "linear", fail)
    for num_tokens in (1, 4):
        with pytest.raises(RuntimeError, match="out of memory"):
            offloaded(*routed(num_tokens))
        assert cache.num_open == 0


def test_no_other_implementation_can_be_switched_to() -> None:
    _, offloaded, _ = pair()
    arguments = routed(3)
    with torch.no_grad():
        expected = offloaded(*arguments)
        offloaded.config._experts_implementation = "eager"
        assert torch.equal(offloaded(*arguments), expected)


def test_the_implementation_stands_in_the_registry() -> None:
    assert ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] is run_offloaded


def test_the_kit_spoils_what_it_lent_before() -> None:
    # Guards the tests above: a result that still used it would be no number.
    plain, _, _ = pair()
    lent = [tensors["down_proj"] for _, tensors in ListCache(plain).borrow(0, [0, 1])]
    assert lent[0].isnan().all()
    assert not lent[1].isnan().any()

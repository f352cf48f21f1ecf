"""`swarm_table` against the families' own eager experts, and what it leaves undone."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experts_kit import FLAGS, NUM_EXPERTS, WIDTH, family
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarm_plugins.moe.table import run_table
from swarm_plugins.testing.models import FAMILIES, tiny_model

MOE_FAMILIES = [family for family in FAMILIES if family not in ("llama", "gemma2")]


def loop(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Returns what the experts compute, one row at a time."""
    rows = []
    for token, experts, scales in zip(hidden, index.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for expert, scale in zip(experts, scales, strict=True):
            if expert < module.num_experts:
                total = total + scale * one_expert(module, expert, token)
        rows.append(total)
    return torch.stack(rows)


def one_expert(module: Any, expert: int, token: Tensor) -> Tensor:
    def product(name: str, row: Tensor) -> Tensor:
        weight = getattr(module, name)[expert]
        result = row @ (weight if module.is_transposed else weight.T)
        return result + getattr(module, f"{name}_bias")[expert] if module.has_bias else result

    if module.has_gate:
        inner = module._apply_gate(product("gate_up_proj", token[None]))
    else:
        inner = module.act_fn(product("up_proj", token[None]))
    down = product("down_proj", inner)
    return (module.post_expert_norm(down) if module.has_post_expert_norm else down)[0]


def case(
    num_tokens: int = 7, num_chosen: int = 2, *, dtype: torch.dtype = torch.float64, **flags: bool
) -> tuple[Any, list[Tensor]]:
    """Returns experts, and hidden states, choices (some of an expert elsewhere) and weights."""
    torch.manual_seed(1)
    experts: Any = family(**flags)(SimpleNamespace(_experts_implementation="swarm_table")).to(dtype)
    index = torch.stack([torch.randperm(NUM_EXPERTS + 1)[:num_chosen] for _ in range(num_tokens)])
    hidden, weights = torch.randn(num_tokens, WIDTH, dtype=dtype), torch.rand(num_tokens, num_chosen, dtype=dtype)
    return experts, [hidden, index, weights]


def with_gradients(run: Any, module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """Returns the result and all gradients."""
    module.zero_grad()
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    result = run(module, hidden, index, weights)
    result.backward(torch.linspace(-1, 1, result.numel()).view_as(result).to(result.dtype))
    found = [result, hidden.grad, weights.grad, *(one.grad for one in module.parameters())]
    assert all(one is not None for one in found)
    return [one.detach() for one in found if one is not None]


@pytest.mark.parametrize("num_chosen", [1, 2, 3])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_every_flag_gives_the_results_and_gradients_of_a_loop(flags: dict[str, bool], num_chosen: int) -> None:
    experts, inputs = case(num_chosen=num_chosen, **flags)
    torch.testing.assert_close(with_gradients(run_table, experts, *inputs), with_gradients(loop, experts, *inputs))


@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_the_cut_into_chunks_changes_nothing_but_rounding(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, inputs = case(20, has_bias=True)
    expected = with_gradients(loop, experts, *inputs)
    monkeypatch.setattr("swarm_plugins.moe.table._CHUNK_ROWS", rows)
    torch.testing.assert_close(with_gradients(run_table, experts, *inputs), expected)


@pytest.mark.parametrize("name", MOE_FAMILIES)
def test_logits_and_gradients_are_those_of_eager(name: str) -> None:
    model = tiny_model(name)
    tokens = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(0))

    def run(implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
        model.set_experts_implementation(implementation)
        model.zero_grad()
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        return output.logits.detach(), {
            name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
        }

    torch.testing.assert_close(run("swarm_table"), run("eager"))


def test_the_same_inputs_give_the_same_bits() -> None:
    experts, inputs = case(40, 3)
    first, second = (with_gradients(run_table, experts, *inputs) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_token_keeps_its_bits_when_only_tokens_of_other_experts_change() -> None:
    experts, (hidden, index, weights) = case(40, 1)
    mine = (index == 2).squeeze(1)
    first = run_table(experts, hidden, index, weights)
    others = torch.where(mine[:, None], hidden, torch.randn_like(hidden))
    elsewhere = torch.where(mine[:, None], index, (index + 1) % 2)
    assert torch.equal(run_table(experts, others, elsewhere, weights)[mine], first[mine])


class Products(TorchDispatchMode):
    """Counts products, and takes note of what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0
        self.largest: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        makes = func.overloadpacket in (
            torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.new_zeros,
            torch.ops.aten.zeros_like, torch.ops.aten.zeros, torch.ops.aten.mm, torch.ops.aten.clone,
        )  # fmt: skip
        if makes and isinstance(result, Tensor):
            self.largest.append(result.numel())
        return result


def big_case(num_hit: int) -> tuple[Any, list[Tensor]]:
    experts, (hidden, _, weights) = case(8, 2)
    index = torch.stack([torch.arange(2) % num_hit, torch.arange(2) % num_hit]).repeat(4, 1)
    return experts, [hidden, index, weights]


@pytest.mark.parametrize("num_hit", [1, 2])
def test_only_experts_with_tokens_are_multiplied(num_hit: int) -> None:
    experts, inputs = big_case(num_hit)
    with Products() as seen, torch.no_grad():
        run_table(experts, *inputs)
    assert seen.num_products == 2 * num_hit


def test_experts_without_tokens_are_not_read_and_get_zero_gradients() -> None:
    experts, inputs = big_case(1)
    with torch.no_grad():
        for one in experts.parameters():
            one[1:] = torch.nan
    result, hidden, weights, *grads = with_gradients(run_table, experts, *inputs)
    assert all(one.isfinite().all() for one in (result, hidden, weights))
    assert all(one[0].any() and not one[1:].any() for one in grads)


@pytest.mark.parametrize(("is_trained", "expected"), [(True, 4), (False, 2)])
def test_frozen_experts_make_no_weight_gradient(is_trained: bool, expected: int) -> None:
    experts, (hidden, index, weights) = big_case(1)
    experts.requires_grad_(is_trained)
    hidden.requires_grad_()
    result = run_table(experts, hidden, index, weights)
    with Products() as seen:
        result.sum().backward()
    assert seen.num_products == expected
    assert (experts.down_proj.grad is not None) == is_trained


def test_a_trained_parameter_costs_one_gradient_of_its_size() -> None:
    experts, inputs = case(12, 2)
    result = run_table(experts, *inputs)
    with Products() as seen:
        result.sum().backward()
    sizes = [one.numel() for one in experts.parameters()]
    assert [seen.largest.count(size) for size in sizes] == [1, 1]


def test_the_first_result_and_sorted_routing_weights_are_all_that_is_kept_for_the_backward_pass() -> None:
    experts, inputs = case(12, 2)
    experts.requires_grad_(False)
    inputs[0].requires_grad_()
    kept: list[Tensor] = []
    known = {one.data_ptr() for one in experts.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        run_table(experts, *inputs)
    # Not the hidden states either: only gradients of the first weight need them.
    new = [tuple(one.shape) for one in kept if one.data_ptr() not in known]
    num_rows = int((inputs[1] < NUM_EXPERTS).sum())
    assert new == [(num_rows, experts.gate_up_proj.shape[1]), (inputs[1].numel(), 1)]


@pytest.mark.parametrize("flags", [{}, {"has_bias": True, "is_transposed": True}])
def test_autocast_forms_products_in_its_type_and_gradients_in_the_weights_type(flags: dict[str, bool]) -> None:
    experts, inputs = case(12, dtype=torch.float32, **flags)
    with torch.autocast("cpu", torch.bfloat16), Products() as seen:
        found = with_gradients(run_table, experts, *inputs)
    assert seen.num_products
    assert [one.dtype for one in found] == [torch.float32] * len(found)
    for one, other in zip(found, with_gradients(run_table, experts, *inputs), strict=True):
        assert not torch.equal(one, other)
        assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("weights_type", [torch.bfloat16, torch.float32])
def test_sixteen_bits_stay_within_their_rounding(weights_type: torch.dtype) -> None:
    experts, (hidden, index, weights) = case(12)
    expected = with_gradients(loop, experts, hidden, index, weights)
    experts.to(torch.bfloat16)
    found = with_gradients(run_table, experts, hidden.bfloat16(), index, weights.to(weights_type))
    assert found[0].dtype == torch.bfloat16
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 0.03 * other.norm()


def test_an_empty_batch_gives_an_empty_result_and_zero_gradients() -> None:
    experts, inputs = case(1)
    result, hidden, _, *grads = with_gradients(run_table, experts, *(one[:0] for one in inputs))
    assert result.shape == (0, WIDTH)
    assert hidden.shape == (0, WIDTH)
    assert not any(one.any() for one in grads)


def test_the_same_expert_twice_counts_twice() -> None:
    experts, (hidden, _, weights) = case(6, 4)
    inputs = (hidden, torch.tensor([[0, 0, 1, 0]]).expand(6, -1).contiguous(), weights)
    torch.testing.assert_close(with_gradients(run_table, experts, *inputs), with_gradients(loop, experts, *inputs))


def test_nan_weights_spoil_their_token_only() -> None:
    experts, (hidden, index, weights) = case(6)
    weights[2] = torch.nan
    index = index.clamp(max=NUM_EXPERTS - 1)
    spoiled = run_table(experts, hidden, index, weights).isnan().any(dim=1)
    assert spoiled.tolist() == [False, False, True, False, False, False]


def test_an_activation_with_parameters_is_trained() -> None:
    experts, inputs = case(9)
    experts.act_fn = nn.PReLU(dtype=torch.float64)
    torch.testing.assert_close(with_gradients(run_table, experts, *inputs), with_gradients(loop, experts, *inputs))


def test_the_gradient_of_silu_written_by_hand_is_autograds() -> None:
    experts, inputs = case(9)
    experts.act_fn = nn.SiLU()
    by_hand = with_gradients(run_table, experts, *inputs)
    plain = copy.deepcopy(experts)
    del plain.act_fn
    plain.act_fn = nn.functional.silu
    torch.testing.assert_close(by_hand, with_gradients(run_table, plain, *inputs))


def test_transformers_grouped_implementation_agrees() -> None:
    experts, (hidden, index, weights) = case(9, dtype=torch.float32)
    inputs = (hidden, index.clamp(max=NUM_EXPERTS - 1), weights)
    grouped = with_gradients(ALL_EXPERTS_FUNCTIONS["grouped_mm"], experts, *inputs)
    torch.testing.assert_close(with_gradients(ALL_EXPERTS_FUNCTIONS["swarm_table"], experts, *inputs), grouped)


def test_adapters_on_expert_parameters_train_as_with_eager() -> None:
    found = []
    for implementation in ("eager", "swarm_table"):
        base = tiny_model("mixtral", num_layers=1)
        base.set_experts_implementation(implementation)
        torch.manual_seed(0)
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        settings = LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
        model = get_peft_model(base, settings)
        tokens = torch.arange(3, 15).reshape(2, 6)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in model.parameters() if one.requires_grad)])
    assert len(found[0]) == 5
    torch.testing.assert_close(found[1], found[0])

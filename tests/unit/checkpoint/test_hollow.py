"""Hollow weights tell what they are, hold one element, and stay hollow through all that is done to modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from swarm_plugins.checkpoint.hollow import HollowModule, HollowWeight, hollow_tensor, is_hollow, keep_from_ddp
from swarm_plugins.errors import UnsupportedError


class Weight(HollowWeight):
    refusal = "the weight was read ({what})"


class HollowLinear(HollowModule, nn.Linear):
    pass


@pytest.fixture
def linear() -> nn.Module:
    module = nn.Linear(300, 200)
    module.weight = Weight.of(module.weight.shape, torch.float32, "cpu")
    module.register_buffer("kept", torch.tensor([1.5]))
    module.register_buffer("fleeting", torch.tensor([2.5]), persistent=False)
    module.__class__ = HollowLinear
    return module


def test_a_weight_keeps_shape_dtype_and_device_over_one_element(linear: nn.Module) -> None:
    weight = linear.weight
    assert (weight.shape, weight.dtype, weight.device) == ((200, 300), torch.float32, torch.device("cpu"))
    assert weight.untyped_storage().nbytes() == 4
    assert not weight.requires_grad
    assert repr(weight) == "Weight(shape=(200, 300), dtype=torch.float32, device='cpu')"
    assert is_hollow(weight)
    assert not is_hollow(torch.zeros(2))
    assert not is_hollow(torch.zeros(4)[:2])


def test_scalars_and_empty_tensors_can_be_hollow() -> None:
    assert hollow_tensor(torch.Size([]), torch.float32, "cpu").shape == ()
    assert hollow_tensor(torch.Size([0, 3]), torch.float32, "cpu").shape == (0, 3)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        pytest.param(lambda one: one + 1, "add", id="sum"),
        pytest.param(lambda one: one.T, "T", id="transposed"),
        pytest.param(lambda one: one.data.mul_(2), "mul_", id="in-place"),
        pytest.param(lambda one: one[0], "__getitem__", id="item"),
    ],
)
def test_values_are_refused_by_name(linear: nn.Module, use: Callable[[Tensor], object], what: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"the weight was read \({what}\)"):
        use(linear.weight)


def test_casts_and_moves_reach_the_other_tensors_and_take_no_memory(linear: nn.Module) -> None:
    linear.to(torch.bfloat16)
    assert {linear.weight.dtype, linear.bias.dtype, linear.kept.dtype} == {torch.bfloat16}
    assert linear.weight.untyped_storage().nbytes() == 2
    assert linear.kept.item() == 1.5
    linear.to("meta")
    assert linear.weight.device.type == "meta"
    assert linear.weight.shape == (200, 300)


def test_a_cast_that_changes_nothing_keeps_the_parameter(linear: nn.Module) -> None:
    before = linear.weight
    linear.float()
    assert linear.weight is before


def test_a_cast_that_fails_puts_the_weights_back(linear: nn.Module) -> None:
    def fail(tensor: Tensor) -> Tensor:
        return tensor if tensor.ndim == 0 else pytest.fail("the bias")

    before = linear.weight
    with pytest.raises(pytest.fail.Exception, match="the bias"):
        linear._apply(fail)
    assert linear.weight is before


def test_the_state_leaves_hollow_tensors_out_and_reports_values_for_them(linear: nn.Module) -> None:
    assert list(linear.state_dict()) == ["bias", "kept"]
    found = linear.load_state_dict({"weight": torch.zeros(200, 300)}, strict=False)
    assert found.unexpected_keys == ["weight"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deep", "pickle"])
def test_copies_stay_hollow(linear: nn.Module, copied: Callable[[nn.Module], nn.Module]) -> None:
    linear.weight.requires_grad_(True)
    twin = copied(linear)
    assert isinstance(twin.weight, Weight)
    assert twin.weight is not linear.weight
    assert twin.weight.untyped_storage().nbytes() == 4
    assert twin.weight.requires_grad
    assert torch.equal(twin.bias, linear.bias)


def test_ddp_leaves_hollow_weights_alone_under_the_names_they_have_by_then(linear: nn.Module) -> None:
    inner = nn.Sequential(linear, nn.BatchNorm1d(200))
    keep_from_ddp(inner)
    inner.add_module("0", nn.Sequential(linear))  # as PEFT puts a layer around another

    def left_alone(model: nn.Module) -> set[str]:
        return set(model._ddp_params_and_buffers_to_ignore)  # type: ignore[arg-type]  # what DDP does

    names = {name for name in left_alone(inner) if not name.startswith("base_model.")}
    assert "0.0.weight" in names
    assert not names & {"0.0.bias", "1.weight", "1.running_mean"}
    assert {f"base_model.model.{name}" for name in names} < left_alone(inner)
    twin = copy.deepcopy(inner)
    del inner
    assert "0.0.weight" in left_alone(twin)
    assert "0.0.weight" in left_alone(pickle.loads(pickle.dumps(twin)))

"""Weights between a module and the shared state."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from swarm_plugins.together.outer import outer_step
from swarm_plugins.together.tensors import TrainedTensors


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {
        f"model.base.layers.0.q.lora_{half}.default.weight": nn.Parameter(torch.randn(2, 3, dtype=dtype))
        for half in ("A", "B")
    }


def add(tensors: dict[str, nn.Parameter], value: float) -> None:
    with torch.no_grad():
        for one in tensors.values():
            one += value


def test_names_do_not_depend_on_what_a_user_calls_the_model() -> None:
    here = parameters()
    there = {name.replace("model.base", "net.wrapped.inner"): one for name, one in here.items()}
    assert TrainedTensors(here).digest("") == TrainedTensors(there).digest("")
    fewer = dict(list(here.items())[:1])
    assert TrainedTensors(here).digest("") != TrainedTensors(fewer).digest("")


def test_changes_are_start_minus_now() -> None:
    here = parameters()
    tensors = TrainedTensors(here)
    tensors.load(tensors.first_state())
    add(here, 0.5)
    for change in tensors.changes():
        np.testing.assert_allclose(change, -0.5, atol=1e-6)


def test_a_weight_in_sixteen_bits_owes_nothing_for_its_rounding() -> None:
    here = parameters(torch.bfloat16)
    tensors = TrainedTensors(here)
    state = outer_step(tensors.first_state(), [np.full((2, 3), 1e-4)] * 2, samples=1, lr=0.7, momentum=0.9)
    tensors.load(state)
    assert all((change == 0).all() for change in tensors.changes())


def test_what_was_left_out_is_added_to_the_next_round() -> None:
    here = parameters()
    tensors = TrainedTensors(here)
    state = tensors.first_state()
    tensors.load(state)
    add(here, 1.0)
    tensors.settle(tensors.changes(), is_counted=False)
    tensors.load(state)
    add(here, 2.0)
    for change in tensors.changes():
        np.testing.assert_allclose(change, -3.0, atol=1e-6)
    tensors.settle(tensors.changes(), is_counted=True)
    tensors.load(state)
    assert all((change == 0).all() for change in tensors.changes())


def test_what_a_single_number_owes_is_kept_in_a_checkpoint() -> None:
    here = {"scale": nn.Parameter(torch.tensor(1.0))}
    tensors = TrainedTensors(here)
    tensors.load(tensors.first_state())
    add(here, 0.5)
    tensors.settle(tensors.changes(), is_counted=False)
    again = TrainedTensors(here)
    again.load(again.first_state())
    again.restore_owed(tensors.owed)
    assert again.changes() == [np.asarray(-0.5)]


def test_training_goes_on_from_another_state_of_the_same_round() -> None:
    here = parameters()
    tensors = TrainedTensors(here)
    before = tensors.first_state()
    tensors.load(before)
    add(here, 1.0)
    after = TrainedTensors(parameters()).first_state()
    tensors.rebase(after)
    for value, weight in zip(here.values(), after.weights, strict=True):
        np.testing.assert_allclose(value.detach().numpy(), weight + 1.0, atol=1e-6)
    np.testing.assert_allclose(tensors.changes()[0], -1.0, atol=1e-6)


def test_the_shared_weights_are_shown_for_a_while() -> None:
    here = parameters()
    tensors = TrainedTensors(here)
    state = tensors.first_state()
    tensors.load(state)
    add(here, 1.0)
    trained = next(iter(here.values())).detach().clone()
    with tensors.shown(state):
        np.testing.assert_array_equal(next(iter(here.values())).detach().numpy(), state.weights[0])
    torch.testing.assert_close(next(iter(here.values())).detach(), trained, rtol=0, atol=0)

"""Experts cut out of a dense MLP."""

from __future__ import annotations

import torch

from swarm_plugins.demo.experts import GatedMLP, cut_expert, moments
from swarm_plugins.demo.upcycling import Seen, cut_experts

WIDTH, NEURONS = 12, 40


def dense() -> GatedMLP:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(NEURONS, WIDTH, generator=generator) for _ in range(2))
    return GatedMLP(gate, up, torch.randn(WIDTH, NEURONS, generator=generator))


def output(mlp: GatedMLP, states: torch.Tensor) -> torch.Tensor:
    return mlp.inner(states) @ mlp.down.T


def test_with_all_neurons_nothing_changes() -> None:
    states = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1))
    cut = cut_expert(dense(), moments(dense(), states), NEURONS)
    assert torch.equal(cut.gate, dense().gate)
    assert torch.equal(cut.down, dense().down)


def test_the_fit_makes_up_for_part_of_what_was_cut_on_other_states_too() -> None:
    generator = torch.Generator().manual_seed(1)
    # Of few directions, as the states of one cluster are.
    mixing = torch.randn(4, WIDTH, generator=generator)
    fitted_on, others = (torch.randn(400, 4, generator=generator) @ mixing for _ in range(2))
    cut = cut_expert(dense(), moments(dense(), fitted_on), NEURONS * 3 // 4)
    kept = [int((dense().gate == row).all(1).nonzero()) for row in cut.gate]
    unfitted = cut._replace(down=dense().down[:, kept])
    wanted = output(dense(), others)
    error, without = ((output(mlp, others) - wanted).norm() for mlp in (cut, unfitted))
    assert error < 0.7 * without


def test_a_neuron_that_only_first_positions_use_is_in_every_expert() -> None:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(400, WIDTH, generator=generator)
    states[:, 0] = 0
    first = torch.zeros(8, WIDTH)
    first[:, 0] = 30.0
    whole = dense()
    # Open to the first positions alone.
    whole.gate[7], whole.up[7] = torch.eye(WIDTH)[0], torch.eye(WIDTH)[0]
    router = torch.randn(4, WIDTH, generator=generator)
    experts = list(cut_experts(whole, router, Seen(states=states, first=first), NEURONS // 2))
    assert len(experts) == 4
    wanted = output(whole, first)
    for expert in experts:
        assert (expert.gate == whole.gate[7]).all(1).any()
        assert (output(expert, first) - wanted).norm() < 0.1 * wanted.norm()


def test_states_that_say_nothing_leave_the_dense_weights() -> None:
    states = torch.zeros(3, WIDTH)
    cut = cut_expert(dense(), moments(dense(), states), 30)
    assert cut.down.shape == (WIDTH, 30)
    assert torch.isfinite(cut.down).all()
    assert all((column == dense().down.T).all(1).any() for column in cut.down.T)

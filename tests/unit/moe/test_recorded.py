"""Which blocks have router logits, and of how many experts, is known from a model without running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swarm_plugins.moe.recorded import recorded_routers, router_widths
from swarm_plugins.testing.models import tiny_model


@pytest.mark.parametrize(
    ("family", "widths"),
    [
        pytest.param("llama", {}, id="dense"),
        pytest.param("mixtral", {0: 4, 1: 4, 2: 4, 3: 4}, id="all-alike"),
        pytest.param("deepseek_v3", {1: 4, 2: 4, 3: 4}, id="first-dense"),
        pytest.param("prmoe", {1: 4, 2: 3, 3: 6}, id="pyramid"),
    ],
)
def test_widths_are_those_of_the_recorded_logits(family: str, widths: dict[int, int]) -> None:
    model = tiny_model(family).base_model
    assert router_widths(model, dict(enumerate(model.layers))) == widths
    seen: dict[int, int] = {}

    def note(block: int, index: int, output: Any) -> None:
        seen[block] = output[index].shape[-1]

    for block, layer in enumerate(model.layers):
        for router, index in recorded_routers(model, layer):
            router.register_forward_hook(lambda _, args, output, block=block, index=index: note(block, index, output))
    model(torch.tensor([[5, 17, 99]]))
    assert seen == widths


def test_a_router_whose_rows_are_not_its_experts_has_an_unknown_width() -> None:
    model = tiny_model("mixtral").base_model
    # As Inkling's, which has rows for shared experts as well and cuts them off.
    model.layers[1].mlp.gate.weight = nn.Parameter(torch.zeros(5, 32))
    assert router_widths(model, dict(enumerate(model.layers))) == {0: 4, 1: None, 2: 4, 3: 4}

"""A model whose layer loop remote blocks cannot stand in is refused when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from swarm_plugins.backbone.decoder_layer import make_remote
from swarm_plugins.backbone.probe import probe_layer_loop
from swarm_plugins.backbone.stack import RemoteStack
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import UnsupportedError


class Layer(nn.Module):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
        return hidden_states


class Base(nn.Module):
    """A base model around a loop."""

    def __init__(self, loop: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.loop = loop

    def forward(self, input_ids: Tensor, use_cache: bool) -> tuple[Tensor]:
        return (self.loop(self.layers, self.embed(input_ids)),)


def plain(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden, attention_mask=None)
    return hidden


def in_tuples(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden)[0]
    return hidden


def in_pairs(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden, _ = layer(hidden)
    return hidden


def scaled(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden) * 2
    return hidden


def of_all_tokens(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden)[:, slice(0, None)]  # a view of all of it
    return hidden


def of_the_last_tokens(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden)[:, -2:]
    return hidden


def skipping(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    return plain(layers[1:], hidden)


def probed(loop: Callable[[nn.ModuleList, Tensor], Tensor], version: Any) -> RemoteStack:
    base = Base(loop)
    stack = RemoteStack(version=version, num_blocks=3)
    make_remote(base.layers, stack, "cpu")
    probe_layer_loop(base, stack, "cpu")
    return stack


@pytest.fixture(scope="module")
def version(directory) -> Any:
    return Checkpoint.open(directory).version


@pytest.mark.parametrize(("loop", "number"), [(plain, 0), (of_all_tokens, 0), (in_tuples, 1), (in_pairs, 2)])
def test_the_form_in_which_layers_return_is_found_out(loop, number: int, version: Any) -> None:
    stack = probed(loop, version)
    assert stack.num_returned == number
    # The probe leaves nothing behind.
    assert "run_block" not in vars(stack)


def test_blocks_that_are_skipped_are_noted(version: Any) -> None:
    assert probed(skipping, version).called == [1, 2]


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        pytest.param(scaled, "hidden states are changed between blocks 0 and 1", id="scaled"),
        pytest.param(of_the_last_tokens, "hidden states are changed between blocks 0 and 1", id="fewer"),
    ],
)
def test_other_loops_are_refused_with_the_reason(loop, reason: str, version: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"Base cannot have remote blocks: .*{reason}.*another family"):
        probed(loop, version)

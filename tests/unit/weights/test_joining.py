"""Layers in 4 bits that become one: the same bits, in the same memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swarm_plugins.weights.joining import join
from swarm_plugins.weights.kernels.int4pack import MOST_ROWS, is_native_order
from swarm_plugins.weights.linears import PackedLinear, packed

native = pytest.mark.skipif(not is_native_order(), reason="this CPU's product takes codes in an order of its own")


def layers(*rows: int, bits: int = 4, has_bias: bool = False) -> list[PackedLinear]:
    return [packed(nn.Linear(96, count, bias=has_bias), bits) for count in rows]


@native
@pytest.mark.parametrize("bits", [4, 3])
@torch.no_grad()
def test_joined_layers_give_the_same_bits_and_share_their_memory(bits: int) -> None:
    parts = layers(128, 64, 64, bits=bits)
    for count in (1, 5, MOST_ROWS):
        rows = torch.randn(count, 96)
        before = torch.cat([part(rows) for part in parts], dim=1)
        joined = join(parts)
        assert joined is not None
        assert torch.equal(joined(rows), before)
        assert torch.equal(torch.cat([part(rows) for part in parts], dim=1), before), "each by itself, as adapters need"
    memory = {
        part.parts[name].untyped_storage().data_ptr() for part in (joined, *parts) for name in ("codes", "scales")
    }
    assert len(memory) == 2
    assert torch.equal(joined.widened(), torch.cat([part.widened() for part in parts]))


@native
def test_gradients_of_the_input_are_those_of_the_parts() -> None:
    parts, rows = layers(64, 64), torch.randn(3, 96, requires_grad=True)
    [expected] = torch.autograd.grad(sum(part(rows).sum() for part in parts), rows)
    joined = join(parts)
    assert joined is not None
    [found] = torch.autograd.grad(joined(rows).sum(), rows)
    torch.testing.assert_close(found, expected)


def test_what_is_no_whole_number_of_tiles_or_differs_stays_apart() -> None:
    assert join([]) is None
    assert join([nn.Linear(96, 64)]) is None
    assert join([*layers(64), nn.Linear(96, 64)]) is None
    assert join(layers(64, 96)) is None
    assert join(layers(64, 64, has_bias=True)) is None
    assert join([*layers(64), *layers(64, bits=3)]) is None
    assert join([*layers(64), packed(nn.Linear(64, 64, bias=False), 4)]) is None

from __future__ import annotations

import torch
from fake_server import WIDTH, FakeCache, FakeRunner

from swarm_plugins.blocks.types import SpanInputs, SpanOutputs, StepInputs
from swarm_plugins.server.devices import inputs_to, outputs_to_cpu

META = torch.device("meta")


def test_every_tensor_of_a_forward_moves() -> None:
    ones = torch.ones(1, 2, WIDTH)
    inputs = SpanInputs(
        blocks=range(2, 4),
        hidden=ones,
        position_ids=torch.zeros(1, 2, dtype=torch.int64),
        attention_mask=torch.ones(1, 2, dtype=torch.bool),
        prefix=(ones, ones),
        collect_router=True,
    )
    moved = inputs_to(inputs, META)
    tensors = (moved.hidden, moved.position_ids, moved.attention_mask, *moved.prefix)
    assert all(tensor is not None and tensor.device == META for tensor in tensors)
    assert moved.blocks == inputs.blocks
    assert moved.collect_router


def test_every_tensor_of_a_step_moves_and_its_cache_stays() -> None:
    cache = FakeCache(FakeRunner(), 1)
    step = StepInputs(cache=cache, blocks=range(2, 4), hidden=torch.ones(1, 1, WIDTH))
    moved = inputs_to(step, META)
    assert moved.hidden.device == META
    assert moved.position_ids is None
    assert moved.cache is cache


def test_nothing_is_copied_on_the_cpu() -> None:
    step = StepInputs(cache=FakeCache(FakeRunner(), 1), blocks=range(2, 4), hidden=torch.ones(1, 1, WIDTH))
    outputs = SpanOutputs(hidden=step.hidden)
    assert inputs_to(step, torch.device("cpu")) is step
    assert outputs_to_cpu(outputs) is outputs

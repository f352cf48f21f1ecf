"""Tensors between the wire (CPU) and the device that computes.

Copies wait for the device, so they belong on the compute thread: the event loop must never stand still for one.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch
from torch import Tensor

from swarm_plugins.blocks.types import SpanInputs, SpanOutputs, StepInputs

__all__ = ["inputs_to", "outputs_to_cpu"]

Inputs = TypeVar("Inputs", SpanInputs, StepInputs)


def inputs_to(inputs: Inputs, device: torch.device) -> Inputs:
    """Returns the inputs with their tensors on a device; adapters and caches are there already."""
    if device.type == "cpu":
        return inputs
    moved: dict[str, object] = {
        "hidden": inputs.hidden.to(device),
        "position_ids": _to(inputs.position_ids, device),
        "attention_mask": _to(inputs.attention_mask, device),
    }
    if isinstance(inputs, SpanInputs):
        moved["prefix"] = tuple(tensor.to(device) for tensor in inputs.prefix)
    return dataclasses.replace(inputs, **moved)  # type: ignore[arg-type]  # the fields above


def outputs_to_cpu(outputs: SpanOutputs) -> SpanOutputs:
    """Returns the outputs on the CPU."""
    if outputs.hidden.device.type == "cpu":
        return outputs
    return SpanOutputs(
        hidden=outputs.hidden.cpu(),
        hidden_states=tuple(tensor.cpu() for tensor in outputs.hidden_states),
        router_logits=tuple(tensor.cpu() for tensor in outputs.router_logits),
        router_blocks=outputs.router_blocks,
    )


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)

"""A batch with adapters, dropout and a prefix, for the blocks of a small mixture of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec, adapter_digest
from swarm_plugins.block_io import AdapterUse
from swarm_plugins.blocks import Span, SpanInputs
from swarm_plugins.blocks.adapters.checks import check_adapter
from swarm_plugins.server.state.activations import GraphMeter
from swarm_plugins.server.state.gradients import Gradients, Needs, gradients

BLOCKS, SHAPE = range(4), (2, 12, 32)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def inputs_of(span: Span) -> SpanInputs:
    width = span.module(0, "self_attn.q_proj").weight.shape
    shapes = ((2, int(width[1])), (int(width[0]), 2))
    modules = tuple(
        AdapterModule(
            block=block,
            module="self_attn.q_proj",
            kind="lora",
            shapes=shapes,
            dropout=0.3,
        )
        for block in BLOCKS
    )
    spec = AdapterSpec(modules=modules)
    tensors = [random(*shape) for module in modules for shape in module.shapes]
    adapter = check_adapter(spec, tensors, span, digest=adapter_digest(spec, tensors))
    layout = span.spec.kv_layouts[0]
    prefix = [random(2, layout.key_heads, 3, layout.key_width) for _ in range(2 * len(BLOCKS))]
    return SpanInputs(
        blocks=BLOCKS,
        hidden=random(*SHAPE),
        adapters=AdapterUse(adapters=(adapter,), dropout_seed=7),
        prefix=tuple(prefix),
        collect_hidden=True,
        collect_router=True,
    )


def found(span: Span, inputs: SpanInputs, limit_bytes: int, boundaries: list[int] | None = None) -> Gradients:
    with torch.no_grad():
        outputs = span.forward(inputs)
    return gradients(
        span,
        inputs,
        outputs.with_tensors([random(*SHAPE), *(random(*tensor.shape) for tensor in outputs.tensors[1:])]),
        Needs(adapters=True, prefix=True),
        limit_bytes=limit_bytes,
        between=lambda: None if boundaries is None else boundaries.append(1),
    )


def graph_bytes(span: Span, inputs: SpanInputs) -> int:
    meter = GraphMeter(1 << 40, ())
    hidden = inputs.hidden.clone().requires_grad_()
    with meter.recording():
        span.forward(dataclasses.replace(inputs, hidden=hidden))
    return meter.num_bytes


def flat(one: Gradients) -> Sequence[Tensor]:
    assert one.hidden is not None
    return (one.hidden, *one.adapters, *one.prefix)

"""A backward whose graph is over the budget runs block by block: same gradients, bounded memory, steps in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec, adapter_digest
from swarm_plugins.block_io import AdapterUse, SpanOutputs
from swarm_plugins.blocks import Span, SpanInputs
from swarm_plugins.blocks.adapter_checks import check_adapter
from swarm_plugins.blocks.load import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CapacityError
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.state.activations import GraphMeter
from swarm_plugins.server.state.gradients import Gradients, gradients
from swarm_plugins.testing.models import save_tiny

BLOCKS, SHAPE = range(4), (2, 12, 32)


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> Span:
    return load_span(Checkpoint.open(str(save_tiny("mixtral", tmp_path_factory.mktemp("model")))), BLOCKS)


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
        needs_adapters=True,
        needs_prefix=True,
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


def test_gradients_are_those_of_one_graph(span: Span) -> None:
    inputs = inputs_of(span)
    whole = found(span, inputs, 1 << 40)
    boundaries: list[int] = []
    by_block = found(span, inputs, graph_bytes(span, inputs) // 2, boundaries)
    assert len(boundaries) == len(BLOCKS) - 1
    for one, other in zip(flat(by_block), flat(whole), strict=True):
        # The same operations, but the gradients of a block's output and input are summed in another order.
        assert float((one - other).norm() / other.norm()) < 1e-5


def test_a_single_block_over_the_limit_is_refused(span: Span) -> None:
    with pytest.raises(CapacityError, match=r"graph of block 3 takes more than 1000 bytes .* \[2, 12\] tokens"):
        found(span, inputs_of(span), 1000)


def test_gradients_that_fit_no_output_are_refused_there_too(span: Span) -> None:
    with pytest.raises(RequestError, match=r"a gradient has shape \[1, 1, 32\]"):
        gradients(span, inputs_of(span), SpanOutputs(hidden=torch.zeros(1, 1, 32)), limit_bytes=1000)

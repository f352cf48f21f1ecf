"""A backward whose graph is over the budget runs block by block: same gradients, bounded memory, steps in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gradients_kit import BLOCKS, SHAPE, flat, found, graph_bytes, inputs_of, random
from type_models import save_type

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.blocks import Span
from swarm_plugins.blocks.load import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CapacityError
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.state.gradients import Needs, gradients


def test_gradients_are_those_of_one_graph(span: Span) -> None:
    inputs = inputs_of(span)
    whole = found(span, inputs, 1 << 40)
    boundaries: list[int] = []
    by_block = found(span, inputs, graph_bytes(span, inputs) // 2, boundaries)
    assert len(boundaries) == len(BLOCKS) - 1
    for one, other in zip(flat(by_block), flat(whole), strict=True):
        # The same operations, but the gradients of a block's output and input are summed in another order.
        assert float((one - other).norm() / other.norm()) < 1e-5


def test_blocks_that_only_run_together_share_a_graph(tmp_path: Path) -> None:
    # Blocks 1 and 2 use what block 0 has chosen; block 3 runs apart.
    span = load_span(Checkpoint.open(save_type("glm_moe_dsa", tmp_path)), BLOCKS)
    inputs = SpanInputs(blocks=BLOCKS, hidden=random(*SHAPE), collect_hidden=True, collect_router=True)
    whole = found(span, inputs, 1 << 40)
    num_bytes, boundaries = graph_bytes(span, inputs), list[int]()
    by_piece = found(span, inputs, num_bytes * 9 // 10, boundaries)
    assert len(boundaries) == 1
    for one, other in zip(flat(by_piece), flat(whole), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5
    with pytest.raises(CapacityError, match="graph of blocks 0:3 takes more than"):
        found(span, inputs, num_bytes // 2)


def test_a_single_block_over_the_limit_is_refused(span: Span) -> None:
    with pytest.raises(CapacityError, match=r"graph of block 3 takes more than 1000 bytes .* \[2, 12\] tokens"):
        found(span, inputs_of(span), 1000)


def test_gradients_that_fit_no_output_are_refused_there_too(span: Span) -> None:
    with pytest.raises(RequestError, match=r"a gradient has shape \[1, 1, 32\]"):
        gradients(span, inputs_of(span), SpanOutputs(hidden=torch.zeros(1, 1, 32)), Needs(), limit_bytes=1000)

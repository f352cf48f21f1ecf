"""A batch cut along its rows gives what the whole batch gives."""

from __future__ import annotations

import pytest
import torch

from swarm_plugins.client.chain_call import BlockInputs, BlockOutputs
from swarm_plugins.client.splitting import run_in_row_chunks, tokens_per_message
from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.limits import DEFAULT_LIMITS


def run(inputs: BlockInputs) -> BlockOutputs:
    rows = inputs.hidden.sum(-1).flatten()[:, None]  # [B * S, 1]
    mask = 0 if inputs.attention_mask is None else inputs.attention_mask.float()[..., None]
    return BlockOutputs(
        hidden=inputs.hidden * 2 + mask, hidden_states=[inputs.hidden + 1], router_logits=[rows], router_blocks=[3]
    )


@pytest.mark.parametrize(("max_tokens", "calls"), [(None, 1), (100, 1), (15, 1), (10, 2), (7, 3), (1, 5)])
def test_parts_joined_equal_the_whole(max_tokens: int | None, calls: int) -> None:
    seen = []

    def counted(inputs: BlockInputs) -> BlockOutputs:
        seen.append(inputs.hidden.shape[0])
        return run(inputs)

    inputs = BlockInputs(
        hidden=torch.randn(5, 3, 4),
        attention_mask=torch.rand(5, 3) > 0.5,
        position_ids=torch.arange(3)[None],
    )
    whole, parts = run(inputs), run_in_row_chunks(inputs, max_tokens, counted)
    assert len(seen) == calls
    assert torch.equal(parts.hidden, whole.hidden)
    assert torch.equal(parts.hidden_states[0], whole.hidden_states[0])
    assert torch.equal(parts.router_logits[0], whole.router_logits[0])
    assert parts.router_blocks == [3]


def test_parts_with_routers_that_differ_are_refused_by_name() -> None:
    widths = iter((4, 8))

    def lying(inputs: BlockInputs) -> BlockOutputs:
        logits = torch.zeros(inputs.hidden.shape[0] * 3, next(widths))
        return BlockOutputs(hidden=inputs.hidden, router_logits=[logits], router_blocks=[3])

    with pytest.raises(ProtocolError, match=r"\[\(3, 4\)\] for one part .* \[\(3, 8\)\] for another"):
        run_in_row_chunks(BlockInputs(hidden=torch.zeros(2, 3, 4), collect_router=True), 3, lying)


@pytest.mark.parametrize(
    ("collected", "states"), [({}, 1), ({"collect_hidden": True}, 30), ({"collect_router": True}, 31)], ids=str
)
def test_no_answer_is_larger_than_a_message(collected: dict[str, bool], states: int) -> None:
    inputs = BlockInputs(hidden=torch.zeros(1, 1, 64, dtype=torch.float32), **collected)
    found = tokens_per_message(inputs, 30)
    size = states * 64 * 4
    assert found * size <= DEFAULT_LIMITS.max_message_bytes < (found + 1) * size

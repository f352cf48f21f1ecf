"""A batch cut along its rows gives what the whole batch gives."""

from __future__ import annotations

import pytest
import torch

from swarm_plugins.client.chain_call import BlockInputs, BlockOutputs
from swarm_plugins.client.splitting import run_in_row_chunks


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

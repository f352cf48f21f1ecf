"""A batch cut along its rows gives what the whole batch gives."""

from __future__ import annotations

import pytest
import torch

from swarm_plugins.block_io import SpanInputs, SpanOutputs, join_outputs
from swarm_plugins.client.answers import check_same_routers
from swarm_plugins.client.splitting import check_whole, chunk_rows, chunks_within, tokens_per_message
from swarm_plugins.errors import ProtocolError, UnsupportedError
from swarm_plugins.transport.limits import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES


def run(inputs: SpanInputs) -> SpanOutputs:
    rows = inputs.hidden.sum(-1).flatten()[:, None]  # [B * S, 1]
    mask = 0 if inputs.attention_mask is None else inputs.attention_mask.float()[..., None]
    return SpanOutputs(
        hidden=inputs.hidden * 2 + mask, hidden_states=(inputs.hidden + 1,), router_logits=(rows,), router_blocks=(3,)
    )


def test_a_batch_without_rows_is_one_part() -> None:
    inputs = SpanInputs(blocks=range(3), hidden=torch.zeros(0, 3, 4))
    assert chunk_rows(0, chunks_within(inputs, 10)) == [slice(0, 0)]


@pytest.mark.parametrize(("max_tokens", "calls"), [(100, 1), (15, 1), (10, 2), (7, 3), (1, 5)])
def test_parts_joined_equal_the_whole(max_tokens: int, calls: int) -> None:
    inputs = SpanInputs(
        blocks=range(3),
        hidden=torch.randn(5, 3, 4),
        attention_mask=torch.rand(5, 3) > 0.5,
        position_ids=torch.arange(3)[None],
    )
    parts = [inputs.take_rows(rows) for rows in chunk_rows(5, chunks_within(inputs, max_tokens))]
    assert len(parts) == calls
    whole, joined = run(inputs), join_outputs([run(part) for part in parts], dim=0)
    for got, want in zip(joined.tensors, whole.tensors, strict=True):
        assert torch.equal(got, want)
    assert joined.router_blocks == (3,)


def test_parts_with_routers_that_differ_are_refused_by_name() -> None:
    hidden = torch.zeros(1, 3, 4)
    parts = [SpanOutputs(hidden=hidden, router_logits=(torch.zeros(3, width),), router_blocks=(3,)) for width in (4, 8)]
    with pytest.raises(ProtocolError, match=r"\[\(3, 4\)\] for one part .* \[\(3, 8\)\] for another"):
        check_same_routers(parts, "the swarm")


@pytest.mark.parametrize(
    ("collected", "states"), [({}, 1), ({"collect_hidden": True}, 30), ({"collect_router": True}, 31)], ids=str
)
def test_no_answer_is_larger_than_a_message(collected: dict[str, bool], states: int) -> None:
    inputs = SpanInputs(blocks=range(30), hidden=torch.zeros(1, 1, 64, dtype=torch.float32), **collected)
    size = 64 * 4
    for backward, num_states in ((False, states), (True, states + 1)):
        found = tokens_per_message(inputs, backward=backward)
        room = MAX_MESSAGE_BYTES - 2 * MAX_METADATA_BYTES
        assert found * num_states * size <= room < (found + 1) * num_states * size


def test_tokens_that_belong_together_and_fit_in_no_message_are_refused() -> None:
    hidden = torch.empty(9, 4200, 4096, device="meta")
    inputs = SpanInputs(blocks=range(3), hidden=hidden, whole_beyond=4096)
    with pytest.raises(UnsupportedError, match="the first 4097 tokens of 9 rows have to run at once"):
        check_whole(inputs, 0)
    check_whole(inputs.take_rows(slice(0, 4)), 0)
    check_whole(inputs, 4097)

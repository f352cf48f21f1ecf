"""Limits the size of requests and cuts batches to fit."""

from __future__ import annotations

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.transport.limits import DEFAULT_LIMITS


def tokens_per_message(inputs: SpanInputs) -> int:
    """Returns how many tokens of an input fit in one request, so that its answer stays within the message limit."""
    num_blocks = len(inputs.blocks)
    num_states = (num_blocks if inputs.collect_hidden else 1) + (num_blocks if inputs.collect_router else 0)
    token_bytes = inputs.hidden.shape[-1] * inputs.hidden.element_size()
    return max(1, DEFAULT_LIMITS.max_message_bytes // (num_states * token_bytes))


def cut_rows(inputs: SpanInputs, max_tokens: int) -> list[SpanInputs]:
    """Cuts a batch into parts of at most ``max_tokens``. A single row is never cut: the server refuses it."""
    batch, length = inputs.hidden.shape[:2]
    rows = max(1, max_tokens // max(length, 1))
    if rows >= batch:
        return [inputs]
    return [inputs.take_rows(slice(start, min(start + rows, batch))) for start in range(0, batch, rows)]

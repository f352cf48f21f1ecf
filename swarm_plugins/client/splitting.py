"""Limits the size of requests and cuts batches to fit."""

from __future__ import annotations

import itertools

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.transport.limits import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES

_STATE_BYTES = MAX_MESSAGE_BYTES - 2 * MAX_METADATA_BYTES
"""How much of a message hidden states may fill; the rest is for masks, positions and metadata."""


def tokens_per_message(inputs: SpanInputs, *, backward: bool = False) -> int:
    """Returns how many tokens of an input fit in one request, so that its answer stays within the message limit.

    Args:
        inputs: The input.
        backward: Whether a backward follows, which brings the input once more if its graph was not kept.
    """
    num_blocks = len(inputs.blocks)
    num_states = (num_blocks if inputs.collects_inner else 1) + (num_blocks if inputs.collect_router else 0)
    token_bytes = inputs.hidden.shape[-1] * inputs.hidden.element_size()
    return max(1, _STATE_BYTES // ((num_states + backward) * token_bytes))


def check_whole(inputs: SpanInputs, cached: int) -> None:
    """Raises UnsupportedError if the new tokens that must run at once do not fit in one message."""
    rows, least = inputs.hidden.shape[0], inputs.num_together(cached) or 1
    if least > 1 and rows * least > tokens_per_message(inputs):
        raise UnsupportedError(
            f"the first {least} tokens of {rows} rows have to run at once (padding that states of fixed size see, or "
            "LongRoPE) and do not fit in one message: give fewer rows, and leave out output_hidden_states"
        )


def chunks_within(inputs: SpanInputs, max_tokens: int) -> int:
    """Returns into how many chunks a batch has to be cut so that each has at most ``max_tokens``.

    A single row is never cut: the server refuses it if it is too long.
    """
    batch, length = inputs.hidden.shape[:2]
    rows = max(1, max_tokens // max(length, 1))
    return max(1, -(-batch // rows))


def chunk_rows(num_rows: int, num_chunks: int) -> list[slice]:
    """Returns the rows of each chunk; their numbers differ by one at most."""
    ends = [num_rows * index // num_chunks for index in range(num_chunks + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]

"""Batches larger than the servers allow at once are cut along the rows and joined again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from swarm_plugins.client.chain_call import BlockInputs, BlockOutputs
from swarm_plugins.client.checks import check_same_routers
from swarm_plugins.transport.limits import DEFAULT_LIMITS

__all__ = ["run_in_row_chunks", "tokens_per_message"]


def tokens_per_message(inputs: BlockInputs, num_blocks: int) -> int:
    """Returns how many tokens of an input may go at once, so that no answer is larger than a message may be.

    Args:
        inputs: What the blocks get.
        num_blocks: Blocks whose outputs may come in one answer, if they are asked for.
    """
    num_states = (num_blocks if inputs.collect_hidden else 1) + (num_blocks if inputs.collect_router else 0)
    token_bytes = inputs.hidden.shape[-1] * inputs.hidden.element_size()
    return max(1, DEFAULT_LIMITS.max_message_bytes // (num_states * token_bytes))


def run_in_row_chunks(
    inputs: BlockInputs, max_tokens: int | None, run: Callable[[BlockInputs], BlockOutputs]
) -> BlockOutputs:
    """Runs a batch in as many parts as needed.

    Args:
        inputs: The whole batch, ``[B, S, D]``.
        max_tokens: Largest ``B * S`` at once. None: no limit. A single row is never cut: the server refuses it.
        run: Runs one part.

    Raises:
        ProtocolError: If the parts' router logits cannot be joined: some server lies about them.
    """
    batch, length = inputs.hidden.shape[:2]
    rows = batch if max_tokens is None else max(1, max_tokens // max(length, 1))
    if rows >= batch:
        return run(inputs)
    parts = [run(_rows(inputs, slice(start, min(start + rows, batch)), start)) for start in range(0, batch, rows)]
    check_same_routers(parts, "the swarm")
    return BlockOutputs(
        hidden=torch.cat([part.hidden for part in parts]),
        hidden_states=[torch.cat(states) for states in _by_block([part.hidden_states for part in parts])],
        # Router logits are [B * S, experts], rows of the batch one after the other.
        router_logits=[torch.cat(logits) for logits in _by_block([part.router_logits for part in parts])],
        router_blocks=parts[0].router_blocks,
    )


def _by_block(parts: Sequence[Sequence[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*parts, strict=True))


def _rows(inputs: BlockInputs, rows: slice, seed_offset: int) -> BlockInputs:
    positions, mask = inputs.position_ids, inputs.attention_mask
    return replace(
        inputs,
        hidden=inputs.hidden[rows],
        position_ids=positions if positions is None or positions.shape[0] == 1 else positions[rows],
        attention_mask=None if mask is None else mask[rows],
        adapters=inputs.adapters.row_slice(rows, seed_offset),
        prefix=tuple(tensor[rows] for tensor in inputs.prefix),
    )

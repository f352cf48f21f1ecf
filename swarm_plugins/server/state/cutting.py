"""How a forward or backward without a session is cut, so that it takes bounded memory and steps wait a bounded time.

A batch is cut along its rows; a row that is too long by itself is cut along its tokens (`long_rows`). What a run takes
is estimated before it starts, from what autograd saved for a token when the server started.

Shapes: ``B`` rows, ``S`` new tokens, ``L`` prefix and new tokens, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.blocks.runner import SpanSpec
from swarm_plugins.errors import CapacityError

_GRAPHS = 2
"""A block's graph and what its forward or backward makes besides, in graphs."""
_STATES = 4
"""Hidden states of a run besides those between the blocks."""
_MASK_BYTES = 11
"""Attention's mask for one pair of tokens: three bool tensors while it is made, two of float32 while it is used."""
_MIN_PART_TOKENS = 16
MIN_PORTION_TOKENS = 256
"""However slow the server: a row that is cut has no graph, and its backward runs the forward again."""


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """What one run may take."""

    run_bytes: int = 1 << 62
    """Most memory of one run, besides its inputs and outputs."""
    portion_tokens: int = 1 << 40
    """Tokens of short rows that run through one block at a time: steps wait for so much work."""
    token_bytes: int = 0
    """What autograd saves for one token in one block."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Rows of a batch that run together."""

    inputs: SpanInputs
    part_tokens: int | None = None
    """Tokens of each row that run at a time. None: whole rows."""


def cut_batch(inputs: SpanInputs, spec: SpanSpec, limits: RunLimits) -> list[Portion]:
    """Cuts a batch into portions that stay within the limits.

    Raises:
        CapacityError: If a row does not, and cannot be cut.
    """
    rows, length = inputs.hidden.shape[:2]
    total = length + (inputs.prefix[0].shape[2] if inputs.prefix else 0)
    at_once = _tokens_at_once(total, spec, limits)
    row_bytes = _row_bytes(inputs, spec, limits, length, total)
    fitting = min(at_once // length, limits.run_bytes // max(1, row_bytes))
    if fitting >= rows:
        return [Portion(inputs=inputs)]
    part = None
    if fitting < 1 and spec.has_fixed_positions and not _is_packed(inputs):
        part = _part_tokens(inputs, spec, limits, min(at_once, length), total)
    if fitting < 1 and part is None and row_bytes > limits.run_bytes:
        raise CapacityError(
            f"one row of {length} tokens takes about {row_bytes} bytes while it runs, the limit is {limits.run_bytes}: "
            "send shorter rows (several sequences as rows of their own), or use a server with more memory"
        )
    size = max(1, fitting)
    return [
        Portion(inputs=inputs.take_rows(slice(start, start + size)), part_tokens=part) for start in range(0, rows, size)
    ]


def _tokens_at_once(total: int, spec: SpanSpec, limits: RunLimits) -> int:
    # Attention takes 2 x L x D multiplications for a token, half of them masked; the products of a block about 12 x D².
    return max(1, int(limits.portion_tokens / (1 + total / (12 * spec.hidden_size))))


def _row_bytes(inputs: SpanInputs, spec: SpanSpec, limits: RunLimits, length: int, total: int) -> int:
    state_bytes = spec.hidden_size * spec.dtype.itemsize
    states = length * state_bytes * (len(inputs.blocks) + _STATES)
    return states + length * _GRAPHS * limits.token_bytes + length * total * _mask_bytes(inputs, spec)


def _mask_bytes(inputs: SpanInputs, spec: SpanSpec) -> int:
    mask = inputs.attention_mask
    is_padded = mask is not None and not bool(mask.all())
    return _MASK_BYTES if is_padded or spec.makes_masks or inputs.prefix or _is_packed(inputs) else 0


def _is_packed(inputs: SpanInputs) -> bool:
    """Returns whether transformers takes the positions for those of several sequences in one row."""
    positions = inputs.position_ids
    if positions is None or inputs.attention_mask is not None or inputs.prefix:
        return False
    return not bool((positions[:, 1:] - positions[:, :-1] == 1).all())


def _part_tokens(inputs: SpanInputs, spec: SpanSpec, limits: RunLimits, at_once: int, total: int) -> int | None:
    """Returns how many tokens of one row run at a time; None if even few do not fit."""
    length = inputs.hidden.shape[1]
    state_bytes = spec.hidden_size * spec.dtype.itemsize
    kept = length * state_bytes * (len(inputs.blocks) + _STATES) + 2 * total * spec.kv_token_bytes
    # A part sees the tokens before it through a mask, whatever the model.
    token_bytes = _GRAPHS * limits.token_bytes + total * _MASK_BYTES
    fitting = (limits.run_bytes - kept) // max(1, token_bytes)
    return min(at_once, fitting) if fitting >= min(_MIN_PART_TOKENS, length) else None


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins the rows of portions."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))

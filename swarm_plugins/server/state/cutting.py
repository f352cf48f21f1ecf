"""How a forward or backward without a session is cut, so that it takes bounded memory and steps wait a bounded time.

A batch is cut along its rows; a row that is too long by itself is cut along its tokens (`long_rows`). What a run takes
is estimated before it starts, from what autograd saved for a token when the server started.

Shapes: ``B`` rows, ``S`` new tokens, ``L`` prefix and new tokens, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm_plugins.block_io import SpanInputs, have_jumps
from swarm_plugins.blocks.runner import SpanSpec
from swarm_plugins.errors import CapacityError
from swarm_plugins.rotary import do_rows_differ

_GRAPHS = 2
"""A block's graph and what its forward or backward makes besides, in graphs."""
_STATES = 4
"""Hidden states of a run besides those between the blocks."""
MASK_BYTES = 11
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
    """Tokens of short rows that run together: other training waits for so much work."""
    row_tokens: int = 0
    """Tokens of a row that is not cut although it is longer: steps wait for so much work in one block."""
    token_bytes: int = 0
    """What autograd saves for one token in one block."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Rows of a batch that run together."""

    inputs: SpanInputs
    part_tokens: int | None = None
    """Tokens of each row that run at a time. None: whole rows."""
    held_bytes: int = 0
    """What is held between two parts of long rows, when other requests may run."""


def cut_batch(inputs: SpanInputs, spec: SpanSpec, limits: RunLimits) -> list[Portion]:
    """Cuts a batch into portions that stay within the limits.

    Raises:
        CapacityError: If a row does not, and cannot be cut.
    """
    rows, length = inputs.hidden.shape[:2]
    total = length + (inputs.prefix[0].shape[2] if inputs.prefix else 0)
    at_once, whole = (_in_time(tokens, total, spec) for tokens in (limits.portion_tokens, limits.row_tokens))
    row_bytes = _row_bytes(inputs, spec, limits, length, total)
    fitting = min(max(at_once // length, whole >= length), limits.run_bytes // max(1, row_bytes))
    if fitting >= rows:
        return [Portion(inputs=inputs)]
    if do_rows_differ(spec.whole_beyond, inputs.position_ids):
        if rows * row_bytes > limits.run_bytes:
            raise CapacityError(
                f"{rows} rows have to run at once, since some pass the border of LongRoPE at {spec.whole_beyond} "
                f"tokens and others do not, and take about {rows * row_bytes} bytes, the limit is {limits.run_bytes}: "
                "send long and short rows apart, or use a server with more memory"
            )
        return [Portion(inputs=inputs)]
    part = None
    held_bytes = _held_bytes(inputs, spec, total)
    if fitting < 1 and spec.has_fixed_positions and inputs.layer_masks is None and not _is_packed(inputs):
        seen_bytes = total * (MASK_BYTES + spec.pair_bytes)
        part = _part_tokens(limits, min(max(at_once, whole), length), length, seen_bytes, held_bytes)
    if fitting < 1 and part is None and row_bytes > limits.run_bytes:
        raise CapacityError(
            f"one row of {length} tokens takes about {row_bytes} bytes while it runs, the limit is {limits.run_bytes}: "
            "send shorter rows (several sequences as rows of their own), or use a server with more memory"
        )
    size = max(1, fitting)
    cuts = [inputs.take_rows(slice(start, start + size)) for start in range(0, rows, size)]
    return [Portion(inputs=one, part_tokens=part, held_bytes=held_bytes if part else 0) for one in cuts]


def check_together(inputs: SpanInputs, cached: int, spec: SpanSpec, limits: RunLimits) -> None:
    """Checks that those new tokens of a session, after ``cached`` ones, that must run at once fit in memory.

    Raises:
        CapacityError: If these take more memory than a run may.
    """
    rows, least = inputs.hidden.shape[0], inputs.num_together(cached)
    if least is None:
        return
    token_bytes = limits.token_bytes + _STATES * spec.hidden_size * spec.dtype.itemsize
    num_bytes = rows * least * (token_bytes + (cached + least) * (_mask_bytes(inputs, spec) + spec.pair_bytes))
    if num_bytes > limits.run_bytes:
        raise CapacityError(
            f"the first {least} new tokens of {rows} rows have to run at once, since they have padding that states of "
            f"fixed size see, or pass the border of LongRoPE, and take about {num_bytes} bytes, the limit is "
            f"{limits.run_bytes}: send fewer rows, or use a server with more memory"
        )


def _in_time(tokens: int, total: int, spec: SpanSpec) -> int:
    """Returns how many tokens of long rows take as long as so many of short ones."""
    # Attention takes 2 x L x D multiplications for a token, half of them masked; the products of a block about 12 x D².
    return max(1, int(tokens / (1 + total / (12 * spec.hidden_size))))


def _row_bytes(inputs: SpanInputs, spec: SpanSpec, limits: RunLimits, length: int, total: int) -> int:
    state_bytes = spec.hidden_size * spec.dtype.itemsize
    states = length * state_bytes * (len(inputs.blocks) + _STATES)
    pair_bytes = _mask_bytes(inputs, spec) + spec.pair_bytes
    return states + length * _GRAPHS * limits.token_bytes + length * total * pair_bytes


def _mask_bytes(inputs: SpanInputs, spec: SpanSpec) -> int:
    mask, masks = inputs.attention_mask, inputs.layer_masks
    if masks is not None:
        return MASK_BYTES * len(masks.kinds)
    is_padded = mask is not None and not bool(mask.all())
    return MASK_BYTES if is_padded or spec.makes_masks or inputs.prefix or _is_packed(inputs) else 0


def _is_packed(inputs: SpanInputs) -> bool:
    """Returns whether transformers takes the positions for those of several sequences in one row."""
    if inputs.attention_mask is not None or inputs.prefix:
        return False
    return have_jumps(inputs.position_ids)


def _held_bytes(inputs: SpanInputs, spec: SpanSpec, total: int) -> int:
    """Returns what a row in parts holds all the time: the states between the blocks, and all keys and values."""
    states = inputs.hidden.shape[1] * spec.hidden_size * spec.dtype.itemsize * (len(inputs.blocks) + _STATES)
    return states + 2 * total * spec.wide_token_bytes


def _part_tokens(limits: RunLimits, at_once: int, length: int, seen_bytes: int, held_bytes: int) -> int | None:
    """Returns how many tokens of one row run at a time; None if even few do not fit."""
    # A part sees the tokens before it through a mask, whatever the model.
    token_bytes = _GRAPHS * limits.token_bytes + seen_bytes
    fitting = (limits.run_bytes - held_bytes) // max(1, token_bytes)
    return min(at_once, fitting) if fitting >= min(_MIN_PART_TOKENS, length) else None


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins the rows of portions."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))

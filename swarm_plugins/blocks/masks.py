"""The masks of a decoder in which tokens see later ones, made for its attention implementation from what was sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from swarm_plugins.block_io import SpanInputs


def masks_of(
    inputs: SpanInputs,
    padding: Tensor | None,
    before: int,
    *,
    attention: str,
    config: Any,
    first_of: Callable[[int], int] = lambda _: 0,
) -> Tensor | dict[str, Any] | None:
    """Returns a decoder's mask argument: the padding mask, from which it makes its own masks, or finished masks.

    Args:
        inputs: The new tokens.
        padding: ``[B, P + S]``, or None.
        before: ``P``, the tokens before them.
        attention: The attention implementation.
        config: The decoder's.
        first_of: Returns the first token that a block still has.
    """
    masks = inputs.layer_masks
    if masks is None:
        return padding
    make = ALL_MASK_ATTENTION_FUNCTIONS[attention]
    rows, num_new = inputs.hidden.shape[:2]
    firsts = {kind: first_of(_a_block_of(kind, inputs.blocks, config)) for kind in masks.kinds}
    made = {
        kind: make(
            batch_size=rows,
            q_length=num_new,
            kv_length=before + num_new - firsts[kind],
            q_offset=before,
            kv_offset=firsts[kind],
            mask_function=_looked_up(masks.of(index), before),
            attention_mask=padding,
            allow_is_causal_skip=False,
            dtype=inputs.hidden.dtype,
            config=config,
            device=inputs.hidden.device,
        )
        for index, kind in enumerate(masks.kinds)
    }
    alone: Tensor | None = made.get("")
    return made if alone is None else alone


def _a_block_of(kind: str, blocks: range, config: Any) -> int:
    """Returns a block of a kind; the first one if there is none, or all are of one kind."""
    kinds = getattr(config, "layer_types", None) or ()
    return next((block for block in blocks if kind and kind == kinds[block]), blocks.start)


def _looked_up(seen: Tensor, before: int) -> Callable[..., Tensor]:
    """Returns a mask function of transformers: ``seen`` of a row, a new token, and any token."""
    return lambda row, head, query, key: seen[row, query - before, key]

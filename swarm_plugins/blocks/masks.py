"""The masks of a decoder in which tokens see later ones, made for its attention implementation from what was sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from swarm_plugins.block_io import SpanInputs


def masks_of(
    inputs: SpanInputs, padding: Tensor | None, before: int, *, attention: str, config: Any
) -> Tensor | dict[str, Any] | None:
    """Returns a decoder's mask argument: the padding mask, from which it makes its own masks, or finished masks.

    Args:
        inputs: The new tokens.
        padding: ``[B, P + S]``, or None.
        before: ``P``, the tokens before them.
        attention: The attention implementation.
        config: The decoder's.
    """
    masks = inputs.layer_masks
    if masks is None:
        return padding
    make = ALL_MASK_ATTENTION_FUNCTIONS[attention]
    rows, num_new = inputs.hidden.shape[:2]
    made = {
        kind: make(
            batch_size=rows,
            q_length=num_new,
            kv_length=before + num_new,
            q_offset=before,
            kv_offset=0,
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


def _looked_up(seen: Tensor, before: int) -> Callable[..., Tensor]:
    """Returns a mask function of transformers: ``seen`` of a row, a new token, and any token."""
    return lambda row, head, query, key: seen[row, query - before, key]

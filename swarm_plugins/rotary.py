"""What a token's encoding depends on besides its position, by what a model's config says of rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def has_fixed_positions(config: Any) -> bool:
    """Returns whether a token's position alone decides how it is encoded, not the tokens that come with it."""
    # Other kinds recompute frequencies from the longest position of a call, which would mix sessions.
    is_static = all(kind.get("rope_type", "default") not in ("dynamic", "longrope") for kind in _kinds(config))
    return is_static and getattr(config, "attention_chunk_size", None) is None


def whole_beyond(config: Any) -> int | None:
    """Returns the length beyond which a prompt may no longer be cut just anywhere; None if it always may.

    LongRoPE (Ding et al. 2024) has one set of frequencies for short sequences and one for long ones, and transformers
    picks the set by the last position of each call. If the first part of a long prompt ended within this length, its
    keys would get the frequencies of a short one.
    """
    kinds = [kind for kind in _kinds(config) if kind.get("rope_type") == "longrope"]
    return min((kind["original_max_position_embeddings"] for kind in kinds), default=None)


def tokens_to_pass(border: int, position_ids: Tensor | None, *, cached: int, num_new: int) -> int | None:
    """Returns how many new tokens it takes to pass a length, in the row that does so first; None if no row does.

    Args:
        border: The length.
        position_ids: ``[.., S]``. None: consecutive ones after what is cached.
        cached: Tokens before them.
        num_new: ``S``.
    """
    if position_ids is None:
        lengths = torch.arange(cached + 1, cached + num_new + 1)
    else:
        lengths = 1 + position_ids.flatten(0, -2).amax(0)
    beyond = (lengths > border).nonzero()
    return 1 + int(beyond[0]) if len(beyond) else None


def do_rows_differ(border: int | None, position_ids: Tensor | None) -> bool:
    """Returns whether some rows pass a length and others do not: together, all are encoded as long ones.

    Args:
        border: The length, see `whole_beyond`; None: there is none.
        position_ids: ``[.., B or 1, S]``. None: consecutive ones, alike in all rows.
    """
    if border is None or position_ids is None:
        return False
    passing = position_ids.amax(-1) >= border
    return bool(passing.any()) and not bool(passing.all())


def _kinds(config: Any) -> list[dict[str, Any]]:
    """Returns the parameters of all kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]

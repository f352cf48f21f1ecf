"""What a token's encoding depends on besides its position, by what a model's config says of rotary embeddings."""

from __future__ import annotations

from typing import Any


def has_fixed_positions(config: Any) -> bool:
    """Returns whether a token's position alone decides how it is encoded, not the tokens that come with it."""
    # Other kinds recompute frequencies from the longest position of a call, which would mix sessions.
    is_static = all(kind.get("rope_type", "default") not in ("dynamic", "longrope") for kind in _kinds(config))
    return is_static and getattr(config, "attention_chunk_size", None) is None


def whole_beyond(config: Any) -> int | None:
    """Returns the longest sequence whose new tokens may be cut anywhere; None: those of any may.

    Beyond it, transformers turns all keys of a call by the factors of long sequences (LongRoPE, Ding et al. 2024): a
    first part that ends before it would be turned by those of short ones.
    """
    kinds = [kind for kind in _kinds(config) if kind.get("rope_type") == "longrope"]
    return min((kind["original_max_position_embeddings"] for kind in kinds), default=None)


def _kinds(config: Any) -> list[dict[str, Any]]:
    """Returns the parameters of all kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]

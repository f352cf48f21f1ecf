"""Memory of sessions, measured without weights on what HF's own modules cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel


class SessionSizes(NamedTuple):
    """What a server keeps of each row of a session, in all blocks of a model."""

    token_bytes: int
    """Of one token: keys, values and an indexer's keys."""
    row_bytes: int
    """Of states of recurrences and convolutions, at any length: now, and before the last step."""


def session_sizes(model: PreTrainedModel) -> SessionSizes:
    """Returns what a server keeps of a session.

    Args:
        model: On the meta device; its forward needs no values.
    """
    # Too few tokens to leave a sliding window, of which servers keep all.
    two, three = (cache_bytes(model, tokens) for tokens in (2, 3))
    token_bytes = three - two
    return SessionSizes(token_bytes, 2 * (two - 2 * token_bytes))


def cache_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Returns what transformers' cache of a model on the meta device holds after so many tokens of one row."""
    base: Any = model.base_model
    with torch.no_grad():
        output = base(input_ids=torch.zeros((1, tokens), dtype=torch.long, device="meta"), use_cache=True)
    caches = [value for value in output.values() if isinstance(value, Cache)]
    held = {id(tensor): tensor for cache in caches for layer in cache.layers for tensor in _floats(vars(layer))}
    return sum(tensor.nbytes for tensor in held.values())


def _floats(value: object) -> Iterator[Tensor]:
    """Yields the floating tensors of a cache's layer, under any name; it may have several states of a kind."""
    if isinstance(value, dict):
        for one in value.values():
            yield from _floats(one)
    elif isinstance(value, Tensor) and value.is_floating_point():
        yield value

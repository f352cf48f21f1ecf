"""Memory of sessions, measured without weights on what HF's own modules cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from swarm_plugins.weights.names import KV_CODE_BYTES, KV_SCALE_BYTES


class SessionSizes(NamedTuple):
    """What a server keeps of each row of a session, in all blocks of a model."""

    token_bytes: int
    """Of one token: keys, values and an indexer's keys."""
    row_bytes: int
    """Of states of recurrences and convolutions, at any length: now, and before the last step."""
    coded_token_bytes: int
    """Of one token, with keys and values in 8 bits (``swarm serve --kv-bits 8``)."""
    window: int = 0
    """Tokens of a sliding window, after which servers free what ``window_token_bytes`` counts. 0: there is none."""
    window_token_bytes: int = 0
    """The part of ``token_bytes`` that is in blocks with a sliding window."""
    coded_window_token_bytes: int = 0
    """The same of ``coded_token_bytes``."""


def session_sizes(model: PreTrainedModel) -> SessionSizes:
    """Returns what a server keeps of a session.

    Args:
        model: On the meta device; its forward needs no values.
    """
    # Too few tokens to leave a sliding window.
    few, more = _layers(model, 2), _layers(model, 3)
    two, three = _num_bytes(few), _num_bytes(more)
    token_bytes = three - two
    sliding = [layer for layer in more if type(layer) is DynamicSlidingWindowLayer]
    return SessionSizes(
        token_bytes,
        2 * (two - 2 * token_bytes),
        coded_token_bytes=token_bytes - sum(map(_saved_bytes, more)),
        window=max((layer.sliding_window for layer in sliding), default=0),
        window_token_bytes=_num_bytes(sliding) // 3,
        coded_window_token_bytes=_num_bytes(sliding) // 3 - sum(map(_saved_bytes, sliding)),
    )


def cache_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Returns what transformers' cache of a model on the meta device holds after so many tokens of one row."""
    return _num_bytes(_layers(model, tokens))


def _layers(model: PreTrainedModel, tokens: int) -> list[Any]:
    base: Any = model.base_model
    with torch.no_grad():
        output = base(input_ids=torch.zeros((1, tokens), dtype=torch.long, device="meta"), use_cache=True)
    return [layer for value in output.values() if isinstance(value, Cache) for layer in value.layers]


def _num_bytes(layers: Sequence[Any]) -> int:
    held = {id(tensor): tensor for layer in layers for tensor in _floats(vars(layer))}
    return sum(tensor.nbytes for tensor in held.values())


def _saved_bytes(layer: Any) -> int:
    """Returns the bytes of a token that codes save, with a scale for each head, and a zero point for each of keys."""
    return sum(
        one.shape[1] * (one.shape[3] * (one.itemsize - KV_CODE_BYTES) - numbers * KV_SCALE_BYTES)
        for name, numbers in (("keys", 2), ("values", 1))
        if (one := getattr(layer, name, None)) is not None and one.ndim == 4
    )


def _floats(value: object) -> Iterator[Tensor]:
    """Yields the floating tensors of a cache's layer, under any name; it may have several states of a kind."""
    if isinstance(value, dict):
        for one in value.values():
            yield from _floats(one)
    elif isinstance(value, Tensor) and value.is_floating_point():
        yield value

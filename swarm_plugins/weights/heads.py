"""The output head of a model on a laptop: the largest product of a token that is computed there."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.names import FP16, GEMV, HALVES, PLAIN
from swarm_plugins.weights.plain_linears import CopiedLinear, FewRowsLinear
from swarm_plugins.weights.trial import chosen

_MOST_COPIED_BYTES = 256 << 20
"""Largest weight that is kept a second time."""


def quicken_head(model: Any) -> None:
    """Lets a model's output head form the products of few rows as is fastest on this CPU, in place.

    Its weight stays where and as it is, tied to the embeddings or not, and trains as ever. In 16 bits the products come
    from a copy of the weight, unless that is large.
    """
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.is_cpu:
        name = _fastest(head.weight.shape, head.weight.dtype)
        if name is not None:
            head.__class__ = {HALVES: FewRowsLinear, GEMV: FewRowsLinear, FP16: CopiedLinear}.get(name, nn.Linear)


@lru_cache(maxsize=8)
def _fastest(shape: torch.Size, dtype: torch.dtype) -> str | None:
    among = [PLAIN, HALVES, GEMV]
    if shape.numel() * dtype.itemsize <= _MOST_COPIED_BYTES:
        among.append(FP16)
    return chosen(
        [PlainFormat((shape[0], shape[1]), dtype)],
        f"the head's {dtype}".replace("torch.", ""),
        among=among,
        trains=False,
    )

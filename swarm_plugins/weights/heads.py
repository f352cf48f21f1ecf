"""The output head of a model on a laptop: the largest product of a token that is computed there."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from swarm_plugins.weights.choice import HALVES, PLAIN
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.linears import arranged
from swarm_plugins.weights.trial import chosen


def quicken_head(model: Any) -> None:
    """Lets a model's output head form the products of few rows as is fastest on this CPU, in place.

    Its weight stays where and as it is, tied to the embeddings or not, and trains as ever.
    """
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.is_cpu and _is_faster_in_halves(head.weight.shape, head.weight.dtype):
        arranged(head, HALVES)


@lru_cache(maxsize=8)
def _is_faster_in_halves(shape: torch.Size, dtype: torch.dtype) -> bool:
    if dtype != torch.float32:
        return False
    # Other kernels would need the weight a second time.
    return chosen([PlainFormat((shape[0], shape[1]), dtype)], "the head's float32", among=(PLAIN, HALVES)) == HALVES

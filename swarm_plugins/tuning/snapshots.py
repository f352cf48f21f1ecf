"""Models to sample from, in the distribution that training computes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from transformers import GenerationConfig


def snapshot(model: Any) -> Any:
    """Returns a copy of a model as it is now: trained tensors are its own, and frozen ones shared.

    What the model's files say of generation is left out: a penalty would change the probabilities.
    """
    frozen = (one for one in itertools.chain(model.parameters(), model.buffers()) if not one.requires_grad)
    shared: dict[int, Any] = {id(one): one for one in frozen}
    copied = copy.deepcopy(model, shared).eval()
    for one in copied.modules():
        if hasattr(one, "generation_config"):
            one.generation_config = GenerationConfig()
    return copied.requires_grad_(False)


def own_bytes(model: Any, base: Any) -> int:
    """Returns the bytes of a model's tensors that its base does not share."""
    shared = {id(one) for one in itertools.chain(base.parameters(), base.buffers())}
    own = {id(one): one for one in itertools.chain(model.parameters(), model.buffers()) if id(one) not in shared}
    return sum(one.numel() * one.element_size() for one in own.values())

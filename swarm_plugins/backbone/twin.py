"""Copies of a model that share its weights."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from swarm_plugins.backbone.wrapped_parameters import one_wrapped_forward_at_a_time


def twin(model: Any) -> Any:
    """Returns a copy of a model's structure that shares all its tensors.

    PEFT puts an adapter into the model itself, for all threads: so each adapter gets a copy. Where threads share one,
    forwards of experts with a LoRA wait for each other.
    """
    one_wrapped_forward_at_a_time()
    shared: dict[int, Any] = {id(one): one for one in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)

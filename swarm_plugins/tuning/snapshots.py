"""An adapter as it is now, to sample from while training goes on."""

from __future__ import annotations

import copy
import itertools
from typing import Any


def snapshot(model: Any) -> Any:
    """Returns a copy of a model in training: it has the adapter of this moment, and shares all frozen weights."""
    frozen = (one for one in itertools.chain(model.parameters(), model.buffers()) if not one.requires_grad)
    shared: dict[int, Any] = {id(one): one for one in frozen}
    return copy.deepcopy(model, shared).requires_grad_(False).eval()

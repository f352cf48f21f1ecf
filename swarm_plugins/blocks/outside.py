"""Weights outside of the blocks of a span: the client has them, and uses them before and after the blocks.

The modules stay, since a family's own forward calls them; what they compute is replaced at the first block of the span
and not read behind its last one. Their weights are NaN over one element of memory: should anything else depend on them,
it is NaN as well, and not a wrong token.
"""

from __future__ import annotations

import math

import torch
from torch import nn

_ABSENT = "_swarm_absent"
"""Attribute of a module: the names of the weights that were taken out of it."""


def take_out(model: nn.Module, layer_path: str) -> None:
    """Removes all weights outside the layer list from a model whose weights are not loaded yet."""
    for name, module in model.named_modules():
        if name == layer_path or name.startswith(f"{layer_path}."):
            continue
        # No checkpoint has to have them either.
        module._non_persistent_buffers_set.update(module._buffers)
        absent = {key: weight for key, weight in module._parameters.items() if weight is not None}
        if not absent:
            continue
        for key, weight in absent.items():
            del module._parameters[key]
            # Not a parameter or a buffer: moved or cast, it would take the memory of all its elements.
            module.__dict__[key] = torch.empty_like(weight, device="meta")
        module.__dict__[_ABSENT] = tuple(absent)
        # Or transformers would initialise what it thinks is missing.
        module._is_hf_initialized = True


def fill_in(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Puts NaN in the place of the weights that were taken out."""
    for module in model.modules():
        for key in module.__dict__.get(_ABSENT, ()):
            shape = module.__dict__[key].shape
            module.__dict__[key] = torch.full((1,) * len(shape), math.nan, dtype=dtype, device=device).expand(shape)

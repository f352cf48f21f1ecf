"""Tensors of messages that are left out where there are none, so that peers of earlier versions take the message."""

from __future__ import annotations

import msgspec
from torch import Tensor


def or_none(field: Tensor | msgspec.UnsetType) -> Tensor | None:
    """Returns the tensor of a field that may be left out, or None."""
    return None if isinstance(field, msgspec.UnsetType) else field


def or_unset(tensor: Tensor | None) -> Tensor | msgspec.UnsetType:
    """Returns a tensor for a field that is left out if there is none."""
    return msgspec.UNSET if tensor is None else tensor

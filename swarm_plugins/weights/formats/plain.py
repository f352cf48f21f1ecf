"""Weights in a floating type, as checkpoints have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.weights.stored import Part, QuantizingFormat


@dataclass(frozen=True)
class PlainFormat(QuantizingFormat):
    """A weight in ``float32``, ``bfloat16`` or ``float16``; its codes are its numbers."""

    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("codes", self.dtype, self.shape),)

    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        """Casts; there is nothing to fit."""
        return {"codes": weight.detach().to(self.dtype)}

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return parts["codes"].to(dtype)

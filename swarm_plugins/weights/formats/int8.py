"""8 bits with one scale per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.weights.stored import Part, QuantizingFormat

_LEVELS = 127
# Weights quantized at once, so that temporaries stay small.
_CHUNK_WEIGHTS = 1 << 20


@dataclass(frozen=True)
class Int8Format(QuantizingFormat):
    """A weight as int8 codes with one float32 scale per row (Dettmers et al. 2022, section 2)."""

    shape: tuple[int, int]

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("codes", torch.int8, self.shape), Part("scales", torch.float32, self.shape[:1]))

    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns codes and scales; there is nothing to fit."""
        pieces = [_quantize(piece) for piece in weight.detach().split(max(1, _CHUNK_WEIGHTS // self.shape[1]))]
        codes, scales = zip(*pieces, strict=True)
        return {"codes": torch.cat(codes), "scales": torch.cat(scales)}

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (parts["codes"].float() * parts["scales"].unsqueeze(1)).to(dtype)


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / _LEVELS  # [rows]
    codes = (wide / torch.where(scales == 0, 1.0, scales).unsqueeze(1)).round_().to(torch.int8)
    return codes, scales

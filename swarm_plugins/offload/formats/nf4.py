"""Weights in nf4: 4 bits with levels where normally distributed weights are (Dettmers et al. 2023, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.offload.formats.bnb import NF4_BLOCK, nf4_product, nf4_quantize, nf4_widen
from swarm_plugins.offload.formats.matrices import AsStored, Part

__all__ = ["Nf4Matrix"]

# Weights that are quantized at once: temporaries are small beside the weight.
_CHUNK_WEIGHTS = 1 << 20


@dataclass(frozen=True)
class Nf4Matrix(AsStored):
    """A weight as bitsandbytes' nf4 has it: codes of 4 bits, and a scale for each 64 columns.

    Columns are padded to a multiple of 64, so that no scale belongs to two rows: bitsandbytes would widen such a weight
    wrongly on a CPU, and not use its fast product on CUDA. On a CPU the weight is widened for each product.

    Args:
        shape: Rows and columns of the weight.
    """

    shape: tuple[int, int]

    @property
    def stored(self) -> tuple[Part, ...]:
        """Codes and scales."""
        rows, columns = self.shape[0], self._padded_columns
        return (
            Part("codes", torch.uint8, (rows, columns // 2)),
            Part("scales", torch.float32, (rows, columns // NF4_BLOCK)),
        )

    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns codes and scales; there is nothing to fit, the levels are given."""
        columns = self._padded_columns
        padded = functional.pad(weight.detach(), (0, columns - self.shape[1]))
        pieces = [nf4_quantize(piece) for piece in padded.split(max(1, _CHUNK_WEIGHTS // columns))]
        codes, scales = zip(*pieces, strict=True)
        return {"codes": torch.cat(codes), "scales": torch.cat(scales)}

    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]``: ``[T, out]``."""
        padded = functional.pad(rows, (0, self._padded_columns - self.shape[1]))
        return nf4_product(parts["codes"], parts["scales"], padded)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the weight ``[out, in]``."""
        return nf4_widen(parts["codes"], parts["scales"], dtype)[:, : self.shape[1]]

    @property
    def _padded_columns(self) -> int:
        return -(-self.shape[1] // NF4_BLOCK) * NF4_BLOCK

"""4 bits whose levels are where normally distributed weights are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.weights.bnb import FLOATS, bitsandbytes, default_stream
from swarm_plugins.weights.stored import Part, QuantizingFormat
from swarm_plugins.weights.widths import GROUP_SIZES, NF4

_BLOCK = GROUP_SIZES[NF4]
# Weights quantized at once, so that temporaries stay small.
_CHUNK_WEIGHTS = 1 << 20


@dataclass(frozen=True)
class Nf4Format(QuantizingFormat):
    """A weight as nf4 codes with one float32 scale per 64 columns (Dettmers et al. 2023, section 3).

    Columns are padded to a multiple of 64, so that no scale spans two rows: bitsandbytes widens such a weight wrongly
    on a CPU and avoids its fast product on CUDA.
    """

    shape: tuple[int, int]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Codes, two in a byte, and scales."""
        rows, columns = self.shape[0], self.padded_columns
        return (
            Part("codes", torch.uint8, (rows, columns // 2)),
            Part("scales", torch.float32, (rows, columns // _BLOCK)),
        )

    @property
    def padded_columns(self) -> int:
        return -(-self.shape[1] // _BLOCK) * _BLOCK

    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns codes and scales; there is nothing to fit, as the levels are given."""
        columns = self.padded_columns
        padded = functional.pad(weight.detach(), (0, columns - self.shape[1]))
        pieces = [_quantize(piece) for piece in padded.split(max(1, _CHUNK_WEIGHTS // columns))]
        codes, scales = zip(*pieces, strict=True)
        return {"codes": torch.cat(codes), "scales": torch.cat(scales)}

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        state = quant_state(parts, dtype if dtype in FLOATS else torch.float32)
        wide: Tensor = bitsandbytes().functional.dequantize_4bit(parts["codes"].view(-1, 1), state)
        return wide.to(dtype)[:, : self.shape[1]]


def quant_state(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """Returns what bitsandbytes has to know of codes beside them."""
    # Its kernels trust these sizes.
    rows, num_bytes = parts["codes"].shape
    return bitsandbytes().functional.QuantState(
        absmax=parts["scales"].reshape(-1),
        shape=torch.Size((rows, 2 * num_bytes)),
        blocksize=_BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    flat = (weight if weight.dtype in FLOATS else weight.float()).contiguous()
    with default_stream(weight.device):
        codes, state = bitsandbytes().functional.quantize_4bit(
            flat, blocksize=_BLOCK, compress_statistics=False, quant_type="nf4"
        )
    return codes.view(rows, columns // 2), state.absmax.view(rows, columns // _BLOCK)

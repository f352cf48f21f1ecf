"""Weights as bitsandbytes has them: 8 bits of LLM.int8(), and nf4."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.noise import without_kernel_remark
from swarm_plugins.offload.formats.matrices import MatrixFormat, Part
from swarm_plugins.offload.widths import GROUP_SIZES, NF4

_LEVELS = 127
# The second half of an activation is its rounding error in steps this fine.
_FINE = 254
# Columns with an activation this large are multiplied in the wide type: LLM.int8(), section 3.2.
_OUTLIER_THRESHOLD = 6.0
# The first generation (Turing) whose integer units the 8-bit product is written for.
_LEAST_CAPABILITY = (7, 5)
# Without integer dot products the product is either slow or adds pairs in 16 bits, which overflow.
_HAS_DOT_PRODUCTS: bool = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
# Weights quantized at once, so that temporaries stay small.
_CHUNK_WEIGHTS = 1 << 20
# The types that bitsandbytes' kernels take.
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_NF4_BLOCK = GROUP_SIZES[NF4]


@dataclass(frozen=True)
class Int8Matrix(MatrixFormat):
    """A weight as int8 codes with one scale per row (Dettmers et al. 2022, section 2).

    On a CPU with integer dot products each activation is split into two int8 numbers, 16 bits in all: the products are
    sums of integers, hence exact, and a row's result does not depend on the other rows. This takes half the time of
    float32. (Activations of 8 bits would take a third, but outliers would lose digits.) On CUDA it is the product of
    LLM.int8(): activations of 8 bits, columns with outliers apart.
    """

    shape: tuple[int, int]

    @property
    def stored(self) -> tuple[Part, ...]:
        return (Part("codes", torch.int8, self.shape), Part("scales", torch.float32, self.shape[:1]))

    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns codes and scales; there is nothing to fit."""
        wide = weight.detach().float()
        scales = wide.abs().amax(dim=1) / _LEVELS  # [out]
        codes = (wide / torch.where(scales == 0, 1.0, scales).unsqueeze(1)).round_().to(torch.int8)
        return {"codes": codes, "scales": scales}

    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        codes, scales = parts["codes"], parts["scales"]
        if has_int8_product(rows.device):
            return int8_product(codes, scales, rows)
        if rows.is_cuda:
            return functional.linear(rows, self.widen(parts, rows.dtype))
        wide = rows.float()
        product = _split_product(wide, codes) if _HAS_DOT_PRODUCTS else functional.linear(wide, codes.float())
        return product.mul_(scales).to(rows.dtype)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (parts["codes"].float() * parts["scales"].unsqueeze(1)).to(dtype)


def _split_product(rows: Tensor, codes: Tensor) -> Tensor:
    count = rows.shape[0]
    if count == 0:
        return rows.new_zeros(0, codes.shape[0])
    scales = rows.abs().amax(dim=1, keepdim=True) / _LEVELS  # [T, 1]
    steps = rows / torch.where(scales == 0, 1.0, scales)
    coarse = steps.round()
    fine = ((steps - coarse) * _FINE).round_()
    halves = torch.cat([coarse, fine]).to(torch.int8)  # [2 T, in]
    transposed = codes.t()
    if count == 1:
        # Two products of one row are faster than one of two.
        sums = [torch._int_mm(half, transposed).float() for half in halves.split(1)]
    else:
        sums = list(torch._int_mm(halves, transposed).float().split(count))
    return sums[0].add_(sums[1], alpha=1 / _FINE).mul_(scales)


def has_int8_product(device: torch.device) -> bool:
    """Returns whether a device computes bitsandbytes' 8-bit product."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def int8_product(codes: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Multiplies rows by an 8-bit weight as LLM.int8() does (Dettmers et al. 2022, section 3), without gradients.

    Activations are rounded to 8 bits with one scale per row; columns with an outlier in any row are multiplied in the
    type of the rows instead.

    Args:
        codes: ``[out, in]`` of int8.
        scales: ``[out]`` of float32; a weight is its code times this.
        rows: ``[T, in]``, any floating type.

    Returns:
        ``[T, out]`` in the type of the rows.
    """
    if rows.shape[0] == 0:
        return rows.new_zeros(0, codes.shape[0])
    # The two steps of its `matmul`, which logs a cast for every product in another type than float16.
    steps, row_scales, outliers = _bitsandbytes().functional.int8_vectorwise_quant(
        rows.to(torch.float16, memory_format=torch.contiguous_format), threshold=_OUTLIER_THRESHOLD
    )
    largest = scales * 127.0
    product: Tensor
    product, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(rows, steps, codes, row_scales, largest, outliers)
    return product


@dataclass(frozen=True)
class Nf4Matrix(MatrixFormat):
    """A weight as nf4 codes with one float32 scale per 64 columns (Dettmers et al. 2023, section 3).

    The levels are where normally distributed weights are. Columns are padded to a multiple of 64, so that no scale
    spans two rows: bitsandbytes widens such a weight wrongly on a CPU and avoids its fast product on CUDA. A CPU widens
    the weight for each product.
    """

    shape: tuple[int, int]

    @property
    def stored(self) -> tuple[Part, ...]:
        """Codes, two in a byte, and scales."""
        rows, columns = self.shape[0], self._padded_columns
        return (
            Part("codes", torch.uint8, (rows, columns // 2)),
            Part("scales", torch.float32, (rows, columns // _NF4_BLOCK)),
        )

    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns codes and scales; there is nothing to fit, as the levels are given."""
        columns = self._padded_columns
        padded = functional.pad(weight.detach(), (0, columns - self.shape[1]))
        pieces = [_nf4_quantize(piece) for piece in padded.split(max(1, _CHUNK_WEIGHTS // columns))]
        codes, scales = zip(*pieces, strict=True)
        return {"codes": torch.cat(codes), "scales": torch.cat(scales)}

    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]``: ``[T, out]``; on CUDA without widening the weight for few rows."""
        padded = functional.pad(rows, (0, self._padded_columns - self.shape[1]))
        inputs = (padded if rows.dtype in _FLOATS else padded.float()).contiguous()
        product: Tensor = _bitsandbytes().matmul_4bit(inputs, parts["codes"], quant_state=_state(parts, inputs.dtype))
        return product.to(rows.dtype)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        state = _state(parts, dtype if dtype in _FLOATS else torch.float32)
        wide: Tensor = _bitsandbytes().functional.dequantize_4bit(parts["codes"].view(-1, 1), state)
        return wide.to(dtype)[:, : self.shape[1]]

    @property
    def _padded_columns(self) -> int:
        return -(-self.shape[1] // _NF4_BLOCK) * _NF4_BLOCK


def _nf4_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    flat = (weight if weight.dtype in _FLOATS else weight.float()).contiguous()
    with _default_stream(weight.device):
        codes, state = _bitsandbytes().functional.quantize_4bit(
            flat, blocksize=_NF4_BLOCK, compress_statistics=False, quant_type="nf4"
        )
    return codes.view(rows, columns // 2), state.absmax.view(rows, columns // _NF4_BLOCK)


def _state(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    # Its kernels trust these sizes.
    rows, num_bytes = parts["codes"].shape
    return _bitsandbytes().functional.QuantState(
        absmax=parts["scales"].reshape(-1),
        shape=torch.Size((rows, 2 * num_bytes)),
        blocksize=_NF4_BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )


@contextlib.contextmanager
def _default_stream(device: torch.device) -> Iterator[None]:
    """Orders the body between earlier and later work of the current stream.

    bitsandbytes 0.50 starts its quantizing kernels on the default stream, whichever is current.
    """
    if device.type != "cuda":
        yield
        return
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(current)
    yield
    current.wait_stream(default)


@lru_cache(maxsize=1)
def _bitsandbytes() -> Any:
    # Late: the import takes seconds, and most who offload never need it.
    with without_kernel_remark():
        import bitsandbytes
    return bitsandbytes

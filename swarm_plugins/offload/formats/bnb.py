"""What is taken from bitsandbytes: nf4 weights, and the 8-bit product of LLM.int8()."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from swarm_plugins.noise import without_kernel_remark

__all__ = ["NF4_BLOCK", "has_int8_product", "int8_product", "nf4_product", "nf4_quantize", "nf4_widen"]

NF4_BLOCK = 64
"""Weights that share a scale."""
# Columns with an activation this large are multiplied in the wide type: LLM.int8(), section 3.2.
_OUTLIER_THRESHOLD = 6.0
# The first generation (Turing) whose integer units the product is written for.
_LEAST_CAPABILITY = (7, 5)
# Types that its kernels know.
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def nf4_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes a weight.

    Args:
        weight: ``[rows, columns]``, columns a multiple of 64, any floating type.

    Returns:
        Codes, two in a byte, ``[rows, columns / 2]`` of uint8; scales, ``[rows, columns / 64]`` of float32.
    """
    rows, columns = weight.shape
    flat = (weight if weight.dtype in _FLOATS else weight.float()).contiguous()
    with _default_stream(weight.device):
        codes, state = _bitsandbytes().functional.quantize_4bit(
            flat, blocksize=NF4_BLOCK, compress_statistics=False, quant_type="nf4"
        )
    return codes.view(rows, columns // 2), state.absmax.view(rows, columns // NF4_BLOCK)


def nf4_product(codes: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Multiplies rows by a weight, without gradients; on CUDA without widening it for few rows.

    Args:
        codes: ``[out, in / 2]``.
        scales: ``[out, in / 64]``.
        rows: ``[T, in]``, any floating type.

    Returns:
        ``[T, out]`` in the type of the rows.
    """
    inputs = (rows if rows.dtype in _FLOATS else rows.float()).contiguous()
    product: Tensor = _bitsandbytes().matmul_4bit(inputs, codes, quant_state=_state(codes, scales, inputs.dtype))
    return product.to(rows.dtype)


def nf4_widen(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight ``[out, in]`` of codes ``[out, in / 2]`` and scales ``[out, in / 64]``."""
    known = dtype if dtype in _FLOATS else torch.float32
    wide: Tensor = _bitsandbytes().functional.dequantize_4bit(codes.view(-1, 1), _state(codes, scales, known))
    return wide.to(dtype)


def has_int8_product(device: torch.device) -> bool:
    """Says whether bitsandbytes' 8-bit product is the one to use on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def int8_product(codes: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Multiplies rows by a weight of 8 bits as LLM.int8() does (Dettmers et al. 2022, section 3), without gradients.

    Activations become 8 bits with a scale for each row; columns with an outlier in any row are multiplied in the type
    of the rows instead.

    Args:
        codes: ``[out, in]`` of int8.
        scales: ``[out]`` of float32; a weight is its code times this.
        rows: ``[T, in]``, any floating type.

    Returns:
        ``[T, out]`` in the type of the rows.
    """
    if rows.shape[0] == 0:
        return rows.new_zeros(0, codes.shape[0])
    functional = _bitsandbytes().functional
    # The two steps of its `matmul`, which says for every product of other types than float16 that it casts them.
    steps, row_scales, outliers = functional.int8_vectorwise_quant(
        rows.to(torch.float16, memory_format=torch.contiguous_format), threshold=_OUTLIER_THRESHOLD
    )
    largest = scales * 127.0
    product: Tensor
    product, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(rows, steps, codes, row_scales, largest, outliers)
    return product


def _state(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Any:
    # Its kernels take these sizes on trust.
    shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
    return _bitsandbytes().functional.QuantState(
        absmax=scales.reshape(-1), shape=shape, blocksize=NF4_BLOCK, quant_type="nf4", dtype=dtype
    )


@contextlib.contextmanager
def _default_stream(device: torch.device) -> Iterator[None]:
    """Puts what happens inside between what the current stream does before and after it.

    bitsandbytes 0.50 starts its kernels that quantize on the default stream, whichever is current.
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
    # Late: it takes seconds, and most who offload never need it.
    with without_kernel_remark():
        import bitsandbytes
    return bitsandbytes

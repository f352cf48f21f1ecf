"""Packs tensors as bytes: unchanged, in 16 bits, or in 8 bits of a rotated block.

Pure torch: a decoder accepts only a payload of exactly the size that dtype, shape and codec imply. (The compiled
blockwise decoders of other packages trust lengths inside the payload.)

``rotated8`` splits a flat tensor into blocks of 64 numbers. A block ``x`` is multiplied with the Hadamard matrix ``H``
(Sylvester's, entries 1 and -1), which spreads an outlier over the whole block, and each number of ``r = H x / 64``
becomes a whole number ``q`` from -127 to 127 of steps ``s = max |r| / 127``. Steps are rounded to bfloat16: with the
range of float32, they overflow for no block. Unpacked, the block is ``s H q``. The payload holds the numbers after the
last whole block as they are, then all steps, then all whole numbers: 66 bytes for 64 numbers. Rotations that tame
outliers before a quantization: QuIP# (arXiv 2402.04396) for weights, QuaRot (arXiv 2404.00456) for activations. Random
signs before the rotation, as there, changed nothing that was measured, so there are none.

Both ends, a server that hands its output on, and whoever checks an answer must see the same numbers. So unpacking is
exact up to one product with the scale (``H q`` are whole numbers below 2**24), packing is made of sums in a fixed
order, and packing what was unpacked gives the same bytes again.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from swarm_plugins.transport.messages import Codec

BLOCK_ELEMENTS = 64
"""Numbers of ``rotated8`` that are rotated together and share a scale."""

MIN_PACKED_ELEMENTS = 1024
"""Smaller tensors travel unpacked: packing would cost more than it saves."""

_BLOCK_BYTES = BLOCK_ELEMENTS + 2
_BLOCKS_AT_ONCE = 4096
"""1 MiB of float32: what packing and unpacking need beyond their result is a few MiB, in the processor's cache."""
_LARGEST = 127
_MAX = {torch.float16: 65504.0, torch.bfloat16: torch.finfo(torch.bfloat16).max, torch.float32: 3.4028234663852886e38}
_ORDINARY = (2.0**-100, 2.0**100)
"""Scales with which float32 unpacks to numbers that certainly pack to the same bytes."""
_LEAST_SCALE = 2.0**-120
"""Blocks with smaller scales become zeros."""
_MOST_TRIES = 8
_PACKABLE = frozenset({torch.float32, torch.bfloat16, torch.float16})


def is_packable(codec: Codec, dtype: torch.dtype, num_elements: int) -> bool:
    """Returns whether a codec other than ``none`` applies to a tensor."""
    if num_elements < MIN_PACKED_ELEMENTS:
        return False
    return dtype == torch.float32 if codec == "bfloat16" else dtype in _PACKABLE


def packed_bytes(codec: Codec, dtype: torch.dtype, num_elements: int) -> int:
    """Returns the exact size of a packed tensor."""
    if codec == "none":
        return num_elements * dtype.itemsize
    if codec in ("float16", "bfloat16"):
        return num_elements * 2
    num_blocks, rest = divmod(num_elements, BLOCK_ELEMENTS)
    return rest * dtype.itemsize + _BLOCK_BYTES * num_blocks


def pack(tensor: Tensor, codec: Codec) -> Tensor | None:
    """Packs a contiguous CPU tensor; the result is contiguous and may be the tensor itself.

    ``float16`` saturates: a finite number beyond 65504 becomes 65504 instead of infinity, so that one large
    activation does not look like a broken computation; infinities and NaN are kept. In ``rotated8`` they make their
    block NaN.

    Returns:
        The packed tensor; None for one of 16 bits that ``rotated8`` does not give back the same each time.
    """
    if codec == "none":
        return tensor
    if codec == "float16":
        return _to_float16(tensor)
    if codec == "bfloat16":
        return _to_bfloat16(tensor)
    return _to_rotated8(tensor)


def unpack(payload: Tensor, codec: Codec, dtype: torch.dtype, num_elements: int) -> Tensor:
    """Restores a flat tensor from a payload, flat ``uint8``, of any codec but ``none``.

    Raises:
        ValueError: If the payload does not have exactly ``packed_bytes(codec, dtype, num_elements)`` elements.
    """
    expected = packed_bytes(codec, dtype, num_elements)
    if payload.numel() != expected:
        raise ValueError(f"{payload.numel()} bytes for {num_elements} elements packed by {codec}, expected {expected}")
    if codec == "rotated8":
        return _from_rotated8(payload, dtype, num_elements)
    half = payload.view(torch.float16 if codec == "float16" else torch.bfloat16)
    # The result must own its memory.
    return half.clone() if dtype == half.dtype else half.to(dtype)


def has_non_finite(tensor: Tensor) -> bool:
    """Returns whether a floating tensor holds NaN or infinity; False for other tensors."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return False
    # One pass and no temporary: a finite sum proves that all terms are finite. Finite terms can overflow the sum, so
    # otherwise the exact, slower test decides.
    if math.isfinite(tensor.detach().sum(dtype=torch.float32).item()):
        return False
    return not bool(torch.isfinite(tensor.detach()).all())


def _to_float16(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float16 else _saturated(tensor, torch.float16)


def _to_bfloat16(tensor: Tensor) -> Tensor:
    return _saturated(tensor, torch.bfloat16)


def _saturated(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    clamped = tensor.clamp(-_MAX[dtype], _MAX[dtype])
    if has_non_finite(tensor):
        clamped = torch.where(tensor.isinf(), tensor, clamped)
    return clamped.to(dtype)


def _hadamard() -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK_ELEMENTS:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix  # [64, 64]


_HADAMARD = _hadamard()


def _to_rotated8(tensor: Tensor) -> Tensor | None:
    flat = tensor.reshape(-1)
    packed = torch.empty(packed_bytes("rotated8", flat.dtype, flat.numel()), dtype=torch.uint8)
    rest, all_scales, all_codes = _parts(packed, flat.dtype, flat.numel())
    blocks = flat[: all_codes.numel()].view(-1, BLOCK_ELEMENTS)
    rest.copy_(flat[all_codes.numel() :])
    for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
        part = slice(first, first + _BLOCKS_AT_ONCE)
        quantized = _quantized(blocks[part])
        if quantized is None:
            return None
        all_scales[part], all_codes[part] = quantized[0], quantized[1].t()
    return packed


def _from_rotated8(payload: Tensor, dtype: torch.dtype, num_elements: int) -> Tensor:
    rest, scales, codes = _parts(payload, dtype, num_elements)
    values = torch.empty(num_elements, dtype=dtype)
    blocks = values[: codes.numel()].view(-1, BLOCK_ELEMENTS)
    values[codes.numel() :] = rest
    for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
        part = slice(first, first + _BLOCKS_AT_ONCE)
        blocks[part] = _restored(scales[part], codes[part].float(), dtype)
    return values


def _parts(payload: Tensor, dtype: torch.dtype, num_elements: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of a payload: numbers after the last block, steps ``[blocks]``, whole numbers ``[blocks, 64]``."""
    num_blocks, rest = divmod(num_elements, BLOCK_ELEMENTS)
    raw, scales, codes = payload.split([rest * dtype.itemsize, 2 * num_blocks, BLOCK_ELEMENTS * num_blocks])
    return raw.view(dtype), scales.view(torch.bfloat16), codes.view(torch.int8).view(num_blocks, BLOCK_ELEMENTS)


def _quantized(blocks: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns steps ``[blocks]`` and whole numbers ``[64, blocks]`` that survive unpacking and packing again.

    Rounding to 16 bits can move a number across the border between two steps. What packing then makes of the moved
    numbers is taken instead, until nothing moves any more: nearly always at once.
    """
    scales, codes = _rotated(blocks)
    least, most = _ORDINARY
    is_certain = (scales == 0) | ((scales > least) & (scales < most))
    if blocks.dtype == torch.float32 and bool(is_certain.all()):
        return scales, codes
    at = torch.arange(len(scales))
    for _ in range(_MOST_TRIES):
        scales_again, codes_again = _rotated(_restored(scales[at], codes[:, at].t().float(), blocks.dtype))
        has_moved = (codes_again != codes[:, at]).any(dim=0)
        has_moved |= scales_again.view(torch.int16) != scales[at].view(torch.int16)
        scales[at], codes[:, at] = scales_again, codes_again
        at = at[has_moved]
        if len(at) == 0:
            return scales, codes
    return None


def _rotated(blocks: Tensor) -> tuple[Tensor, Tensor]:
    # Blocks side by side, so that all sums are of long rows; divided first, so that the largest floats cannot overflow.
    rows = torch.empty(BLOCK_ELEMENTS, len(blocks)).copy_(blocks.t()).mul_(1 / BLOCK_ELEMENTS)
    rotated = _times_hadamard(rows)  # [64, blocks]
    scales = (rotated.abs().amax(dim=0) / _LARGEST).to(torch.bfloat16)  # [blocks]; NaN for NaN and infinity
    scales = torch.where(scales < _LEAST_SCALE, 0.0, scales)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    inverse = torch.where(scales > 0, scales.float().reciprocal(), 0.0)
    codes = rotated.mul_(inverse).round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_(0.0).to(torch.int8)
    return scales, codes


def _times_hadamard(rows: Tensor) -> Tensor:
    """Multiplies the Hadamard matrix with ``[64, blocks]``, overwriting it, by six rounds of sums and differences.

    A product of matrices would add in another order on another machine, or for another number of blocks.
    """
    other, half = torch.empty_like(rows), BLOCK_ELEMENTS // 2
    while half:
        before, after = (one.view(-1, 2, half, one.shape[1]) for one in (rows, other))
        torch.add(before[:, 0], before[:, 1], out=after[:, 0])
        torch.sub(before[:, 0], before[:, 1], out=after[:, 1])
        rows, other, half = other, rows, half // 2
    return rows


def _restored(scales: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns numbers ``[blocks, 64]`` from ``[blocks]`` scales and ``[blocks, 64]`` whole numbers."""
    # Whole numbers of at most 64 * 128: exact in any order. Given its output, autocast leaves the product alone.
    values = torch.mm(codes, _HADAMARD, out=torch.empty(codes.shape)).mul_(scales.float()[:, None])
    if dtype == torch.float16 or bool((scales > _ORDINARY[1]).any()):
        # A step beyond the largest number, not an infinity. NaN stays.
        values.clamp_(-_MAX[dtype], _MAX[dtype])
    return values.to(dtype)


def tensor_hash(tensor: Tensor) -> bytes:
    """Returns the SHA-256 of a tensor's type, shape and bytes."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype}{list(plain.shape)}".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.digest()

"""Packs tensors as bytes: unchanged, as half precision, or blockwise 8-bit.

Pure torch: a decoder accepts only a payload of exactly the size that dtype, shape and codec imply. (The compiled
blockwise decoders of other packages trust lengths inside the payload.)
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from swarm_plugins.transport.messages import Codec

BLOCK_ELEMENTS = 256
"""Elements that share one scale in the ``int8`` codec."""

MIN_PACKED_ELEMENTS = 1024
"""Smaller tensors travel unpacked: packing would cost more than it saves."""

_PACKABLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
_FLOAT16_MAX = 65504.0


def is_packable(dtype: torch.dtype, num_elements: int) -> bool:
    """Returns whether codecs other than ``none`` apply to a tensor."""
    return dtype in _PACKABLE and num_elements >= MIN_PACKED_ELEMENTS


def packed_bytes(codec: Codec, dtype: torch.dtype, num_elements: int) -> int:
    """Returns the exact size of a packed tensor."""
    if codec == "none":
        return num_elements * dtype.itemsize
    if codec == "float16":
        return num_elements * 2
    return 4 * math.ceil(num_elements / BLOCK_ELEMENTS) + num_elements


def unpacking_bytes(codec: Codec, dtype: torch.dtype, num_elements: int) -> int:
    """Returns the memory that unpacking allocates, beyond the payload."""
    is_widened = codec == "int8" and dtype != torch.float32
    return num_elements * (dtype.itemsize + (4 if is_widened else 0))


def pack(tensor: Tensor, codec: Codec) -> Tensor:
    """Packs a contiguous CPU tensor; the result is contiguous and may be the tensor itself.

    ``float16`` saturates: a finite number beyond 65504 becomes 65504 instead of infinity, so that one large
    activation does not look like a broken computation; infinities and NaN are kept.
    """
    if codec == "none":
        return tensor
    if codec == "float16":
        return _to_float16(tensor)
    return _to_int8(tensor)


def unpack(payload: Tensor, codec: Codec, dtype: torch.dtype, num_elements: int) -> Tensor:
    """Restores a flat tensor from a payload, flat ``uint8``, of the codec ``float16`` or ``int8``.

    Raises:
        ValueError: If the payload does not have exactly ``packed_bytes(codec, dtype, num_elements)`` elements.
    """
    expected = packed_bytes(codec, dtype, num_elements)
    if payload.numel() != expected:
        raise ValueError(f"{payload.numel()} bytes for {num_elements} elements packed by {codec}, expected {expected}")
    if codec == "float16":
        half = payload.view(torch.float16)
        # The result must own its memory.
        return half.clone() if dtype == torch.float16 else half.to(dtype)
    return _from_int8(payload, dtype, num_elements)


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
    if tensor.dtype == torch.float16:
        return tensor
    clamped = tensor.clamp(-_FLOAT16_MAX, _FLOAT16_MAX)
    if has_non_finite(tensor):
        clamped = torch.where(tensor.isinf(), tensor, clamped)
    return clamped.to(torch.float16)


def _to_int8(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1).float()
    num_elements = flat.numel()
    num_blocks = math.ceil(num_elements / BLOCK_ELEMENTS)
    missing = num_blocks * BLOCK_ELEMENTS - num_elements
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    blocks = flat.view(num_blocks, BLOCK_ELEMENTS)  # [blocks, 256]
    # Dividing absmax before anything is multiplied keeps the largest floats from overflowing.
    scales = blocks.abs().amax(dim=1) / 127.0  # [blocks]; NaN and infinity pass through
    inverse = torch.where(scales > 0, scales.reciprocal(), torch.zeros_like(scales))
    inverse = torch.where(inverse.isinf(), torch.zeros_like(inverse), inverse)  # subnormal scale: the block is zero
    quantized = (blocks * inverse[:, None]).round_().clamp_(-127, 127).nan_to_num_(0.0).to(torch.int8)
    packed = torch.empty(4 * num_blocks + num_elements, dtype=torch.uint8)
    packed[: 4 * num_blocks] = scales.view(torch.uint8)
    packed[4 * num_blocks :] = quantized.view(-1)[:num_elements].view(torch.uint8)
    return packed


def _from_int8(payload: Tensor, dtype: torch.dtype, num_elements: int) -> Tensor:
    num_blocks = math.ceil(num_elements / BLOCK_ELEMENTS)
    scales = payload[: 4 * num_blocks].view(torch.float32)
    values = payload[4 * num_blocks :].view(torch.int8).to(torch.float32)  # [n], fresh memory
    whole = num_elements - num_elements % BLOCK_ELEMENTS
    values[:whole].view(-1, BLOCK_ELEMENTS).mul_(scales[: whole // BLOCK_ELEMENTS, None])
    if whole < num_elements:
        values[whole:].mul_(scales[-1])
    return values.to(dtype)


def tensor_hash(tensor: Tensor) -> bytes:
    """Returns the SHA-256 of a tensor's type, shape and bytes."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype}{list(plain.shape)}".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.digest()

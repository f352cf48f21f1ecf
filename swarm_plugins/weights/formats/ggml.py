"""The formats of GGUF files, as ggml defines them (https://github.com/ggml-org/ggml, ggml-common.h).

A row is cut into blocks of 32 or 256 weights; a block's scales and codes lie together. What each format's function
gets is `[blocks, bytes]`, and what it returns `[blocks, weights]`. The operations are those of gguf-py, in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_plugins.checkpoint.gguf.header import BLOCK_SIZES, PLAIN_TYPES
from swarm_plugins.weights.formats.fp4 import mxfp4_numbers
from swarm_plugins.weights.stored import Part, PublishedFormat

# Weights widened at once, so that temporaries stay small.
_CHUNK_WEIGHTS = 1 << 20


class GgmlType(NamedTuple):
    """One of ggml's types."""

    name: str
    block: int
    """Weights of a block."""
    num_bytes: int
    """Of a block."""
    widen: Callable[[Tensor], Tensor]
    scales: slice
    """Bytes of a block that are floating numbers."""


@dataclass(frozen=True)
class GgmlFormat(PublishedFormat):
    """A weight as blocks of ggml's, row by row; the columns are a multiple of a block."""

    shape: tuple[int, int]
    kind: str
    """Name of the type, such as ``Q4_K``."""

    @property
    def parts(self) -> tuple[Part, ...]:
        rows, columns = self.shape
        kind = GGML_TYPES[self.kind]
        return (Part("codes", torch.uint8, (rows, columns // kind.block * kind.num_bytes)),)

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kind = GGML_TYPES[self.kind]
        scales = tensors["codes"].reshape(-1, kind.num_bytes)[:, kind.scales]
        # A scale of zero is that of a block of zeros.
        is_number = scales != 0xFF if self.kind == "MXFP4" else torch.isfinite(_half(scales))
        if not bool(is_number.all()):
            raise ValueError("its scales hold NaN or infinity")
        return super().checked(tensors)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        kind = GGML_TYPES[self.kind]
        codes, columns = parts["codes"], self.shape[1]
        wide = torch.empty(self.shape, dtype=dtype, device=codes.device)
        rows = max(1, _CHUNK_WEIGHTS // columns)
        for piece, into in zip(codes.split(rows), wide.split(rows), strict=True):
            into.copy_(kind.widen(piece.reshape(-1, kind.num_bytes)).view(-1, columns))
        return wide


def _half(raw: Tensor) -> Tensor:
    """Returns numbers of 2 bytes as float32: ``[blocks, 2 k]`` to ``[blocks, k]``."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Returns low halves, then high ones: ``[blocks, k]`` to ``[blocks, 2 k]``."""
    return torch.cat([raw & 0x0F, raw >> 4], dim=1)


def _bits(raw: Tensor) -> Tensor:
    """Returns the 32 bits of 4 bytes, the lowest first: ``[blocks, 4]`` to ``[blocks, 32]``."""
    places = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw.unsqueeze(2) >> places) & 1).flatten(1)


def q8_0_parts(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes ``[out, in]`` of int8 and the scales ``[out, groups]`` of ``Q8_0``, given rows of bytes."""
    blocks = codes.unflatten(1, (-1, BLOCK_SIZES["Q8_0"][1]))
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(2)
    return blocks[..., 2:].contiguous().view(torch.int8).flatten(1), scales


def q4_0_parts(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes ``[out, in]``, 0 to 15, and the scales ``[out, groups]`` of ``Q4_0``, given rows of bytes."""
    blocks = codes.unflatten(1, (-1, BLOCK_SIZES["Q4_0"][1]))
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(2)
    return _nibbles(blocks[..., 2:].flatten(0, 1)).view(codes.shape[0], -1), scales


def mxfp4_parts(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes ``[out, groups, 16]``, neighbors in a byte, and exponents ``[out, groups]`` of ``MXFP4``."""
    neighbors, exponents = _mxfp4_blocks(codes.reshape(-1, BLOCK_SIZES["MXFP4"][1]))
    rows = codes.shape[0]
    return neighbors.view(rows, -1, neighbors.shape[1]), exponents.view(rows, -1).clone()


def _mxfp4_blocks(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes ``[blocks, 16]`` with neighbors in a byte instead of those 16 columns apart, and exponents."""
    # A copy in any case: what is left of a single block counts as contiguous, but begins at an odd byte.
    words = raw[:, 1:].clone(memory_format=torch.contiguous_format).view(torch.int16)  # two bytes each: [blocks, 8]
    low = (words & 0x0F) | ((words >> 4) & 0xF0)
    high = ((words >> 4) & 0x0F) | ((words >> 8) & 0xF0)
    return torch.cat([low, high], dim=1).to(torch.uint8), raw[:, 0]


def _q8_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * raw[:, 2:].view(torch.int8).float()


def _q4_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:]).float() - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:]).float() + _half(raw[:, 2:4])


def _q5_0(raw: Tensor) -> Tensor:
    codes = _nibbles(raw[:, 6:]) | (_bits(raw[:, 2:6]) << 4)

    return _half(raw[:, :2]) * (codes.float() - 16)


def _q5_1(raw: Tensor) -> Tensor:
    codes = _nibbles(raw[:, 8:]) | (_bits(raw[:, 4:8]) << 4)

    return _half(raw[:, :2]) * codes.float() + _half(raw[:, 2:4])


def _scales_and_minima(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the 6-bit scales and minima of 8 groups in 12 bytes, ``[blocks, 8]`` each."""
    scales, minima, rest = raw.unflatten(1, (3, 4)).unbind(1)
    high_scales, high_minima = (rest & 0x0F) | ((scales >> 2) & 0x30), (rest >> 4) | ((minima >> 2) & 0x30)
    return torch.cat([scales & 0x3F, high_scales], dim=1), torch.cat([minima & 0x3F, high_minima], dim=1)


def _with_minima(raw: Tensor, codes: Tensor) -> Tensor:
    """Returns the weights of codes ``[blocks, 8, 32]``: of each group, ``scale * code - minimum``."""
    scales, minima = _scales_and_minima(raw[:, 4:16])
    step = (_half(raw[:, :2]) * scales.float()).unsqueeze(2)
    low = (_half(raw[:, 2:4]) * minima.float()).unsqueeze(2)
    return (step * codes.float() - low).flatten(1)


def _groups(raw: Tensor) -> Tensor:
    """Returns the half bytes of 128 bytes as 8 groups: of each 32 bytes first the low, then the high halves."""
    runs = raw.unflatten(1, (4, 1, 32))
    return torch.cat([runs & 0x0F, runs >> 4], dim=2).flatten(1, 2)  # [blocks, 8, 32]


def _q4_k(raw: Tensor) -> Tensor:
    return _with_minima(raw, _groups(raw[:, 16:]))


def _q5_k(raw: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=raw.device).unsqueeze(1)
    fifth = (raw[:, 16:48].unsqueeze(1) >> places) & 1  # [blocks, 8, 32]
    return _with_minima(raw, _groups(raw[:, 48:]) | (fifth << 4))


def _q6_k(raw: Tensor) -> Tensor:
    low = raw[:, :128].unflatten(1, (2, 1, 64))
    low = torch.cat([low & 0x0F, low >> 4], dim=2).reshape(-1, 2, 4, 32)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device).unsqueeze(1)
    high = (raw[:, 128:192].unflatten(1, (2, 1, 32)) >> places) & 3
    codes = (low | (high << 4)).to(torch.int8) - 32  # [blocks, 2, 4, 32]
    steps = _half(raw[:, 208:]) * raw[:, 192:208].view(torch.int8).float()  # [blocks, 16]
    wide: Tensor = (steps.unsqueeze(2) * codes.reshape(-1, 16, 16).float()).flatten(1)
    return wide


def _mxfp4(raw: Tensor) -> Tensor:
    return mxfp4_numbers(*_mxfp4_blocks(raw))


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda raw: raw.contiguous().view(dtype).float()


GGML_TYPES: Mapping[str, GgmlType] = {
    kind.name: kind
    for kind in (
        GgmlType("Q4_0", *BLOCK_SIZES["Q4_0"], _q4_0, slice(2)),
        GgmlType("Q4_1", *BLOCK_SIZES["Q4_1"], _q4_1, slice(4)),
        GgmlType("Q5_0", *BLOCK_SIZES["Q5_0"], _q5_0, slice(2)),
        GgmlType("Q5_1", *BLOCK_SIZES["Q5_1"], _q5_1, slice(4)),
        GgmlType("Q8_0", *BLOCK_SIZES["Q8_0"], _q8_0, slice(2)),
        GgmlType("Q4_K", *BLOCK_SIZES["Q4_K"], _q4_k, slice(4)),
        GgmlType("Q5_K", *BLOCK_SIZES["Q5_K"], _q5_k, slice(4)),
        GgmlType("Q6_K", *BLOCK_SIZES["Q6_K"], _q6_k, slice(208, 210)),
        GgmlType("MXFP4", *BLOCK_SIZES["MXFP4"], _mxfp4, slice(1)),
        # Plain, as parts of weights in several tensors.
        *(GgmlType(name, *BLOCK_SIZES[name], _plain(dtype), slice(0)) for name, dtype in PLAIN_TYPES.items()),
    )
}
"""The types that are read, by name."""

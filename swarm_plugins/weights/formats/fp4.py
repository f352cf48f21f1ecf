"""Floating numbers of 4 bits (e2m1), two in a byte, with a scale for each 32 (MXFP4) or 16 (NVFP4) columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from swarm_plugins.weights.stored import Part, PublishedFormat, check_scales

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MX_GROUP, _NV_GROUP = 32, 16
_EXPONENT_BIAS = 127
# Of e8m0, the type of MXFP4's scales: the one byte that means NaN.
_NAN = 255


@dataclass(frozen=True)
class Mxfp4Format(PublishedFormat):
    """A weight whose 32 neighbors in a row share a power of two (OCP Microscaling Formats 1.0, section 5)."""

    shape: tuple[int, int]

    def __post_init__(self) -> None:
        _check_columns(self.shape, _MX_GROUP)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Codes, the even columns in the low halves, and exponents."""
        rows, groups = self.shape[0], self.shape[1] // _MX_GROUP
        return (
            Part("codes", torch.uint8, (rows, groups, _MX_GROUP // 2)),
            Part("scales", torch.uint8, (rows, groups)),
        )

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if bool((tensors["scales"] == _NAN).any()):
            raise ValueError("its scales hold NaN")
        return super().checked(tensors)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return mxfp4_numbers(parts["codes"], parts["scales"]).reshape(self.shape).to(dtype)


@dataclass(frozen=True)
class Nvfp4Format(PublishedFormat):
    """A weight whose 16 neighbors in a row share an e4m3 scale, to be divided by a scale of the whole weight."""

    shape: tuple[int, int]

    def __post_init__(self) -> None:
        _check_columns(self.shape, _NV_GROUP)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Codes, the even columns in the low halves; scales of groups; the scale of the weight."""
        rows, columns = self.shape
        return (
            Part("codes", torch.uint8, (rows, columns // 2)),
            Part("scales", torch.float8_e4m3fn, (rows, columns // _NV_GROUP)),
            Part("global_scale", torch.float32, (1,)),
        )

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_scales(tensors, "scales", "global_scale")
        return super().checked(tensors)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        scales = parts["scales"].float() / parts["global_scale"]  # [out, groups]
        steps = _steps(parts["codes"]).unflatten(1, (-1, _NV_GROUP))
        wide: Tensor = steps.mul_(scales.unsqueeze(-1)).reshape(self.shape)
        return wide.to(dtype)


def mxfp4_numbers(codes: Tensor, exponents: Tensor) -> Tensor:
    """Returns the numbers of groups, ``[.., 32]`` of float32.

    Args:
        codes: ``[.., 16]``, two neighbors in a byte, the first in the low half.
        exponents: ``[..]`` of e8m0.
    """
    powers = exponents.int() - _EXPONENT_BIAS
    scales = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
    return _steps(codes).mul_(scales.unsqueeze(-1))


def _check_columns(shape: tuple[int, int], group: int) -> None:
    if shape[1] % group:
        raise ValueError(f"its {shape[1]} columns are not a multiple of {group}, which share a scale")


def _steps(codes: Tensor) -> Tensor:
    """Returns the numbers ``[.., 2 n]`` of bytes ``[.., n]``, as float32."""
    found = _pairs(codes.device).index_select(0, codes.flatten().int())
    steps: Tensor = found.view(torch.float32).view(*codes.shape[:-1], -1)
    return steps


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """Returns the two numbers of each byte in the bytes of an integer, ``[256]``: one look-up for both."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32, device=device)
    codes = torch.arange(256, device=device)
    return torch.stack([values[codes & 15], values[codes >> 4]], dim=1).view(torch.int64).flatten()

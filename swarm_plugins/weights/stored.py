"""The seam between what a file holds of a weight and whatever computes with it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """One tensor of a weight: its codes, or its scales."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StoredFormat(ABC):
    """A weight ``[out, in]`` as a few tensors."""

    shape: tuple[int, int]
    """Rows and columns of the weight."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The tensors; the first one holds the codes."""

    @abstractmethod
    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the weight ``[out, in]``."""


class QuantizingFormat(StoredFormat):
    """A format that this package also writes."""

    @abstractmethod
    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns the parts of a weight ``[out, in]``, with a small error if there is time to fit."""

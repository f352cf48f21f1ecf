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


class PublishedFormat(StoredFormat):
    """A format that other packages write, into checkpoints that may come from anyone."""

    @property
    def is_kept(self) -> bool:
        """Whether linear layers keep a weight as it is published. False: it is widened once at load."""
        return True

    @property
    def file_parts(self) -> tuple[Part, ...]:
        """The parts that are tensors of a file."""
        return self.parts

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the parts of a weight, given by what a file holds: parts, and tensors that only tell about them.

        Raises:
            ValueError: If a number would make the weight nonsense; says which.
        """
        return {part.name: tensors[part.name] for part in self.parts}


def check_scales(parts: Mapping[str, Tensor], *names: str, may_be_zero: bool = False) -> None:
    """Checks that scales are finite numbers and, unless they are maxima of weights, not zero.

    Raises:
        ValueError: If not.
    """
    for name in names:
        wide = parts[name].float()
        if not bool(torch.isfinite(wide).all()):
            raise ValueError(f"its {name} hold NaN or infinity")
        if not may_be_zero and bool((wide == 0).any()):
            raise ValueError(f"its {name} hold a zero")

"""``kv_b_proj`` of multi-head latent attention in two tensors, as llama.cpp's converter cuts it for its own products.

The rows of a head are keys, then values (arXiv 2405.04434, section 2.1). Those of keys lie turned round, ``[heads, in,
rows]``, so that queries can be multiplied by them; those of values as they are, ``[heads, rows, in]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.weights.formats.ggml import GgmlFormat
from swarm_plugins.weights.formats.stacked import apart
from swarm_plugins.weights.stored import Part, PublishedFormat


@dataclass(frozen=True)
class LatentFormat(PublishedFormat):
    """The weight ``[heads * (keys + values), in]`` as blocks of ggml's; a row of keys is not in one place."""

    shape: tuple[int, int]
    num_heads: int
    keys: GgmlFormat
    """``[heads * in, rows of a head]``."""
    values: GgmlFormat
    """``[heads * rows of a head, in]``."""

    def __post_init__(self) -> None:
        rows, columns = self.shape
        found = [self.num_heads * self.keys.shape[1] + self.values.shape[0], self.values.shape[1]]
        if found != [rows, columns] or self.keys.shape[0] != self.num_heads * columns:
            raise ValueError(
                f"its parts make a weight of {found} with keys {list(self.keys.shape)}, {[rows, columns]} is needed "
                f"with keys of {self.num_heads * columns} rows"
            )

    @property
    def is_kept(self) -> bool:
        return False

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(
            Part(f"codes_{index}", torch.uint8, (self.num_heads, one.shape[0] // self.num_heads, one.parts[0].shape[1]))
            for index, one in enumerate((self.keys, self.values))
        )

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for piece, own in zip((self.keys, self.values), apart(tensors, 2), strict=True):
            piece.checked(own)
        return super().checked(tensors)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        keys, values = (
            piece.widen({"codes": parts[f"codes_{index}"].flatten(0, 1)}, dtype).unflatten(0, (self.num_heads, -1))
            for index, piece in enumerate((self.keys, self.values))
        )
        return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)

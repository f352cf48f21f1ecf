"""8-bit codes with a scale for each group of columns, as two weights of 4 bits next to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.weights.formats.groups import SizedGroups, from_tiles
from swarm_plugins.weights.stored import Part, StoredFormat


@dataclass(frozen=True)
class NibblesFormat(StoredFormat):
    """A weight as its high halves ``16 * scale * high``, and beside them its low ones ``scale * low``.

    The product with rows that are written down twice is that with the weight: torch multiplies with 4 bits and a scale
    for each group, and has nothing for 8 bits but a scale for each row.
    """

    shape: tuple[int, int]
    group_size: int
    """Columns that share a scale."""

    @property
    def halves(self) -> SizedGroups:
        """Of all high halves, and then all low ones: twice as many columns."""
        return SizedGroups((self.shape[0], 2 * self.shape[1]), 4, self.group_size)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.halves.parts

    def arranged(self, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """Returns the parts for codes ``[out, in]`` of int8 and scales ``[out, groups]``, to be rounded to bfloat16."""
        high, low, scales = (codes >> 4) + 8, codes & 15, scales.float()
        # The product takes 8 off each code. Powers of two change no digit of a scale.
        steps, offsets = [16 * scales, scales], [torch.zeros_like(scales), 8 * scales]
        return self.halves.arranged(torch.cat([high, low], 1), torch.cat(steps, 1), torch.cat(offsets, 1))

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        rows, columns = self.shape
        high, low = from_tiles(parts["codes"])[:rows].chunk(2, dim=1)
        codes = ((high << 4) | low) ^ 0x80  # the high half was increased by 8
        scales = parts["scales"][columns // self.group_size :, :rows, 0].T.float().contiguous()  # [out, groups]
        steps = codes.view(torch.int8).unflatten(1, (-1, self.group_size)).float()
        wide: Tensor = steps.mul_(scales.unsqueeze(2)).view(rows, columns)
        return wide.to(dtype)

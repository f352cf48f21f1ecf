"""Several weights one above the other, as gate and up of an expert that transformers holds in one parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.weights.stored import Part, PublishedFormat


@dataclass(frozen=True)
class StackedFormat(PublishedFormat):
    """Weights with as many columns each, every one in a format of its own; their parts stay apart."""

    pieces: tuple[PublishedFormat, ...]
    """From top to bottom."""

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        return sum(piece.shape[0] for piece in self.pieces), self.pieces[0].shape[1]

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(
            part._replace(name=f"{part.name}_{index}")
            for index, piece in enumerate(self.pieces)
            for part in piece.parts
        )

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ends = [f"_{index}" for index in range(len(self.pieces))]
        apart = [{name.removesuffix(end): one for name, one in tensors.items() if name.endswith(end)} for end in ends]
        return self.join([piece.checked(own) for piece, own in zip(self.pieces, apart, strict=True)])

    def join(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the parts of the whole, given those of each piece."""
        return {f"{name}_{index}": one for index, piece in enumerate(parts) for name, one in piece.items()}

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat([piece.widen(own, dtype) for piece, own in self._apart(parts)])

    def _apart(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[PublishedFormat, dict[str, Tensor]]]:
        for index, piece in enumerate(self.pieces):
            yield piece, {part.name: parts[f"{part.name}_{index}"] for part in piece.parts}

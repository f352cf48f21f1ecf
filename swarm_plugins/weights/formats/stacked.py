"""Several weights one above the other, as gate and up of an expert that transformers holds in one parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        each = zip(self.pieces, apart(tensors, len(self.pieces)), strict=True)
        return self.join([piece.checked(own) for piece, own in each])

    def join(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the parts of the whole, given those of each piece."""
        return {f"{name}_{index}": one for index, piece in enumerate(parts) for name, one in piece.items()}

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        each = zip(self.pieces, apart(parts, len(self.pieces)), strict=True)
        return self.rows([piece.widen(own, dtype) for piece, own in each])

    def rows(self, pieces: Sequence[Tensor]) -> Tensor:
        """Returns the rows of the whole, given those of each piece."""
        return torch.cat(list(pieces))


@dataclass(frozen=True)
class InterleavedFormat(StackedFormat):
    """Weights of one shape whose rows alternate, as gate and up of gpt-oss do."""

    def rows(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(pieces), dim=1).flatten(0, 1)


def apart(tensors: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Returns the tensors of each piece by their own names, given those of the whole: ``NAME_INDEX``."""
    ends = [f"_{index}" for index in range(count)]
    return [{name.removesuffix(end): one for name, one in tensors.items() if name.endswith(end)} for end in ends]

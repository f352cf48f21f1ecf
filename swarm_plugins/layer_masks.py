"""Which tokens each new token sees, where it sees some that come after it: inside an image, as Gemma 3 has it.

Everywhere else a model's own forward makes the masks from padding and positions, on the server.

Shapes: ``K`` kinds of layers, ``B`` batch, ``S`` new tokens, ``L`` cached and new tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.errors import UnsupportedError

MAX_KINDS = 8

Kind = Annotated[str, msgspec.Meta(max_length=64)]


class LayerMasks(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """What new tokens see, by kind of layer, without padding."""

    kinds: Annotated[tuple[Kind, ...], msgspec.Meta(min_length=1, max_length=MAX_KINDS)]
    """As the decoder names them. One empty name: all layers have the same mask."""
    bits: Tensor
    """``[K, B, S, ceil(L / 8)]``, uint8: a bit for each token, the lowest first."""
    length: int
    """``L``."""

    def of(self, index: int) -> Tensor:
        """Returns the mask of a kind, ``[B, S, L]``, bool."""
        return _unpacked(self.bits[index], self.length)

    def take_rows(self, rows: slice | Tensor) -> LayerMasks:
        """Returns the masks of some rows."""
        return msgspec.structs.replace(self, bits=self.bits[:, rows])

    def take_tokens(self, start: int, end: int) -> LayerMasks:
        """Returns the masks of some new tokens; they end with the last of these.

        Raises:
            UnsupportedError: If tokens on both sides of a border see each other.
        """
        num_new, cuts = self.bits.shape[2], self.cuts()
        torn = [border for border in (start, end) if 0 < border < num_new and border not in cuts]
        if torn:
            index = bisect_right(cuts, torn[0])
            raise UnsupportedError(
                f"new tokens {cuts[index - 1] if index else 0} to {cuts[index] - 1} see each other (an image?) and "
                f"cannot be cut at {torn[0]}: cut before or after them"
            )
        length = self.length - num_new + end
        return msgspec.structs.replace(self, bits=self.bits[:, :, start:end, : -(-length // 8)], length=length)

    def cuts(self) -> list[int]:
        """Returns the numbers of new tokens, ascending, that see none of the others."""
        bits, num_new = self.bits.flatten(0, 1), self.bits.shape[2]
        together = bits[0].clone()
        for one in bits[1:]:
            together |= one
        seen = _unpacked(together, self.length)[:, self.length - num_new :]  # [S, S]
        index = torch.arange(num_new, device=seen.device)
        farthest = torch.where(seen, index, 0).amax(dim=1).cummax(dim=0).values
        return [int(last) + 1 for last in index[farthest <= index]]


def packed(kinds: Sequence[str], masks: Sequence[Tensor]) -> LayerMasks:
    """Returns the masks of some kinds, given ``[B, S, L]`` bool each."""
    length = masks[0].shape[-1]
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=masks[0].device)
    whole = torch.stack([functional.pad(mask, (0, -length % 8)) for mask in masks])
    bits = (whole.unflatten(-1, (-1, 8)) * weights).sum(dim=-1, dtype=torch.uint8)
    return LayerMasks(kinds=tuple(kinds), bits=bits, length=length)


def _unpacked(bits: Tensor, length: int) -> Tensor:
    """Returns ``[..., ceil(length / 8)]`` as ``[..., length]``, bool."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] >> places) & 1).flatten(-2)[..., :length].bool()

"""Memory for the keys and values of one block, as wide as blocks compute, or as codes of 8 bits.

A code is an integer from -127 to 127; each token of each head has a scale. Its codes of values span zero evenly; those
of keys, which lie to one side of it, span what there is, and have a zero point. So what a token is kept as depends on
nothing that comes with it: a prompt gives the same codes whole or in parts.

Letters in shapes: ``B`` rows, ``H`` heads, ``C`` allocated tokens, ``S`` some of them, ``W`` head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_plugins.weights.names import KV_CODE_BYTES, KV_SCALE_BYTES

_MOST = 127
"""The largest code."""
_LEAST_SCALE = torch.finfo(torch.float32).tiny


class Heads(NamedTuple):
    """What one token has in a buffer."""

    number: int
    width: int
    dtype: torch.dtype
    """Of what is written and read."""
    is_coded: bool = False
    has_zero: bool = False
    """Whether codes have a zero point beside their scale."""

    @property
    def grid_width(self) -> int:
        """Numbers that tell what the codes of a token in a head mean."""
        return 2 if self.has_zero else 1

    @property
    def num_bytes(self) -> int:
        """Bytes of one token of one row."""
        if self.is_coded:
            return self.number * (self.width * KV_CODE_BYTES + self.grid_width * KV_SCALE_BYTES)
        return self.number * self.width * self.dtype.itemsize


class Buffer:
    """Keys, or values, of some rows, ``[B, H, C, W]``.

    Args:
        heads: What one token has.
        num_rows: ``B``.
        capacity: ``C``.
        device: Where they are.
    """

    def __init__(self, heads: Heads, num_rows: int, capacity: int, device: torch.device) -> None:
        self.heads = heads
        shape, kind = (num_rows, heads.number, capacity), torch.int8 if heads.is_coded else heads.dtype
        self.tensors = [torch.empty(*shape, heads.width, dtype=kind, device=device)]
        """The values; or codes and grids, ``[B, H, C, 1 or 2]``."""
        if heads.is_coded:
            self.tensors.append(torch.empty(*shape, heads.grid_width, dtype=torch.float32, device=device))

    def write(self, start: int, new: Tensor, first_head: int = 0) -> None:
        """Writes ``[B, H, S, W]`` from a token on, of all heads or of some."""
        whole = encode(new, has_zero=self.heads.has_zero) if self.heads.is_coded else (new,)
        for tensor, one in zip(self.tensors, whole, strict=True):
            _heads(tensor, first_head, new.shape[1]).narrow(2, start, new.shape[2]).copy_(one)

    def read(self, start: int, length: int, first_head: int, num_heads: int) -> Tensor:
        """Returns some tokens of some heads, ``[B, H, S, W]``: a view, or decoded."""
        found = [_heads(tensor, first_head, num_heads).narrow(2, start, length) for tensor in self.tensors]
        return decode(found[0], found[1], self.heads.dtype) if self.heads.is_coded else found[0]

    def take(self, source: Buffer, start: int, length: int, rows: Sequence[int] | None = None) -> None:
        """Copies tokens of another buffer, of all rows or of those given, to the beginning of this one."""
        for new, old in zip(self.tensors, source.tensors, strict=True):
            kept, taken = new.narrow(2, 0, length), old.narrow(2, start, length)
            if rows is None:
                kept.copy_(taken)
            else:
                for target, row in enumerate(rows):
                    kept[target].copy_(taken[row])


def _heads(tensor: Tensor, first: int, number: int) -> Tensor:
    # Most often it is all of them, and a view takes as long as a small product.
    return tensor if number == tensor.shape[1] else tensor.narrow(1, first, number)


def encode(values: Tensor, *, has_zero: bool = False) -> tuple[Tensor, Tensor]:
    """Returns codes, int8, of ``[..., W]``, and grids, float32: scales, and zero points if they have any.

    NaN and infinity make the grid so, too.
    """
    wide = values.float()
    if not values.shape[-1]:
        return wide.to(torch.int8), wide.new_zeros(*values.shape[:-1], 1 + has_zero)
    if has_zero:
        least, most = wide.amin(-1, keepdim=True) / 2, wide.amax(-1, keepdim=True) / 2
        scales, zeros = (most - least) / _MOST, most + least
        grids, wide = torch.cat([scales, zeros], -1), wide - zeros
    else:
        grids = scales = wide.abs().amax(-1, keepdim=True) / _MOST
    codes = (wide / scales.clamp(min=_LEAST_SCALE)).round_().nan_to_num_(0.0).clamp_(-_MOST, _MOST)
    return codes.to(torch.int8), grids


def decode(codes: Tensor, grids: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of codes, given their grids."""
    # In two steps: torch.addcmul takes twice the time for numbers that are spread over a row.
    wide = codes.to(grids.dtype).mul_(grids[..., :1])
    if grids.shape[-1] > 1:
        wide.add_(grids[..., 1:])
    return wide if wide.dtype == dtype else wide.to(dtype)

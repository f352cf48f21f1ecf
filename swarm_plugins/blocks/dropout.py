"""The dropout of adapters: the same elements are dropped wherever and however often a request is computed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["adapter_dropout_mask"]


def adapter_dropout_mask(seed: int, block: int, module: str, adapter_index: int, shape: Sequence[int]) -> Tensor:
    """Returns uniform numbers in [0, 1) that decide which input elements an adapter's dropout keeps.

    An element is kept where its number is at least the dropout's probability. The same arguments give the same
    numbers on every machine, so that a recomputation sees the same mask.

    Args:
        seed: The request's seed.
        block: Global index of the block.
        module: Path of the adapted module inside the block.
        adapter_index: Index of the adapter among those of the request.
        shape: Shape of the module's input.
    """
    name = hashlib.blake2b(f"{seed}/{block}/{module}/{adapter_index}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(name, "big") >> 1)
    return torch.rand(tuple(shape), generator=generator)

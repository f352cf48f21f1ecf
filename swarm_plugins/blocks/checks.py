"""Checks what goes into a span before anything is computed; every message says the value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError

__all__ = ["check_blocks", "check_hidden", "check_mask", "check_positions", "check_prefix"]


def check_blocks(blocks: range, start: int, end: int) -> None:
    """Checks that blocks are consecutive and inside the span.

    Raises:
        ConfigError: If they are not.
    """
    if blocks.step != 1 or not blocks or blocks.start < start or blocks.stop > end:
        raise ConfigError(f"blocks {blocks.start} to {blocks.stop} are asked of a span of blocks {start} to {end}")


def check_hidden(hidden: Tensor, width: int, dtype: torch.dtype) -> None:
    """Checks that hidden states are ``[B, S, D]`` of the model's width and type.

    Raises:
        ConfigError: If they are not.
    """
    if hidden.ndim != 3 or hidden.shape[2] != width or not hidden.shape[0] or not hidden.shape[1]:
        raise ConfigError(
            f"hidden states have shape {list(hidden.shape)}; allowed is [batch, length, {width}], neither of them 0"
        )
    if hidden.dtype != dtype:
        raise ConfigError(f"hidden states are {hidden.dtype}, the span computes in {dtype}: cast them")


def check_positions(positions: Tensor | None, batch_size: int, num_new: int, cached: int, limit: int) -> None:
    """Checks position ids, given or implied, against the model's longest sequence.

    Raises:
        ConfigError: If their shape, type or values are not allowed.
    """
    if positions is None:
        if cached + num_new > limit:
            raise ConfigError(
                f"the sequence would have {cached + num_new} tokens ({cached} before, {num_new} new); the model allows "
                f"{limit} positions: shorten it"
            )
        return
    if positions.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"position_ids are {positions.dtype}; allowed are int64 and int32")
    if positions.ndim != 2 or positions.shape[0] not in (1, batch_size) or positions.shape[1] != num_new:
        raise ConfigError(
            f"position_ids have shape {list(positions.shape)}; allowed are [{batch_size}, {num_new}] and [1, {num_new}]"
        )
    lowest, highest = (int(bound) for bound in torch.aminmax(positions))
    if lowest < 0 or highest >= limit:
        raise ConfigError(f"position_ids go from {lowest} to {highest}; the model allows 0 to {limit - 1}")


def check_mask(mask: Tensor | None, batch_size: int, length: int) -> None:
    """Checks that a padding mask is ``[batch_size, length]``, bool.

    Raises:
        ConfigError: If it is not.
    """
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ConfigError(f"attention_mask is {mask.dtype}; allowed is bool, True for real tokens")
    if tuple(mask.shape) != (batch_size, length):
        raise ConfigError(
            f"attention_mask has shape {list(mask.shape)}; allowed is [{batch_size}, {length}]: it covers the tokens "
            "before and the new ones"
        )


def check_prefix(prefix: Sequence[Tensor], num_blocks: int, batch_size: int) -> None:
    """Checks that a prefix has K and V for each block, all of one length.

    Raises:
        ConfigError: If it does not.
    """
    if not prefix:
        return
    if len(prefix) != 2 * num_blocks:
        raise ConfigError(
            f"the prefix has {len(prefix)} tensors; {num_blocks} blocks need {2 * num_blocks}, K and V each"
        )
    length = prefix[0].shape[2] if prefix[0].ndim == 4 else 0
    for tensor in prefix:
        if tensor.ndim != 4 or tensor.shape[0] != batch_size or tensor.shape[2] != length or not length:
            raise ConfigError(
                f"a prefix tensor has shape {list(tensor.shape)}; allowed is [{batch_size}, heads, "
                f"{length or 'length'}, width], of one length for all blocks"
            )

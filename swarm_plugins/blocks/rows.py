"""Which tokens of a call belong to which rows of its batch, however a module sees them.

Most modules see the new tokens, ``[B, S, D]`` or flat; a family that expands cached latents (MLA) runs a module over
cached and new tokens together. Both are laid out row after row, in the order of the call's rows, so that the number of
tokens tells which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from swarm_plugins.errors import UnsupportedError

__all__ = ["TokenRows"]


class TokenRows:
    """Finds the tokens of rows.

    Args:
        new: New tokens of each row.
        total: Cached and new tokens of each row.
        device: Where indices are wanted.
    """

    def __init__(self, new: Sequence[int], total: Sequence[int], device: torch.device) -> None:
        self._starts = {sum(counts): (list(counts), [0, *accumulate(counts)]) for counts in (total, new)}
        self._device = device
        self._indices: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def index(self, rows: tuple[int, ...], num_tokens: int) -> Tensor:
        """Returns the indices of some rows' tokens among all tokens that a module sees.

        Raises:
            UnsupportedError: If the module sees another set of tokens.
        """
        key = (rows, num_tokens)
        if key not in self._indices:
            if num_tokens not in self._starts:
                raise UnsupportedError(
                    f"a module sees {num_tokens} tokens, neither the new nor all tokens of the call "
                    f"({', '.join(map(str, self._starts))}): adapters that differ by row do not work on it"
                )
            counts, starts = self._starts[num_tokens]
            pieces = [torch.arange(starts[row], starts[row] + counts[row]) for row in rows]
            self._indices[key] = torch.cat(pieces).to(self._device)
        return self._indices[key]

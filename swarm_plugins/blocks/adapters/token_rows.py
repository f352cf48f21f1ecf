"""Which of the tokens that a module sees belong to which rows of a call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from swarm_plugins.errors import UnsupportedError


class TokenRows:
    """Finds the tokens of rows among those that a module sees.

    Most modules see the new tokens, ``[B, S, D]`` or flat; a family that expands cached latents (MLA) runs a module
    over cached and new tokens together. Both are laid out row after row, in the order of the call's rows, so that the
    number of tokens tells which it is.

    Args:
        new: How many new tokens each row has.
        total: How many cached and new ones.
        device: Where the tokens are.
        padded: How many tokens of padding are in front of the cached ones of each row. Empty: none.
    """

    def __init__(
        self, new: Sequence[int], total: Sequence[int], device: torch.device, padded: Sequence[int] = ()
    ) -> None:
        self._padded = padded or [0] * len(new)
        whole = [tokens + more for tokens, more in zip(total, self._padded, strict=True)]
        self._starts = {sum(counts): (list(counts), [0, *accumulate(counts)]) for counts in (whole, new)}
        self._num_new, self._num_total = sum(new), sum(whole)
        self._before = [known - part for known, part in zip(total, new, strict=True)]
        self._device = device
        self._indices: dict[tuple[tuple[int, ...], int, tuple[int, ...]], Tensor] = {}

    def of_rows(self, num_tokens: int, first_new: int) -> list[tuple[int, int]]:
        """Returns first and last token of each row, as a module sees that runs over ``num_tokens``.

        ``first_new`` is the first of the new tokens in its row.
        """
        if num_tokens not in self._starts:
            return [(0, num_tokens)]
        counts, _ = self._starts[num_tokens]
        first = first_new if num_tokens == self._num_new else 0
        return [(first, first + count) for count in counts]

    def index(self, rows: tuple[int, ...], num_tokens: int, first: tuple[int, ...] = ()) -> Tensor:
        """Returns the indices of some rows' tokens among the ``num_tokens`` that a module sees.

        Args:
            rows: The rows.
            num_tokens: How many tokens the module sees, of all rows.
            first: The first token of each of the rows, cached ones counted. Empty: all of them.

        Raises:
            UnsupportedError: If these are neither the new tokens nor all tokens.
        """
        key = (rows, num_tokens, first)
        if key not in self._indices:
            if num_tokens not in self._starts:
                raise UnsupportedError(
                    f"a module sees {num_tokens} tokens, neither the new nor all tokens of the call "
                    f"({', '.join(map(str, self._starts))}): adapters that differ by row do not work on it"
                )
            counts, starts = self._starts[num_tokens]
            before = [-self._padded[row] if num_tokens == self._num_total else self._before[row] for row in rows]
            skipped = [
                min(max(0, one - known), counts[row])
                for row, one, known in zip(rows, first or (0,) * len(rows), before, strict=True)
            ]
            pieces = [
                torch.arange(starts[row] + skip, starts[row] + counts[row])
                for row, skip in zip(rows, skipped, strict=True)
            ]
            self._indices[key] = torch.cat(pieces).to(self._device)
        return self._indices[key]

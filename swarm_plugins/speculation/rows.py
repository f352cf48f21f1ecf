"""The rows of a batch: their texts, and the places that their tokens have in a cache.

``B`` rows, ``T`` tokens of the longest text, ``L`` places of the cache. Rows that accept fewer tokens than others keep
places that are masked out, so texts are dense and places may have holes.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Texts:
    """The tokens of each row, padded on the right to the longest.

    Args:
        ids: ``[B, T]``, padded on the left as for ``generate()``.
        pad: Token that fills the places after a row's end.
    """

    def __init__(self, ids: Tensor, pad: int) -> None:
        self.ids = ids
        self.pad = pad
        self.lengths = [ids.shape[1]] * ids.shape[0]
        self.active = torch.ones(ids.shape[0], dtype=torch.bool)
        """``[B]``: rows that are not finished."""

    @property
    def active_rows(self) -> list[int]:
        return [int(row) for row in self.active.nonzero()]

    def append(self, row: int, token: int) -> None:
        if self.lengths[row] == self.ids.shape[1]:
            self.ids = torch.cat((self.ids, self.ids.new_full((self.ids.shape[0], 1), self.pad)), dim=1)
        self.ids[row, self.lengths[row]] = token
        self.lengths[row] += 1

    def followed_by(self, tokens: Tensor) -> Tensor:
        """Returns the texts with ``tokens [B, k]`` after the end of each row, ``[B, T + k]``."""
        width = tokens.shape[1]
        ids = torch.cat((self.ids, self.ids.new_full((self.ids.shape[0], width), self.pad)), dim=1)
        for row, length in enumerate(self.lengths):
            ids[row, length : length + width] = tokens[row]
        return ids


class Places:
    """What a cache holds, or will: token, position and mask of each place.

    The last place of each row is its newest token, which no cache has seen.

    Args:
        tokens: ``[B, L]``.
        mask: ``[B, L]``: 1 for real tokens. None: all are real.
        positions: ``[B or 1, L]``, or of several planes, ``[3 or 4, B or 1, L]``. None: the model counts by itself.
    """

    def __init__(self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
        rows = tokens.shape[0]
        self.tokens = tokens
        self.mask = None if mask is None else mask.long()
        self.positions = None if positions is None else positions.expand(*positions.shape[:-2], rows, -1)

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def with_drafts(self, drafts: Tensor) -> Places:
        """Returns these places followed by drafted tokens, ``[B, k]``."""
        width = drafts.shape[1]
        mask, positions = self.mask, self.positions
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(mask.shape[0], width)), dim=1)
        if positions is not None:
            steps = torch.arange(1, width + 1, device=positions.device)
            positions = torch.cat((positions, positions[..., -1:] + steps), dim=-1)
        return Places(torch.cat((self.tokens, drafts), dim=1), mask, positions)

    def accepted(self, drafts: Tensor, counts: Tensor, newest: Tensor, active: Tensor) -> Places:
        """Returns the places after a round: as many as the row needs that accepted most, and the newest tokens.

        Args:
            drafts: ``[B, k]``.
            counts: ``[B]``: how many of them each row accepted.
            newest: ``[B]``: the token after them.
            active: ``[B]``: the rows that go on. Positions of the others move with all places, as in ``generate()``:
                the furthest one may decide on the frequencies of all rows.
        """
        kept = int(counts.max())
        longer = self.with_drafts(torch.cat((drafts[:, :kept], newest[:, None]), dim=1))
        start = self.length
        if longer.positions is not None:
            longer.positions[..., -1] = longer.positions[..., start - 1] + torch.where(active, counts, kept) + 1
        if bool((counts < kept).any()):
            if longer.mask is None:
                longer.mask = torch.ones_like(longer.tokens)
            longer.mask[:, start : start + kept] = (torch.arange(kept)[None] < counts[:, None]).to(longer.mask)
        return longer

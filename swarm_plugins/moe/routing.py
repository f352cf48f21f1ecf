"""Table dispatch: tokens sorted by the expert that they are routed to.

A table costs ``T k`` rows, where the one-hot products of earlier systems cost ``T E`` (DeepSpeed-MoE, Rajbhandari et
al. 2022, section 5.4, replaces them by the same kind of table).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


def rows_of_tokens(wanted: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
    """Returns which rows belong to wanted tokens, as bools ``[N]``."""
    is_wanted = torch.zeros(num_tokens, dtype=torch.bool, device=tokens.device)
    is_wanted[wanted] = True
    return is_wanted[tokens]


class Chunk(NamedTuple):
    """Consecutive experts and their rows."""

    rows: slice
    """Among all sorted rows."""
    parts: list[tuple[int, slice]]
    """Experts that have rows, and which rows of the chunk are theirs."""

    def expert_of_row(self, device: torch.device) -> Tensor:
        """Returns the expert of each row, ``[n]``."""
        counts = [[expert, span.stop - span.start] for expert, span in self.parts]
        experts, repeats = torch.tensor(counts, device=device).unbind(1)
        rows: Tensor = experts.repeat_interleave(repeats)
        return rows


class Routing:
    """Which token and which expert each row of an expert-sorted tensor belongs to.

    Args:
        top_k_index: Chosen experts, ``[T, k]``.
        num_experts: ``E``; larger indices mean an expert that lives elsewhere.
    """

    def __init__(self, top_k_index: Tensor, num_experts: int) -> None:
        self.num_tokens, self.num_chosen = top_k_index.shape
        # Stable: the rows of an expert are in the order of the tokens.
        self.experts, self.order = torch.sort(top_k_index.reshape(-1), stable=True)
        self.tokens = self.order // self.num_chosen
        self._num_experts = num_experts
        self._chunks: dict[int, list[Chunk]] = {}

    def rows_of(self, tokens: Tensor | None) -> tuple[Tensor | None, list[int]]:
        """Returns the sorted rows of some tokens (None: of all) and the number of rows of each expert."""
        experts, index = self.experts, None
        if tokens is not None:
            index = rows_of_tokens(tokens, self.tokens, self.num_tokens).nonzero().squeeze(1)
            experts = experts[index]
        counts: list[int] = torch.bincount(experts, minlength=self._num_experts).tolist()
        return index, counts

    @cached_property
    def spans(self) -> dict[int, slice]:
        """The rows of each expert that has any and lives here; rows of experts elsewhere come last."""
        ends = list(accumulate(self.rows_of(None)[1][: self._num_experts]))
        ranges = enumerate(pairwise([0, *ends]))
        return {expert: slice(start, end) for expert, (start, end) in ranges if end > start}

    @property
    def num_rows(self) -> int:
        """Rows of experts that live here; they come first."""
        return max((span.stop for span in self.spans.values()), default=0)

    def empty_experts(self) -> Sequence[int]:
        """Returns the experts that live here and have no rows."""
        return [expert for expert in range(self._num_experts) if expert not in self.spans]

    def chunks(self, num_rows: int) -> list[Chunk]:
        """Returns the experts that have rows, in chunks of at most so many rows, or of one expert."""
        if num_rows not in self._chunks:
            self._chunks[num_rows] = self._cut(num_rows)
        return self._chunks[num_rows]

    def _cut(self, num_rows: int) -> list[Chunk]:
        found: list[Chunk] = []
        start = 0
        parts: list[tuple[int, slice]] = []
        for expert, span in self.spans.items():
            if parts and span.stop - start > num_rows:
                found.append(Chunk(slice(start, span.start), parts))
                start, parts = span.start, []
            parts.append((expert, slice(span.start - start, span.stop - start)))
        if parts:
            found.append(Chunk(slice(start, self.num_rows), parts))
        return found

    def sum_tokens(self, rows: Tensor) -> Tensor:
        """Sums expert-sorted rows, ``[T * k, D]``, for each token: ``[T, D]``."""
        # Gathers and sums in one pass: a fifth of the time of two. torch.nn.functional makes the offsets each time.
        summed: Tensor = torch.embedding_bag(rows, self._inverse, self._starts)[0]
        return summed

    @cached_property
    def _starts(self) -> Tensor:
        return torch.arange(0, self.order.shape[0], self.num_chosen, device=self.order.device)

    @cached_property
    def _inverse(self) -> Tensor:
        """The sorted place of each token's choices, ``[T * k]``."""
        places = torch.arange(self.order.shape[0], device=self.order.device)
        return torch.empty_like(self.order).scatter_(0, self.order, places)

    def unsort(self, rows: Tensor) -> Tensor:
        """Puts expert-sorted rows, ``[T * k, D]``, back in the order of the tokens."""
        return rows.index_select(0, self._inverse)

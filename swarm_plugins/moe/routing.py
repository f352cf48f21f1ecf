"""Table dispatch: tokens sorted by the expert that they are routed to.

A table costs ``T k`` rows, where the one-hot products of earlier systems cost ``T E`` (DeepSpeed-MoE, Rajbhandari et
al. 2022, section 5.4, replaces them by the same kind of table).
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor


def rows_of_tokens(wanted: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
    """Returns which rows belong to wanted tokens, as bools ``[N]``."""
    is_wanted = torch.zeros(num_tokens, dtype=torch.bool, device=tokens.device)
    is_wanted[wanted] = True
    return is_wanted[tokens]


class Routing:
    """Which token and which expert each row of an expert-sorted tensor belongs to.

    Args:
        top_k_index: Chosen experts, ``[T, k]``.
        num_experts: ``E``; larger indices mean an expert that lives elsewhere.
    """

    def __init__(self, top_k_index: Tensor, num_experts: int) -> None:
        self.num_tokens, num_chosen = top_k_index.shape
        # The same call on the same values as in transformers' grouped implementation, hence the same order.
        self.experts, self.order = torch.sort(top_k_index.reshape(-1))
        self.tokens = self.order // num_chosen
        self._num_experts = num_experts
        self._spans: dict[int, slice] | None = None

    def rows_of(self, tokens: Tensor | None) -> tuple[Tensor | None, list[int]]:
        """Returns the sorted rows of some tokens (None: of all) and the number of rows of each expert."""
        experts, index = self.experts, None
        if tokens is not None:
            index = rows_of_tokens(tokens, self.tokens, self.num_tokens).nonzero().squeeze(1)
            experts = experts[index]
        counts: list[int] = torch.bincount(experts, minlength=self._num_experts).tolist()
        return index, counts

    def spans(self) -> dict[int, slice]:
        """Returns the rows of each expert that has any and lives here; rows of experts elsewhere come last."""
        if self._spans is None:
            ends = list(accumulate(self.rows_of(None)[1][: self._num_experts]))
            ranges = enumerate(pairwise([0, *ends]))
            self._spans = {expert: slice(start, end) for expert, (start, end) in ranges if end > start}
        return self._spans

    def unsort(self, rows: Tensor) -> Tensor:
        """Puts expert-sorted rows, ``[T * k, D]``, back in the order of the tokens."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.order.shape[0], device=self.order.device)
        return rows[inverse]

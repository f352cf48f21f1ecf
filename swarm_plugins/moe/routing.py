"""Table dispatch: tokens sorted by the expert that they are routed to.

A table costs ``T k`` rows, where the one-hot products of earlier systems cost ``T E`` (DeepSpeed-MoE, Rajbhandari et
al. 2022, section 5.4, replaces them by the same kind of table).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Routing"]


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

    def rows_of(self, tokens: Tensor | None) -> tuple[Tensor | None, list[int]]:
        """Returns the sorted rows of some tokens (None: of all) and how many belong to each expert."""
        experts, index = self.experts, None
        if tokens is not None:
            is_wanted = torch.zeros(self.num_tokens, dtype=torch.bool, device=experts.device)
            is_wanted[tokens] = True
            index = is_wanted[self.tokens].nonzero().squeeze(1)
            experts = experts[index]
        counts: list[int] = torch.bincount(experts, minlength=self._num_experts).tolist()
        return index, counts

    def spans(self) -> dict[int, slice]:
        """Returns the rows of each expert that has any and lives here; rows of experts elsewhere come last."""
        _, counts = self.rows_of(None)
        found: dict[int, slice] = {}
        start = 0
        for expert, count in enumerate(counts[: self._num_experts]):
            if count:
                found[expert] = slice(start, start + count)
                start += count
        return found

    def unsort(self, rows: Tensor) -> Tensor:
        """Puts expert-sorted rows, ``[T * k, D]``, back in the order of the tokens."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.order.shape[0], device=self.order.device)
        return rows[inverse]

"""Low-rank adapters on fused expert parameters, applied to the tokens of each expert.

PEFT's layouts: ``A`` is ``[rank * E, in]`` with the expert outermost, ``B`` is ``[out, rank * E]`` with the expert
innermost. The delta is two low-rank products; ``B A`` is never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.moe.routing import Routing, rows_of_tokens


@dataclass(frozen=True)
class ExpertDelta:
    """A low-rank product on one fused parameter."""

    parameter: str
    num_experts: int
    factor_a: Tensor
    """``[rank * E, in]``."""
    factor_b: Tensor
    """``[out, rank * E]``."""
    scaling: float
    index: Callable[[int], Tensor | None]
    """Takes the number of tokens and returns the indices of those to apply it to, None for all."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """Returns views with a dimension for the experts: ``A [E, rank, in]`` and ``B [out, rank, E]``."""
        factor_a = self.factor_a.reshape(self.num_experts, -1, self.factor_a.shape[1])
        factor_b = self.factor_b.reshape(self.factor_b.shape[0], -1, self.num_experts)
        return factor_a, factor_b

    def rows_of(self, tokens: Tensor, num_tokens: int) -> Tensor | None:
        """Returns which rows it applies to, as bools; None: to all."""
        index = self.index(num_tokens)
        return None if index is None else rows_of_tokens(index, tokens, num_tokens)

    def add(self, hidden: Tensor, result: Tensor, routing: Routing) -> Tensor:
        """Adds the product to the rows of an expert-sorted result.

        Args:
            hidden: Input of the experts' product, ``[T * k, in]``, sorted by expert.
            result: Its output, ``[T * k, out]``.
            routing: Which token and expert each row belongs to.
        """
        # Unbound once: slicing an expert at a time would make a full-size gradient for each.
        factor_a, factor_b = self.factors()
        factors_a = factor_a.to(hidden.dtype).unbind(0)
        factors_b = factor_b.to(hidden.dtype).unbind(2)
        index, counts = routing.rows_of(self.index(routing.num_tokens))
        if index is not None:
            hidden = hidden[index]
        # Rows of experts elsewhere, which come last, stay as they are.
        pieces = [
            functional.linear(functional.linear(rows, factors_a[expert]), factors_b[expert])
            if expert < self.num_experts
            else result.new_zeros(rows.shape[0], result.shape[1])
            for expert, rows in enumerate(hidden.split(counts))
            if rows.shape[0]
        ]
        if not pieces:
            return result
        delta = torch.cat(pieces) * self.scaling
        return result + delta if index is None else result.index_add(0, index, delta)


class LowRank(NamedTuple):
    """An adapter on one weight of one expert."""

    parameter: str
    factor_a: Tensor
    """``[rank, in]``."""
    factor_b: Tensor
    """``[out, rank]``."""
    scaling: float
    rows: Tensor | None
    """Which of the expert's rows to apply it to; None: all."""

    def add(self, rows: Tensor, result: Tensor) -> Tensor:
        """Adds the product to a result ``[N, out]`` of the weight, given its input ``[N, in]``."""
        inputs = rows if self.rows is None else rows[self.rows]
        low = functional.linear(inputs, self.factor_a.to(rows.dtype))
        delta = functional.linear(low, self.factor_b.to(rows.dtype)) * self.scaling
        return result + delta if self.rows is None else result.index_add(0, self.rows, delta)


def adapters_of(
    deltas: Sequence[ExpertDelta], tokens: Tensor, num_tokens: int, spans: Mapping[int, slice]
) -> Callable[[int], list[LowRank]]:
    """Returns a function that returns the adapters of one expert.

    Args:
        deltas: The fused adapters.
        tokens: The token of each expert-sorted row, ``[T * k]``.
        num_tokens: ``T``.
        spans: The rows of each expert.
    """
    factors = [(delta, *delta.factors(), delta.rows_of(tokens, num_tokens)) for delta in deltas]

    def adapters(expert: int) -> list[LowRank]:
        return [
            LowRank(
                delta.parameter,
                factor_a[expert],
                factor_b[:, :, expert],
                delta.scaling,
                None if applies is None else applies[spans[expert]].nonzero().squeeze(1),
            )
            for delta, factor_a, factor_b, applies in factors
        ]

    return adapters

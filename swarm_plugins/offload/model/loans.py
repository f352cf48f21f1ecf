"""Lends the experts of one layer, and computes with what is lent.

Each expert is borrowed once, computes all rows that are routed to it, and its results go to their places among the
expert-sorted rows: so the order in which experts arrive changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.moe import expert_mlp
from swarm_plugins.offload.ahead.announce import ReadingAhead
from swarm_plugins.offload.interfaces import ExpertCache, ExpertFormat

__all__ = ["ExpertLoans", "LowRank", "refuse_pickling"]


def refuse_pickling() -> NoReturn:
    """Says why a model with offloaded experts is not pickled.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        "a model with offloaded experts cannot be pickled, it is bound to open files and threads: save its adapter "
        "with save_pretrained, and load the model again with load_offloaded"
    )


class LowRank(NamedTuple):
    """An adapter on one weight of one expert."""

    parameter: str
    factor_a: Tensor
    """``[rank, in]``."""
    factor_b: Tensor
    """``[out, rank]``."""
    scaling: float
    rows: Tensor | None = None
    """Which of the expert's rows it applies to; None: all."""

    def add(self, rows: Tensor, result: Tensor) -> Tensor:
        """Adds its product.

        Args:
            rows: Input of the weight, ``[N, in]``.
            result: Its output, ``[N, out]``.
        """
        inputs = rows if self.rows is None else rows[self.rows]
        low = functional.linear(inputs, self.factor_a.to(rows.dtype))
        delta = functional.linear(low, self.factor_b.to(rows.dtype)) * self.scaling
        return result + delta if self.rows is None else result.index_add(0, self.rows, delta)


class ExpertLoans:
    """Lends the experts of one layer.

    Args:
        layer: Index of the layer.
        form: What their bytes mean.
        cache: Where they are.
        ahead: Announces the next layer's; None: nothing is read ahead.
        shared: What all loans of a cache have in common, and which is gone when the last of them is.
    """

    def __init__(
        self,
        layer: int,
        form: ExpertFormat,
        cache: ExpertCache,
        ahead: ReadingAhead | None = None,
        shared: object = None,
    ) -> None:
        self._layer = layer
        self._form = form
        self._cache = cache
        self._ahead = ahead
        self._shared = shared

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertLoans:
        # Read-only and bound to files and threads: copies of a model share it.
        return self

    def __reduce__(self) -> Any:
        return refuse_pickling()

    def borrow(self, experts: Sequence[int]) -> Generator[tuple[int, Mapping[str, Tensor]]]:
        """Yields each expert once, as it arrives; what is yielded holds until the next is asked for."""
        # To be closed at once when a product fails, not when the traceback is gone.
        return cast("Generator[tuple[int, Mapping[str, Tensor]]]", self._cache.borrow(self._layer, experts))

    def borrow_again(self, experts: Sequence[int]) -> Generator[tuple[int, Mapping[str, Tensor]]]:
        """Does the same in a backward pass."""
        if self._ahead is not None:
            self._ahead.backward(self._layer)
        return self.borrow(experts)

    def run(
        self, module: Any, rows: Tensor, expert: int, tensors: Mapping[str, Tensor], adapters: Iterable[LowRank] = ()
    ) -> Tensor:
        """Runs rows through an expert that is lent.

        Args:
            module: The family's experts.
            rows: ``[N, D]``.
            expert: Its index.
            tensors: What is lent.
            adapters: Its adapters.

        Returns:
            ``[N, D]``.
        """

        def product(name: str, rows: Tensor) -> Tensor:
            result = self._form.linear(tensors, name, rows)
            if module.has_bias:
                result = result + tensors[f"{name}_bias"].to(result.dtype)
            for adapter in adapters:
                if adapter.parameter == name:
                    result = adapter.add(rows, result)
            return result

        return expert_mlp(module, rows, product)

    def run_all(
        self,
        module: Any,
        rows: Tensor,
        spans: Mapping[int, slice],
        adapters: Callable[[int], Iterable[LowRank]],
    ) -> Tensor:
        """Runs expert-sorted rows through their experts.

        Args:
            module: The family's experts.
            rows: ``[N, D]``.
            spans: The rows of each expert; rows of none become zeros.
            adapters: Returns the adapters of an expert.

        Returns:
            ``[N, D]``.
        """
        down: Tensor | None = None
        experts = list(spans)
        if self._ahead is not None:
            self._ahead.forward(self._layer, experts)
        with closing(self.borrow(experts)) as lent:
            for expert, tensors in lent:
                result = self.run(module, rows[spans[expert]], expert, tensors, adapters(expert))
                if down is None:
                    down = result.new_zeros(rows.shape[0], result.shape[1])
                down[spans[expert]] = result
        return torch.zeros_like(rows) if down is None else down

"""Lends the experts of one layer, and computes with them.

Each expert is borrowed once and computes all rows that are routed to it; the results go to their places among the
expert-sorted rows. So the order in which experts arrive changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.moe import ExpertDelta, Routing, expert_mlp
from swarm_plugins.moe.low_rank import LowRank, adapters_of
from swarm_plugins.offload.ahead.announce import ReadingAhead
from swarm_plugins.offload.interfaces import ExpertCache, ExpertFormat


def refuse_pickling() -> NoReturn:
    """Raises the `UnsupportedError` for a model with offloaded experts that is pickled."""
    raise UnsupportedError(
        "a model with offloaded experts cannot be pickled, it is bound to open files and threads: save its adapter "
        "with save_pretrained, and load the model again with load_offloaded"
    )


class ExpertLoans:
    """Lends the experts of one layer; ``ahead`` is shared by the layers of a cache. None: nothing is announced."""

    def __init__(self, layer: int, form: ExpertFormat, cache: ExpertCache, ahead: ReadingAhead | None = None) -> None:
        self._layer = layer
        self._form = form
        self._cache = cache
        self._ahead = ahead or ReadingAhead(cache, {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertLoans:
        # Read-only and bound to files and threads: copies of a model share it.
        return self

    def __reduce__(self) -> Any:
        return refuse_pickling()

    def borrow(
        self, experts: Sequence[int], *, is_backward: bool = False
    ) -> Generator[tuple[int, Mapping[str, Tensor]]]:
        """Yields each expert once, as it arrives; its tensors are valid until the next is asked for."""
        if is_backward:
            self._ahead.backward(self._layer)
        # A generator, so that callers can close it at once when a product fails, not when the traceback is gone.
        return cast("Generator[tuple[int, Mapping[str, Tensor]]]", self._cache.borrow(self._layer, experts))

    def run(
        self,
        module: Any,
        rows: Tensor,
        tensors: Mapping[str, Tensor],
        adapters: Iterable[LowRank] = (),
        scales: Tensor | None = None,
    ) -> Tensor:
        """Runs rows ``[N, D]`` through a borrowed expert with its adapters, and returns ``[N, D]``.

        The results are multiplied by ``scales``, ``[N, 1]``, before the last product (not together with adapters).
        """

        def product(name: str, rows: Tensor) -> Tensor:
            weigh = scales if name == "down_proj" else None
            result = self._form.linear(tensors, name, rows if weigh is None else rows * weigh)
            if module.has_bias:
                bias = self._form.bias(tensors, name, result.dtype)
                result = result + (bias if weigh is None else bias * weigh)
            for adapter in adapters:
                if adapter.parameter == name:
                    result = adapter.add(rows, result)
            return result

        return expert_mlp(module, rows, product)

    def run_all(self, module: Any, hidden: Tensor, routing: Routing, deltas: Sequence[ExpertDelta]) -> Tensor:
        """Runs hidden states ``[T, D]`` through their experts and returns expert-sorted results ``[T * k, D]``.

        Results of experts elsewhere are zero.
        """
        rows, spans = hidden[routing.tokens], routing.spans
        adapters = adapters_of(deltas, routing.tokens, routing.num_tokens, spans)
        down: Tensor | None = None
        experts = list(spans)
        self._ahead.forward(self._layer, experts)
        with closing(self.borrow(experts)) as lent:
            for expert, tensors in lent:
                result = self.run(module, rows[spans[expert]], tensors, adapters(expert))
                if down is None:
                    down = result.new_zeros(rows.shape[0], result.shape[1])
                down[spans[expert]] = result
        return torch.zeros_like(rows) if down is None else down

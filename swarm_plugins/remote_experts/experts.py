"""The experts of a model's blocks, some here and the others at holders: forward and gradients.

Routing weights never travel: the outputs come back row by row and are weighed and summed here, as transformers' grouped
implementation does it. So the gradient of the routing weights needs no message either.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarm_plugins.client.training.autograd import is_scaled
from swarm_plugins.errors import (
    CapacityError,
    MissingExpertsError,
    RemoteError,
    SwarmError,
    TransportError,
    UnsupportedError,
    one_line,
)
from swarm_plugins.moe import Routing, combine
from swarm_plugins.offload.held import HeldExperts
from swarm_plugins.remote_experts.calls import ExpertRows, Holders
from swarm_plugins.transport.codec import has_non_finite

log = logging.getLogger(__name__)


Submit = Callable[[Coroutine[Any, Any, Tensor]], Future[Tensor]]
"""Starts a coroutine on an event loop in another thread."""


class RemoteExperts:
    """Runs the experts of blocks at their holders, and those that are here meanwhile.

    Args:
        holders: Asks the holders; called on the network's event loop only.
        submit: Starts a coroutine there.
        own: Experts on this machine. None: all are elsewhere.
        lifeline: Kept alive as long as this is, such as the connection.
    """

    def __init__(
        self, holders: Holders, submit: Submit, own: HeldExperts | None = None, *, lifeline: object = None
    ) -> None:
        self.holders = holders
        self.own = own
        self._submit = submit
        self._lifeline = lifeline
        self._waiting: set[Future[Tensor]] = set()
        self._is_rehearsing = False
        self._is_closed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteExperts:
        # Bound to a network: copies of a model share it.
        return self

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a model with remote experts cannot be pickled, it is bound to a network: save its adapter with "
            "save_pretrained, and load the model again with load_remote_experts"
        )

    def run(self, block: int, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the experts of a block; differentiable in hidden states and routing weights.

        Args:
            block: Index of the block.
            module: A family's experts, for the flags of transformers' experts registry.
            hidden: ``[T, D]``.
            top_k_index: ``[T, k]``; indices beyond the last expert contribute nothing.
            top_k_weights: ``[T, k]``.

        Returns:
            ``[T, D]``.

        Raises:
            MissingExpertsError: If some expert has no living holder.
            SwarmError: If too many holders failed.
        """
        routing = Routing(top_k_index, module.num_experts)
        down: Tensor = _Rows.apply(self, block, routing, hidden)  # type: ignore[no-untyped-call]
        return combine(module, down, top_k_weights, routing, hidden)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Computes zeros for the experts elsewhere inside the context: to try a model before there are holders."""
        self._is_rehearsing = True
        try:
            yield
        finally:
            self._is_rehearsing = False

    def close(self) -> None:
        """Ends what waits for holders. Idempotent."""
        self._is_closed = True
        for future in tuple(self._waiting):
            future.cancel()

    def rows(self, block: int, hidden: Tensor, routing: Routing, grad: Tensor | None = None) -> Tensor:
        """Returns outputs of expert-sorted rows, or the gradients of these rows, ``[T * k, D]``."""
        spans = routing.spans
        here = range(0) if self.own is None else self.own.experts
        elsewhere = {} if self._is_rehearsing else {one: span for one, span in spans.items() if one not in here}
        with torch.no_grad():
            future = self._ask(block, hidden, routing, elsewhere, grad) if elsewhere else None
            result = hidden.new_zeros(routing.tokens.shape[0], hidden.shape[1])
            own_spans = {one: span for one, span in spans.items() if one in here}
            if self.own is not None and own_spans:
                # While the others are on their way.
                with self._given_up_if_it_fails(future):
                    found = self.own.run(block, hidden[routing.tokens], own_spans, grad)
                for span in own_spans.values():
                    result[span] = found[span].to(result.dtype)
            if future is not None:
                found = self._wait(future, block).to(hidden.device)
                for span in elsewhere.values():
                    result[span] = found[span]
        return result

    @contextmanager
    def _given_up_if_it_fails(self, future: Future[Tensor] | None) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if future is not None:
                future.cancel()
                self._waiting.discard(future)
            raise

    def _ask(
        self, block: int, hidden: Tensor, routing: Routing, spans: Mapping[int, slice], grad: Tensor | None
    ) -> Future[Tensor]:
        if self._is_closed:
            raise TransportError("this connection to the holders of experts is closed: load the model again")
        rows = ExpertRows(
            block=block,
            hidden=hidden.detach().cpu(),
            tokens=routing.tokens.cpu(),
            spans=spans,
            grad=None if grad is None else grad.detach().cpu(),
        )
        future = self._submit(self.holders.run(rows))
        self._waiting.add(future)
        return future

    def _wait(self, future: Future[Tensor], block: int) -> Tensor:
        """Waits for the holders, whose answers have deadlines."""
        try:
            return future.result()
        except CancelledError:
            raise TransportError(f"the wait for experts of block {block} was ended: this side is closing") from None
        except (MissingExpertsError, CapacityError) as exc:
            raise exc.with_traceback(None) from None
        except SwarmError as exc:
            log.debug("experts of block %d failed", block, exc_info=exc)
            raise RemoteError(f"the experts of block {block} failed: {one_line(exc, max_chars=1000)}") from None
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waiting.discard(future)


class _Rows(torch.autograd.Function):
    """Outputs of expert-sorted rows; keeps the hidden states only, the holders run again for the gradients."""

    @staticmethod
    def forward(ctx: Any, experts: RemoteExperts, block: int, routing: Routing, hidden: Tensor) -> Tensor:
        ctx.experts, ctx.block, ctx.routing, ctx.may_overflow = experts, block, routing, is_scaled()
        ctx.save_for_backward(hidden)
        return experts.rows(block, hidden, routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        routing: Routing = ctx.routing
        if ctx.may_overflow and has_non_finite(grad):
            # Holders refuse such gradients. A loss scaler skips the step when it sees NaN, and lowers its scale.
            return None, None, None, torch.full_like(hidden, math.nan)
        grad_rows = ctx.experts.rows(ctx.block, hidden, routing, grad.contiguous())
        # [T * k, D] -> [T, D]
        grad_hidden = routing.unsort(grad_rows).reshape(hidden.shape[0], -1, hidden.shape[1]).sum(dim=1)
        return None, None, None, grad_hidden

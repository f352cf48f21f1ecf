"""Forward and backward of one span, as calls to its server."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.client.answers import check_gradients, check_outputs
from swarm_plugins.client.calls.call import Answer, Call
from swarm_plugins.errors import TransportError
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    ForwardRequest,
    ForwardResponse,
)
from swarm_plugins.transport.optional import or_unset

if TYPE_CHECKING:
    from swarm_plugins.client.calls.retries import ChainRetries
    from swarm_plugins.client.digests import AdapterPart
    from swarm_plugins.client.servers import Servers


class Attempt(NamedTuple):
    """When the server of a call was chosen: several calls under way may find out that it fails."""

    retries: ChainRetries
    since: int
    """The `Retries.moment`."""

    def check(self, peer: str) -> None:
        """Raises TransportError if another call of the batch has found out that a server fails."""
        if self.retries.has_failed(peer, self.since):
            raise TransportError(f"server {peer} has failed meanwhile")


class ForwardCall(Call[ForwardRequest, ForwardResponse]):
    """The forward of one span.

    Args:
        servers: The swarm.
        inputs: Of the span.
        part: The adapters on it.
        keep: Whether a backward will follow.
        attempt: When its server was chosen.
    """

    rpc = "rpc_forward"
    kind = ForwardResponse
    is_queued = True

    def __init__(
        self, servers: Servers, inputs: SpanInputs, part: AdapterPart, *, keep: bool, attempt: Attempt
    ) -> None:
        super().__init__(inputs.blocks, inputs.num_tokens, part.shipped)
        self.inputs = inputs
        self.part = part
        self.attempt = attempt
        self._servers = servers
        self._keep = keep

    @property
    def excluded(self) -> Collection[str]:
        """Servers that are not asked instead."""
        return self.attempt.retries.excluded

    def input(self) -> Tensor:
        """Returns the hidden states."""
        return self.inputs.hidden

    def request(self, peers: Sequence[str]) -> ForwardRequest:
        """Returns the message to the first of some peers."""
        inputs = self.inputs
        return ForwardRequest(
            version=self._servers.view.version.key,
            start=inputs.blocks.start,
            end=inputs.blocks.stop,
            hidden=inputs.hidden.detach(),
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            layer_masks=inputs.layer_masks or msgspec.UNSET,
            token_ids=or_unset(inputs.token_ids),
            adapters=self.part.digests,
            adapter_rows=inputs.adapters.rows,
            dropout_seed=inputs.adapters.dropout_seed,
            prefix=tuple(tensor.detach() for tensor in inputs.prefix),
            collect_hidden=inputs.collect_hidden,
            collect_router=inputs.collect_router,
            keep=self._keep,
            reply_codec=self._servers.view.codecs.between(inputs.hidden, *peers),
            nonce=self._servers.nonce(),
        )

    def check_wanted(self, peer: str) -> None:
        """Raises TransportError if another call of the batch has found out that a server fails."""
        self.attempt.check(peer)

    def receive(self, answer: Answer[ForwardRequest, ForwardResponse]) -> None:
        """Checks the shape of an answer."""
        check_outputs(answer.response, self.inputs, answer.peer)


@dataclass(frozen=True, kw_only=True)
class SpanRun:
    """One span of a finished forward."""

    peer: str
    inputs: SpanInputs
    part: AdapterPart
    request: ForwardRequest
    response: ForwardResponse
    is_pushed: bool
    """See `Answer`."""
    has_ticket: bool
    """Whether a backward may name the graph instead of sending the inputs along."""

    def without_ticket(self) -> SpanRun:
        """Returns a run whose backward sends the inputs along."""
        return replace(self, has_ticket=False)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a backward is to find."""

    hidden: bool
    adapters: Sequence[bool]
    """For each tensor of the adapters."""
    prefix: Sequence[bool]
    lowest: int
    """Block at which it can stop: below it nothing needs a gradient."""


class BackwardCall(Call[BackwardRequest, BackwardResponse]):
    """The backward of one span.

    Args:
        servers: The swarm.
        run: The forward.
        grad: The gradient of its output.
        grads: The gradients of the outputs of the whole chain, which begins with block ``start``.
        needs: What is to be found.
        start: First block of the chain.
        attempt: When its server was chosen.
    """

    rpc = "rpc_backward"
    kind = BackwardResponse
    is_queued = True

    def __init__(
        self,
        servers: Servers,
        run: SpanRun,
        grad: Tensor,
        grads: SpanOutputs,
        needs: Needs,
        *,
        start: int,
        attempt: Attempt,
    ) -> None:
        super().__init__(run.inputs.blocks, run.inputs.num_tokens, run.part.shipped)
        self.run = run
        self.grad = grad
        self.attempt = attempt
        self._servers = servers
        self._grads = grads
        self._needs = needs
        self._start = start

    @property
    def excluded(self) -> Collection[str]:
        """Servers that are not asked instead."""
        return self.attempt.retries.excluded

    def input(self) -> Tensor:
        """Returns the gradient of the output."""
        return self.grad

    def request(self, peers: Sequence[str]) -> BackwardRequest:
        """Returns the message to the first of some peers."""
        run, grads, blocks = self.run, self._grads, self.blocks
        first, last = blocks.start - self._start, blocks.stop - self._start
        routers = zip(grads.router_blocks, grads.router_logits, strict=True)
        # The graph is kept by the server of the forward; others run it again, with the same dropout.
        is_kept = run.has_ticket and peers[0] == run.peer
        codec = self._servers.view.codecs.between(self.grad, *peers)
        if codec != run.request.reply_codec:
            codec = "none"  # a check tells from the forward how far a gradient may be off
        return BackwardRequest(
            ticket=run.response.ticket if is_kept else None,
            forward=None if is_kept else msgspec.structs.replace(run.request, keep=False, reply_codec=codec),
            grad_hidden=self.grad.contiguous(),
            grad_hidden_states=grads.hidden_states[first : last - 1] if run.inputs.collect_hidden else (),
            grad_router_logits=tuple(gradient for block, gradient in routers if block in blocks),
            needs_hidden=blocks.start > self._needs.lowest,
            needs_adapters=any(self._needs.adapters) and bool(run.part.indices),
            needs_prefix=any(self._needs.prefix),
            reply_codec=codec,
            nonce=self._servers.nonce(),
        )

    def check_wanted(self, peer: str) -> None:
        """Raises TransportError if another call of the batch has found out that a server fails."""
        self.attempt.check(peer)

    def receive(self, answer: Answer[BackwardRequest, BackwardResponse]) -> None:
        """Checks the shape of an answer."""
        tensors = [tensor for adapter in self.adapters for tensor in adapter.tensors]
        check_gradients(answer.response, answer.request, self.run.inputs, tensors, answer.peer)

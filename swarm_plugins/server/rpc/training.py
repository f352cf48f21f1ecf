"""``rpc_forward`` and ``rpc_backward``: a span's forward without a session, and its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import torch

from swarm_plugins.block_io import AdapterUse, SpanInputs, SpanOutputs
from swarm_plugins.ledger import Charge
from swarm_plugins.server import limits
from swarm_plugins.server.compute.work import Load, Parts
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.rpc.checks import (
    check_batch,
    check_blocks,
    check_finite,
    check_hidden,
    check_prefix,
    check_tensors,
    checked_ids,
    checked_output,
    checked_outputs,
)
from swarm_plugins.server.rpc.costs import backward_bytes, forward_bytes
from swarm_plugins.server.rpc.handlers import Answer
from swarm_plugins.server.rpc.push import finished, plain_request
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.activations import ActivationStore
from swarm_plugins.server.state.cutting import Portion, cut_batch
from swarm_plugins.server.state.gradients import Gradients, KeptForward, Needs
from swarm_plugins.server.state.runs import run_backward, run_forward
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    ForwardRequest,
    ForwardResponse,
)


async def answer_forward(service: Service, asked: ForwardRequest, charge: Charge) -> Answer:
    """Runs blocks without a session."""
    request = await plain_request(service, asked, charge)
    with checked_inputs(service, request, charge) as inputs:
        portions = cut(service, inputs, charge)
        outputs, ticket = await service.scheduler.train(
            _forward(service, _Graphs(service.activations, charge.peer, request.version), portions, keep=request.keep),
            timeout_s=limits.REQUEST_TIMEOUT_S,
            peer=charge.peer,
            load=load_of(portions),
        )
    service.counts.tokens["forward"] += inputs.num_tokens
    checked = checked_outputs(outputs, request.hidden.dtype)
    response = ForwardResponse(ticket=ticket, **msgspec.structs.asdict(checked))
    response, _ = await finished(service, request.version, asked, request, response, charge)
    return response, request.reply_codec


async def answer_backward(service: Service, asked: BackwardRequest, charge: Charge) -> Answer:
    """Returns the gradients of a forward, through its graph if that was kept."""
    request = await plain_request(service, asked, charge)
    _check_gradients(service, request)
    dtype = request.grad_hidden.dtype
    parts: Sequence[KeptForward | Portion]
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(service.activations.using(charge.peer, request.ticket))
        if kept is not None:
            version, parts = kept[0].version, kept
        else:
            if request.forward is None:
                service.activations.missed()
                raise RequestError(
                    "unknown_ticket",
                    "the graph of this forward is not kept here any more: send the forward request along",
                )
            inputs = stack.enter_context(checked_inputs(service, request.forward, charge))
            version, parts = request.forward.version, cut(service, inputs, charge)
        charge.claim(backward_bytes(service, request, parts[0].inputs.adapters.adapters))
        found = await _backward(service, charge.peer, parts, request)
    response, _ = await finished(service, version, asked, request, _gradient_response(found, dtype), charge)
    return response, request.reply_codec


@contextlib.contextmanager
def checked_inputs(service: Service, request: ForwardRequest, charge: Charge) -> Iterator[SpanInputs]:
    """Yields a request's inputs, checked, charged and in the server's dtype; holds its adapters meanwhile."""
    blocks = check_blocks(service, request.version, request.start, request.end)
    check_hidden(service, request.hidden)
    prefix_tokens = check_prefix(service, request.prefix, blocks, request.hidden.shape[0])
    check_batch(service, request, prefix_tokens)
    check_tensors(service, request, blocks, prefix_tokens)
    with service.adapters.using(charge.peer, request.adapters) as adapters:
        charge.claim(forward_bytes(service, request, len(blocks)))
        yield SpanInputs(
            blocks=blocks,
            hidden=request.hidden.to(service.spec.dtype),
            position_ids=request.position_ids,
            attention_mask=request.attention_mask,
            layer_masks=request.layer_masks or None,
            token_ids=checked_ids(service, request),
            adapters=AdapterUse(adapters=adapters, rows=request.adapter_rows, dropout_seed=request.dropout_seed),
            prefix=tuple(tensor.to(service.spec.dtype) for tensor in request.prefix),
            collect_hidden=request.collect_hidden,
            collect_router=request.collect_router,
        )


def cut(service: Service, inputs: SpanInputs, charge: Charge) -> list[Portion]:
    """Cuts a batch into portions, and charges what one holds while other requests run.

    Raises:
        CapacityError: If there is no room, or a row takes too much.
    """
    portions = cut_batch(inputs, service.spec, service.run_limits)
    charge.claim(max(one.held_bytes for one in portions))
    return portions


def load_of(parts: Sequence[KeptForward | Portion], times: int = 1) -> Load:
    """Returns how much one of some parts computes; ``times`` counts forwards."""
    first = parts[0]
    tokens = first.inputs.num_tokens
    if isinstance(first, Portion) and first.part_tokens is not None:
        tokens = first.inputs.hidden.shape[0] * first.part_tokens
        return Load(times * tokens, 1)
    return Load(times * tokens, len(first.inputs.blocks))


def _forward(
    service: Service, graphs: _Graphs, portions: Sequence[Portion], *, keep: bool
) -> Parts[tuple[SpanOutputs, str | None]]:
    """Runs a forward on the compute thread; returns its outputs and the ticket of its graphs."""
    # Long rows never have a graph of their own.
    is_kept = keep and all(one.part_tokens is None for one in portions)
    try:
        outputs = yield from run_forward(
            service.runner,
            portions,
            keep=graphs.keep if is_kept else None,
            keep_bytes=service.activations.budget_bytes,
            weights=service.runner.weights,
        )
    except BaseException:
        graphs.drop()
        raise
    if is_kept and graphs.num_kept < len(portions):
        graphs.drop()
        service.activations.missed()
    return outputs, graphs.ticket


class _Graphs:
    """The graphs of a forward's portions, kept under one ticket."""

    def __init__(self, store: ActivationStore[KeptForward], peer: str, version: str) -> None:
        self.ticket: str | None = None
        self.num_kept = 0
        self._store = store
        self._peer = peer
        self._version = version

    def keep(self, forward: KeptForward, num_bytes: int) -> bool:
        """Keeps one more; False if there is no room for them all, and none is kept then."""
        self.ticket = self._store.put(
            self._peer, replace(forward, version=self._version), num_bytes, ticket=self.ticket
        )
        self.num_kept += self.ticket is not None
        return self.ticket is not None

    def drop(self) -> None:
        """Gives up those that are kept."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            self._store.take(self._peer, ticket)


def _check_gradients(service: Service, request: BackwardRequest) -> None:
    check_hidden(service, request.grad_hidden, "grad_hidden")
    for tensor in (*request.grad_hidden_states, *request.grad_router_logits):
        check_finite(tensor, "a gradient")


async def _backward(
    service: Service, peer: str, parts: Sequence[KeptForward | Portion], request: BackwardRequest
) -> Gradients:
    grads = SpanOutputs(
        hidden=request.grad_hidden,
        hidden_states=request.grad_hidden_states,
        router_logits=request.grad_router_logits,
    )

    def run() -> Parts[Gradients]:
        found = yield from run_backward(
            service.runner,
            parts,
            grads,
            Needs(request.needs_hidden, request.needs_adapters, request.needs_prefix),
            limit_bytes=service.run_limits.run_bytes,
            weights=service.runner.weights,
            between=service.runner.at_boundary,
        )
        return Gradients(
            hidden=None if found.hidden is None else found.hidden.cpu(),
            adapters=tuple(tensor.cpu() for tensor in found.adapters),
            prefix=tuple(tensor.cpu() for tensor in found.prefix),
        )

    # Gradients of inputs cost twice a forward, and most of it runs again.
    load = load_of(parts, 3 if isinstance(parts[0], Portion) else 2)
    found = await service.scheduler.train(run(), timeout_s=limits.REQUEST_TIMEOUT_S, peer=peer, load=load)
    service.counts.tokens["backward"] += sum(part.inputs.num_tokens for part in parts)
    return found


def _gradient_response(found: Gradients, dtype: torch.dtype) -> BackwardResponse:
    name = "a gradient of the blocks"
    return BackwardResponse(
        grad_hidden=None if found.hidden is None else checked_output(found.hidden, dtype, name),
        grad_adapters=tuple(checked_output(tensor, tensor.dtype, name) for tensor in found.adapters),
        grad_prefix=tuple(checked_output(tensor, dtype, name) for tensor in found.prefix),
    )

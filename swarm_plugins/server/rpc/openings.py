"""``rpc_open``: commits to the states between the blocks of a forward or backward, then shows those that are named.

Between blocks that only run together (see `swarm_plugins.borders`), there is none.

A client that cannot compute a whole span checks one of its blocks: it has the request repeated, gets the hashes of all
states first, and chooses then. So no server knows which block will be checked while it can still change a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.borders import pieces
from swarm_plugins.ledger import Charge
from swarm_plugins.server import limits
from swarm_plugins.server.compute.work import Parts
from swarm_plugins.server.failures import BadRequestError
from swarm_plugins.server.rpc.checks import check_hidden
from swarm_plugins.server.rpc.handlers import Answer, answer_requests
from swarm_plugins.server.rpc.proofs import signed
from swarm_plugins.server.rpc.training import checked_inputs, cut, load_of
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.cutting import Portion, cut_batch
from swarm_plugins.server.state.gradients import Needs
from swarm_plugins.server.state.runs import run_backward, run_forward
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.codec import tensor_hash
from swarm_plugins.transport.messages import Commitment, CommitRequest, OpenedStates, OpenRequest

_IDLE_S = 30.0
"""A client that has seen the hashes names its states within this time."""


async def opening_handler(service: Service, channel: Channel) -> None:
    """Answers commit requests, each followed by requests to open states of it."""
    peer = channel.remote_peer
    states: list[Tensor] = []

    async def answer(request: CommitRequest | OpenRequest, charge: Charge) -> Answer:
        if isinstance(request, OpenRequest):
            return OpenedStates(states=_named(states, request)), "none"
        states.clear()
        kept.release()
        forward = msgspec.structs.replace(request.forward, collect_hidden=True, collect_router=False, keep=False)
        if request.grad is not None:
            check_hidden(service, request.grad, "grad")
            if request.grad.shape != forward.hidden.shape:
                raise BadRequestError(
                    f"grad has shape {list(request.grad.shape)}, the forward's hidden states have "
                    f"{list(forward.hidden.shape)}"
                )
        with checked_inputs(service, forward, charge) as inputs:
            # All outputs are collected, whether a state is between blocks that run apart or not.
            kept.claim((len(inputs.blocks) - 1) * (1 if request.grad is None else 2) * inputs.hidden.nbytes)
            portions = cut(service, inputs, charge)
            found, hashes = await service.scheduler.train(
                _inner_states(service, inputs, portions, request.grad),
                timeout_s=limits.REQUEST_TIMEOUT_S,
                peer=peer,
                load=load_of(portions),
            )
        service.counts.tokens["check"] += inputs.num_tokens
        states.extend(found)
        commitment, _ = await signed(service, forward.version, request, Commitment(hashes=hashes))
        return commitment, "none"

    with service.ledger.charge(peer) as kept:
        await answer_requests(service, "rpc_open", (CommitRequest, OpenRequest), answer, channel, idle_s=_IDLE_S)


def _named(states: Sequence[Tensor], request: OpenRequest) -> tuple[Tensor, ...]:
    wrong = [index for index in request.states if not 0 <= index < len(states)]
    if wrong or len(set(request.states)) != len(request.states):
        raise BadRequestError(
            f"states {list(request.states)[:8]} are to be opened, expected distinct ones of {len(states)}: "
            "send a commit request first"
        )
    return tuple(states[index] for index in request.states)


def _inner_states(
    service: Service, inputs: SpanInputs, portions: Sequence[Portion], grad: Tensor | None
) -> Parts[tuple[list[Tensor], tuple[bytes, ...]]]:
    """Returns the outputs of all pieces but the last, with ``grad`` also their gradients; and the hashes of all."""
    outputs = yield from run_forward(service.runner, portions)
    inner = pieces(inputs.blocks, service.spec.tied)[1:]
    states = [outputs.hidden_states[piece.start - inputs.blocks.start - 1] for piece in inner]
    if grad is not None:
        states += yield from _inner_gradients(service, inputs, inner, states, grad)
    return states, tuple(tensor_hash(state) for state in states)


def _inner_gradients(
    service: Service, inputs: SpanInputs, inner: Sequence[range], states: Sequence[Tensor], grad: Tensor
) -> Parts[list[Tensor]]:
    found: list[Tensor] = []
    for piece, before in zip(reversed(inner), reversed(states), strict=True):
        yield
        one = replace(inputs.take_blocks(piece, before), collect_hidden=False)
        made = yield from run_backward(
            service.runner,
            cut_batch(one, service.spec, service.run_limits),
            SpanOutputs(hidden=found[-1] if found else grad),
            Needs(),
            limit_bytes=service.run_limits.run_bytes,
            weights=service.runner.weights,
            between=service.runner.at_boundary,
        )
        if made.hidden is not None:
            found.append(made.hidden.cpu())
    return found[::-1]

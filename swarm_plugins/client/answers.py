"""Checks servers' answers: maps failures to errors, and verifies shape, dtype and values of what arrives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.errors import (
    CapacityError,
    MissingExpertsError,
    ProtocolError,
    RefusedError,
    RemoteError,
    SessionLostError,
    SwarmError,
    TransportError,
    UnknownAdapterError,
    printable,
)
from swarm_plugins.transport.codec import has_non_finite
from swarm_plugins.transport.messages import BackwardRequest, BackwardResponse, Failure, Message

M = TypeVar("M", bound=Message)


class StreamLostError(TransportError):
    """The stream ended or broke before an answer came."""


class TicketLostError(RemoteError):
    """The server no longer keeps the graph of a forward request: send the inputs again."""


class OverloadedError(RemoteError):
    """Too many requests wait there: the same one is carried out later."""


class SpanMovedError(RemoteError):
    """The server has left the blocks, or is about to: what it serves now has to be asked again."""


class ServerLacksExpertsError(RemoteError, MissingExpertsError):
    """The server has the blocks, but needs experts of them that no living holder has."""


_ERRORS: dict[str, type[SwarmError]] = {
    "bad_request": RefusedError,
    "not_finite": RefusedError,
    "wrong_span": SpanMovedError,
    "draining": SpanMovedError,
    "unknown_adapter": UnknownAdapterError,
    "unknown_ticket": TicketLostError,
    "unknown_session": SessionLostError,
    "missing_experts": ServerLacksExpertsError,
    "out_of_memory": CapacityError,
    "overloaded": OverloadedError,
}


def failure_error(failure: Failure, peer: str) -> SwarmError:
    """Returns the error to raise for a failure answer."""
    return _ERRORS.get(failure.kind, RemoteError)(
        f"server {peer} answered {failure.kind}: {printable(failure.message)}"
    )


def check_answer(answer: Message | None, kind: type[M], peer: str) -> M:
    """Returns an answer, which must be of one kind.

    Raises:
        ProtocolError: If the peer answered with something else.
        StreamLostError: If it closed the stream instead.
        SwarmError: If it answered with a failure (see ``failure_error``).
    """
    if answer is None:
        raise StreamLostError(f"server {peer} closed the stream before it answered")
    if isinstance(answer, Failure):
        raise failure_error(answer, peer)
    if not isinstance(answer, kind):
        raise ProtocolError(f"server {peer} answered with {type(answer).__name__}, expected {kind.__name__}")
    return answer


def check_tensor(got: Tensor | None, like: Tensor, peer: str, what: str) -> None:
    """Raises ProtocolError unless a tensor is present, finite, and like another in shape and dtype."""
    if got is None:
        raise ProtocolError(f"server {peer} left out {what}")
    if got.shape != like.shape or got.dtype != like.dtype:
        raise ProtocolError(
            f"server {peer} returned {what} as {got.dtype} {tuple(got.shape)}, "
            f"expected {like.dtype} {tuple(like.shape)}"
        )
    _check_finite(got, peer, what)


def check_outputs(outputs: SpanOutputs, inputs: SpanInputs, peer: str) -> None:
    """Raises ProtocolError unless every requested tensor is present, finite and of the right shape."""
    hidden, span = inputs.hidden, inputs.blocks
    check_tensor(outputs.hidden, hidden, peer, "the hidden states")
    expected = len(span) - 1 if inputs.collects_inner else 0
    if len(outputs.hidden_states) != expected:
        raise ProtocolError(
            f"server {peer} returned {len(outputs.hidden_states)} inner hidden states, expected {expected}"
        )
    for state in outputs.hidden_states:
        check_tensor(state, hidden, peer, "inner hidden states")
    _check_routers(outputs, inputs, peer)


def _check_routers(outputs: SpanOutputs, inputs: SpanInputs, peer: str) -> None:
    blocks, span = outputs.router_blocks, inputs.blocks
    is_ascending = all(one < two for one, two in itertools.pairwise(blocks))
    if len(blocks) != len(outputs.router_logits) or not is_ascending or not all(block in span for block in blocks):
        raise ProtocolError(
            f"server {peer} returned router logits of blocks {blocks[:8]} ({len(blocks)} in all), its span is "
            f"{(span.start, span.stop)}"
        )
    for logits in outputs.router_logits:
        if logits.ndim != 2 or logits.shape[0] != inputs.num_tokens or not logits.is_floating_point():
            raise ProtocolError(
                f"server {peer} returned router logits of shape {tuple(logits.shape)}, "
                f"expected [{inputs.num_tokens}, experts]"
            )
        _check_finite(logits, peer, "router logits")
    known = inputs.routers if inputs.collect_router else {}
    if known is None:
        return
    # Later, outside of all retries, logits of other blocks or widths would fail the user's step or falsify its loss.
    found = {block: logits.shape[1] for block, logits in zip(blocks, outputs.router_logits, strict=True)}
    expected = {block: width or found.get(block) for block, width in known.items() if block in span}
    if found != expected:
        raise ProtocolError(f"server {peer} returned router logits of blocks and experts {found}, expected {expected}")


def check_same_routers(parts: Sequence[SpanOutputs], who: str) -> None:
    """Raises ProtocolError if the parts of one input have router logits of different blocks or experts."""
    found = [
        [(block, logits.shape[-1]) for block, logits in zip(part.router_blocks, part.router_logits, strict=True)]
        for part in parts
    ]
    for other in found[1:]:
        if other != found[0]:
            raise ProtocolError(
                f"{who} returned router logits of (block, experts) {found[0][:8]} for one part of an input and "
                f"{other[:8]} for another: they must be the same"
            )


def check_gradients(
    answer: BackwardResponse, request: BackwardRequest, inputs: SpanInputs, adapters: Sequence[Tensor], peer: str
) -> None:
    """Raises ProtocolError unless every requested gradient is present, finite, and like what it belongs to."""
    if request.needs_hidden:
        check_tensor(answer.grad_hidden, inputs.hidden, peer, "the gradient of the hidden states")
    elif answer.grad_hidden is not None:
        raise ProtocolError(f"server {peer} returned the gradient of the hidden states, which was not asked for")
    for name, got, want in (
        ("adapter", answer.grad_adapters, adapters if request.needs_adapters else ()),
        ("prefix", answer.grad_prefix, inputs.prefix if request.needs_prefix else ()),
    ):
        if len(got) != len(want):
            raise ProtocolError(f"server {peer} returned {len(got)} {name} gradients, expected {len(want)}")
        for value, reference in zip(got, want, strict=True):
            check_tensor(value, reference, peer, f"an {name} gradient")


def _check_finite(tensor: Tensor, peer: str, what: str) -> None:
    if has_non_finite(tensor):
        raise ProtocolError(f"server {peer} returned NaN or infinity in {what}")

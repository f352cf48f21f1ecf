"""What comes back from a server is checked like anything from the network: count, shape, dtype, finiteness."""

from __future__ import annotations

import itertools

from torch import Tensor

from swarm_plugins.errors import ProtocolError
from swarm_plugins.routing import SpanChoice
from swarm_plugins.transport.messages import ForwardResponse, SessionStepResponse

__all__ = ["check_outputs", "check_tensor"]


def check_tensor(got: Tensor | None, like: Tensor, peer: str, what: str) -> None:
    """Checks a tensor from a server against one of the shape and dtype it must have.

    Raises:
        ProtocolError: If it is absent, of another shape or dtype, or not finite.
    """
    if got is None:
        raise ProtocolError(f"server {peer} left out {what}")
    if got.shape != like.shape or got.dtype != like.dtype:
        raise ProtocolError(
            f"server {peer} returned {what} as {got.dtype} {tuple(got.shape)}, due was {like.dtype} {tuple(like.shape)}"
        )
    _check_finite(got, peer, what)


def check_outputs(
    response: ForwardResponse | SessionStepResponse, span: SpanChoice, hidden: Tensor, *, collect_hidden: bool
) -> None:
    """Checks the answer to a forward or a session step.

    Raises:
        ProtocolError: If a tensor is absent, of a wrong shape or dtype, or not finite.
    """
    check_tensor(response.hidden, hidden, span.peer, "the hidden states")
    expected = span.end - span.start - 1 if collect_hidden else 0
    if len(response.hidden_states) != expected:
        raise ProtocolError(
            f"server {span.peer} returned {len(response.hidden_states)} inner hidden states, {expected} were asked for"
        )
    for state in response.hidden_states:
        check_tensor(state, hidden, span.peer, "inner hidden states")
    blocks = response.router_blocks
    is_ascending = all(one < two for one, two in itertools.pairwise(blocks))
    is_inside = all(span.start <= block < span.end for block in blocks)
    if len(blocks) != len(response.router_logits) or not is_inside or not is_ascending:
        raise ProtocolError(f"server {span.peer} returned router logits of blocks {blocks}, its span is {span[1:]}")
    tokens = hidden.shape[0] * hidden.shape[1]
    for logits in response.router_logits:
        if logits.ndim != 2 or logits.shape[0] != tokens or not logits.is_floating_point():
            raise ProtocolError(
                f"server {span.peer} returned router logits of shape {tuple(logits.shape)}, due was [{tokens}, experts]"
            )
        _check_finite(logits, span.peer, "router logits")


def _check_finite(tensor: Tensor, peer: str, what: str) -> None:
    if not bool(tensor.isfinite().all()):
        raise ProtocolError(f"server {peer} returned NaN or infinity in {what}")

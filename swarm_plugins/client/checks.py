"""What comes back from a server is checked like anything from the network: count, shape, dtype, finiteness."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from swarm_plugins.errors import ProtocolError
from swarm_plugins.routing import SpanChoice
from swarm_plugins.transport.codec import has_non_finite
from swarm_plugins.transport.messages import ForwardResponse, SessionStepResponse

__all__ = ["check_outputs", "check_same_routers", "check_tensor"]


class _WithRouters(Protocol):
    """An answer that may hold router logits."""

    @property
    def router_logits(self) -> Sequence[Tensor]: ...

    @property
    def router_blocks(self) -> Sequence[int]: ...


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


def check_same_routers(parts: Sequence[_WithRouters], who: str) -> None:
    """Checks that the answers to the parts of one input have router logits of the same blocks and numbers of experts.

    Raises:
        ProtocolError: If they differ: they could not be joined.
    """
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


def _check_finite(tensor: Tensor, peer: str, what: str) -> None:
    if has_non_finite(tensor):
        raise ProtocolError(f"server {peer} returned NaN or infinity in {what}")

"""Opens the states at some blocks of a span too large to compute here: first commit, then choose, then open.

The server repeats the request and sends the hashes of all states between its blocks. Only then are blocks chosen: the
last one, whose output is the answer, and others by chance. A wrong answer has a wrong step somewhere between the
input and the answer, which both sides know; where it is, the server has fixed before it learns which steps are checked.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from swarm_plugins.borders import NO_TIES, pieces, tied_inside
from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.codec import has_non_finite, tensor_hash
from swarm_plugins.transport.messages import (
    Commitment,
    CommitRequest,
    ForwardRequest,
    OpenedStates,
    OpenRequest,
)
from swarm_plugins.transport.receipts import check_receipt

if TYPE_CHECKING:
    from swarm_plugins.client.peers import Peers

_NUM_OTHERS = 1
"""Pieces that are chosen by chance, in addition to the last."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Some states of a commitment."""

    request: CommitRequest
    commitment: Commitment
    blocks: tuple[int, ...]
    """The first blocks of the pieces to compute again."""
    tied: frozenset[int] = NO_TIES
    """Blocks of the request that only run behind the one before; see `swarm_plugins.borders`."""
    states: Mapping[int, Tensor]
    """By the index of their hash."""

    @property
    def pieces(self) -> list[range]:
        """All that was asked for, by what runs apart from the rest."""
        forward = self.request.forward
        return pieces(range(forward.start, forward.end), self.tied)


def choose_blocks(starts: Sequence[int]) -> Sequence[int]:
    """Returns the first block of the last piece, and of others by chance."""
    others = secrets.SystemRandom().sample(starts[:-1], min(_NUM_OTHERS, len(starts) - 1))
    return sorted([*others, starts[-1]])


def state_indices(starts: Sequence[int], chosen: Sequence[int], *, has_grad: bool) -> tuple[int, ...]:
    """Returns the indices of the hashes of what goes into and comes out of the chosen pieces.

    Args:
        starts: The first blocks of all pieces.
        chosen: Those of the chosen ones.
        has_grad: Whether there are as many hashes of gradients behind them.
    """
    last = len(starts) - 1
    around = {place for index, start in enumerate(starts) if start in chosen for place in (index - 1, index)}
    inner = sorted(index for index in around if 0 <= index < last)
    return (*inner, *(last + index for index in inner)) if has_grad else tuple(inner)


async def open_blocks(
    peers: Peers,
    peer: str,
    forward: ForwardRequest,
    *,
    grad: Tensor | None = None,
    nonce: bytes,
    tied: Collection[int] = NO_TIES,
) -> Opening:
    """Has a server commit to the states of a request, and open those at some pieces of it.

    Raises:
        ProtocolError: If what is opened is not what the server committed to.
        SwarmError: If the server does not answer, or refuses.
    """
    starts = [piece.start for piece in pieces(range(forward.start, forward.end), tied)]
    request = CommitRequest(forward=msgspec.structs.replace(forward, keep=False), grad=grad, nonce=nonce)
    units = forward.hidden.shape[0] * forward.hidden.shape[1]
    channel = await peers.open(peer, "rpc_open")
    try:
        commitment = await peers.exchange(channel, request, Commitment, work="rpc_open", units=units)
        chosen = tuple(choose_blocks(starts))
        wanted = state_indices(starts, chosen, has_grad=grad is not None)
        opened = await peers.exchange(
            channel, OpenRequest(states=wanted), OpenedStates, work="open states", units=units
        )
    finally:
        await channel.close()
    if len(opened.states) != len(wanted):
        raise ProtocolError(f"server {peer} opened {len(opened.states)} states, expected {len(wanted)}")
    states = dict(zip(wanted, opened.states, strict=True))
    inside = tied_inside(range(forward.start, forward.end), tied)
    opening = Opening(request=request, commitment=commitment, blocks=chosen, states=states, tied=inside)
    check_opening(peer, opening)
    return opening


def check_opening(peer: str, opening: Opening) -> None:
    """Raises ProtocolError unless a server has signed the commitment, and the states are those it committed to."""
    check_receipt(peer, opening.request, opening.commitment)
    forward = opening.request.forward
    num_inner = len(opening.pieces) - 1
    expected = num_inner * (1 if opening.request.grad is None else 2)
    hashes = opening.commitment.hashes
    if len(hashes) != expected:
        raise ProtocolError(f"server {peer} committed to {len(hashes)} states, expected {expected}")
    for index, state in opening.states.items():
        if tensor_hash(state) != hashes[index]:
            raise ProtocolError(f"server {peer} opened another state {index} than it committed to")
        if state.shape != forward.hidden.shape or not state.is_floating_point() or has_non_finite(state):
            raise ProtocolError(f"server {peer} opened a state of shape {list(state.shape)} or with NaN")

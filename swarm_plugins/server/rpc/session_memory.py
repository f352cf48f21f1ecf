"""Memory of sessions: how long a sequence may get, and whose session ends when there is no room for another step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.errors import CapacityError
from swarm_plugins.ledger import Charge, room_of
from swarm_plugins.server import limits
from swarm_plugins.server.failures import BadRequestError, RequestError
from swarm_plugins.server.rpc.checks import check_hidden, check_tensors
from swarm_plugins.server.rpc.costs import forward_bytes
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.cutting import check_together
from swarm_plugins.server.state.sessions import Session, selected_rows, shape_after
from swarm_plugins.transport.messages import SessionStep


@contextlib.contextmanager
def admitted(service: Service, session: Session, request: SessionStep, charge: Charge) -> Iterator[None]:
    """Checks a step whose input is there, and keeps memory for it while it runs.

    Raises:
        RequestError: If it does not fit the session.
        CapacityError: If there is no memory.
    """
    with room(service, session.peer, _check_step(service, session, request), session):
        charge.claim(forward_bytes(service, request, len(session.blocks)))
        yield


def max_tokens(service: Service, blocks: range, batch_size: int) -> int:
    """Returns the longest sequence of a batch that could grow in the KV budget without other sessions."""
    if not 1 <= batch_size <= service.max_batch_tokens:
        raise BadRequestError(f"batch_size is {batch_size}, expected 1 to {service.max_batch_tokens}")
    most = service.max_session_tokens
    if service.kv_bytes is None:
        return most
    room_of_row = int(service.kv_bytes * limits.MAX_KV_SHARE) // batch_size
    return min(most, service.spec.session_bytes(blocks).pages_in(room_of_row))


def too_long(service: Service, batch_size: int, num_tokens: int, limit: int) -> RequestError:
    """Returns the refusal of a sequence longer than ``limit``."""
    most = service.max_session_tokens
    if num_tokens > most:
        return BadRequestError(
            f"the session would hold {num_tokens} tokens per row, this server allows {most}: "
            "shorten the prompt, or use a server that allows more",
        )
    return RequestError(
        "out_of_memory",
        f"the session would hold {num_tokens} tokens in each of {batch_size} rows, the KV budget of this server has "
        f"room for {limit} in each: use fewer rows, or a server with more room",
    )


def _check_step(service: Service, session: Session, request: SessionStep) -> int:
    """Checks a step; returns the bytes that its cache grows by."""
    check_hidden(service, request.hidden)
    rows, num_new = request.hidden.shape[:2]
    batch_size, cached = shape_after(
        request.ops, session.cache.batch_size, session.cache.length, max_rows=service.max_batch_tokens
    )
    if rows != batch_size:
        raise BadRequestError(f"hidden has {rows} rows, the session has {batch_size}")
    if request.cached_tokens != cached:
        raise BadRequestError(
            f"the client counts {request.cached_tokens} cached tokens, this session holds {cached}: "
            "open a new session and replay",
        )
    limit = max_tokens(service, session.blocks, rows)
    if cached + num_new > limit:
        raise too_long(service, rows, cached + num_new, limit)
    check_tensors(service, request, session.blocks, cached)
    mask = request.attention_mask
    if session.cache.has_states and cached and mask is not None and not bool(mask[:, -num_new:].all()):
        raise BadRequestError(
            "attention_mask has padding among new tokens that follow cached ones: blocks with states of fixed size see "
            "it in the first step only, send the whole prompt with that"
        )
    if num_new > 1:
        inputs = SpanInputs(
            blocks=session.blocks,
            hidden=request.hidden,
            position_ids=request.position_ids,
            attention_mask=mask,
            whole_beyond=service.spec.whole_beyond,
            has_states=session.cache.has_states,
        )
        check_together(inputs, cached, service.spec, service.run_limits)
    selects = selected_rows(request.ops, session.cache.batch_size) is not None
    return session.cache.growth_bytes(rows, cached + num_new, num_new, selects=selects)


@contextlib.contextmanager
def room(service: Service, peer: str, asked: int, session: Session | None = None) -> Iterator[None]:
    """Reserves ``asked`` more bytes for a session's cache, closing sessions with expired leases if needed.

    Raises:
        CapacityError: If they do not fit even then, or make one peer's caches too large; nothing is closed then.
    """
    if service.kv_bytes is None or asked <= 0:
        yield
        return
    sessions, group_of = service.sessions, service.points.group
    group = group_of(peer)
    total = service.kv_bytes
    free, held = total - sessions.held_bytes(), sessions.held_bytes(lambda owner: owner == peer)
    of_group = sessions.held_bytes(lambda owner: group_of(owner) == group)
    message = (
        f"the caches of this client's sessions take {held} bytes, those of its address {of_group} and all "
        f"{total - free} of {total}: there is no room for {asked} more; close sessions, or use another server"
    )
    victims: list[Session] = []
    expired = iter(sessions.expired(limits.SESSION_LEASE_S, rank=service.points.rank))
    while asked > room_of(free, held, of_group, limits.MAX_KV_SHARE):
        victim = next(expired, None)
        if victim is None:
            raise CapacityError(message)
        victims.append(victim)
        free += victim.held_bytes
        held -= victim.held_bytes if victim.peer == peer else 0
        of_group -= victim.held_bytes if group_of(victim.peer) == group else 0
    for victim in victims:
        sessions.remove(victim)
        service.inboxes.remove(victim.inbox)
        victim.is_closed = True
        # Before whatever asks for the room: it comes later to the same queue.
        service.scheduler.post(victim.close)
    with sessions.growing(peer, asked, session):
        yield

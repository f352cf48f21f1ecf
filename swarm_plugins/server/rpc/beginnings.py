"""Steps at the beginning of a session: what an earlier session has begun with is not computed again."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence

import torch
from torch import Tensor

from swarm_plugins.block_io import PAGE_TOKENS, SpanOutputs
from swarm_plugins.blocks.kv import RewindError
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.server import limits
from swarm_plugins.server.rpc.proofs import hashing
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.prefixes import Begun, PrefixStore, has_whole_pages
from swarm_plugins.server.state.sessions import Session

log = logging.getLogger(__name__)

Run = Callable[..., Awaitable[SpanOutputs]]
"""Runs a step; accepts `Step.on_chunk`."""


async def run_beginning(service: Service, session: Session, inputs: StepInputs, run: Run) -> tuple[SpanOutputs, int]:
    """Runs a step, but for pages at its beginning that are known; keeps its pages for later sessions.

    Cache operations must not come with it.

    Returns:
        The outputs of all tokens; and how many tokens in each row were known.
    """
    begun, session.begun = session.begun, None
    if begun is None or begun.tokens != session.cache.length or not has_whole_pages(inputs, service.spec):
        return await run(inputs), 0
    prefixes, num_new = service.prefixes, inputs.hidden.shape[1]
    keys = await hashing(inputs.hidden.nbytes, functools.partial(prefixes.keys, begun, inputs))
    if not keys:
        return await run(inputs), 0
    try:
        known = await service.scheduler.call(
            lambda: prefixes.restore(session.cache, keys, num_new),
            timeout_s=limits.REQUEST_TIMEOUT_S,
            peer=session.peer,
        )
        num_known = len(known) * PAGE_TOKENS
        if num_known < num_new:
            keep_part = functools.partial(_keep_part, prefixes, session, begun, keys, tuple(known))
            outputs = await run(
                inputs.take_tokens(num_known, num_new) if known else inputs,
                on_chunk=keep_part if session.cache.is_windowed else None,
            )
            known.append(outputs.hidden)
    except BaseException:
        # A step that fails leaves the cache as it was.
        service.scheduler.post(functools.partial(_take_back, session, begun.tokens))
        raise
    outputs = SpanOutputs(hidden=torch.cat(known, dim=1) if len(known) > 1 else known[0])
    keep = functools.partial(_keep, prefixes, session, session.num_changes, begun, keys, outputs.hidden)
    # At once, as it holds outputs that are not counted any more; at its client's expense.
    service.scheduler.post(keep, payer=session.peer)
    session.begun = Begun(keys[-1], begun.tokens + len(keys) * PAGE_TOKENS)
    return outputs, num_known


def _take_back(session: Session, num_tokens: int) -> None:
    if not session.is_closed:
        # A window may have left what would be needed: the client replays the session then.
        with contextlib.suppress(RewindError):
            session.cache.crop(num_tokens)


def _keep_part(
    prefixes: PrefixStore,
    session: Session,
    begun: Begun,
    keys: Sequence[bytes],
    known: Sequence[Tensor],
    outputs: Sequence[SpanOutputs],
) -> None:
    """Keeps pages of a partly run step before its next chunk frees those outside the window. Never raises."""
    parts = [*known, *(one.hidden for one in outputs)]
    if sum(part.shape[1] for part in parts[:-1]) >= len(keys) * PAGE_TOKENS:
        return
    hidden = torch.cat(parts, dim=1)
    try:
        prefixes.keep(session.peer, session.cache, begun, keys[: hidden.shape[1] // PAGE_TOKENS], hidden)
    except Exception:
        log.exception("the beginning of a session could not be kept")


def _keep(
    prefixes: PrefixStore, session: Session, num_changes: int, begun: Begun, keys: list[bytes], hidden: Tensor
) -> None:
    # Steps that only append may have run meanwhile, but no operation: that could put other tokens there.
    if not session.is_closed and session.num_changes == num_changes:
        prefixes.keep(session.peer, session.cache, begun, keys, hidden)

"""A session of several steps as one forward, which gives the same numbers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch

from swarm_plugins.block_io import AdapterUse, SpanInputs, have_jumps
from swarm_plugins.client.sessions.history import History
from swarm_plugins.errors import SwarmError, one_line
from swarm_plugins.transport.messages import ForwardRequest, SessionOpen, SessionStep
from swarm_plugins.transport.optional import or_none, or_unset
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks, UncheckableError, UncheckableRequestError


def step_inputs(request: SessionStep, blocks: range, adapters: AdapterUse) -> SpanInputs:
    """Returns the inputs of a step as they arrived at the server."""
    return SpanInputs(
        blocks=blocks,
        hidden=request.hidden,
        position_ids=request.position_ids,
        attention_mask=request.attention_mask,
        layer_masks=request.layer_masks or None,
        token_ids=or_none(request.token_ids),
        adapters=adapters,
    )


def session_history(opened: SessionOpen, steps: Iterable[tuple[SessionStep, AdapterUse]]) -> History:
    """Returns the record of a session that was sent some steps, as they arrived."""
    history, blocks = History(opened.prefix), range(opened.start, opened.end)
    for request, use in steps:
        history.append(step_inputs(request, blocks, use))
    return history


def repeated_forward(history: History, step: SessionStep, version: str) -> ForwardRequest:
    """Returns a forward whose last outputs are those of a session's last step.

    Args:
        history: The session.
        step: Its last step.
        version: Of the model.

    Raises:
        UncheckableRequestError: If there is none: the session began with a prefix, or its adapters changed.
    """
    parts = history.merged()
    if history.prefix or len(parts) != 1:
        raise UncheckableRequestError("the session cannot be repeated as one forward")
    (whole,) = parts
    mask, positions = whole.attention_mask, whole.position_ids
    if mask is None and have_jumps(positions):
        # A forward, but not a session, would take jumps for the beginnings of other sequences.
        mask = torch.ones(whole.hidden.shape[:2], dtype=torch.bool)
    return ForwardRequest(
        version=version,
        start=whole.blocks.start,
        end=whole.blocks.stop,
        hidden=whole.hidden,
        position_ids=positions,
        attention_mask=mask,
        layer_masks=whole.layer_masks or msgspec.UNSET,
        token_ids=or_unset(whole.token_ids),
        adapters=step.adapters,
        adapter_rows=step.adapter_rows,
        reply_codec=step.reply_codec,
    )


async def check_repeatable(whole: range, kind: Kind, blocks: LocalBlocks) -> None:
    """Checks that several steps give the same numbers as one forward with all their tokens.

    Raises:
        UncheckableRequestError: If they do not.
        UncheckableError: If the blocks cannot be read here.
    """
    try:
        is_fixed = await blocks.has_fixed_positions(whole, kind)
    except SwarmError as exc:
        raise UncheckableError(one_line(exc)) from exc
    if not is_fixed:
        raise UncheckableRequestError("the positions of this model depend on the tokens that come together")

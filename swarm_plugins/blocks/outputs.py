"""What goes into and comes out of a model's forward, for one session or for several that were packed."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanOutputs
from swarm_plugins.blocks.calls import Call
from swarm_plugins.blocks.packed import PackedRows
from swarm_plugins.blocks.types import StepInputs

__all__ = ["collected", "padding_of", "positions_of", "unpacked"]


def padding_of(step: StepInputs) -> Tensor | None:
    """Returns a step's padding mask, None where it has no padding: most kernels then need no mask."""
    mask = step.attention_mask
    return None if mask is None or bool(mask.all()) else mask


def positions_of(step: StepInputs, part: PackedRows) -> Tensor:
    """Returns the position of each token of a session, ``[1, B * S]``."""
    if step.position_ids is None:
        positions = torch.arange(part.length - part.num_new, part.length, device=step.hidden.device).unsqueeze(0)
    else:
        positions = step.position_ids
    return positions.expand(part.batch_size, -1).reshape(1, -1)  # [1, B * S]


def collected(hidden: Tensor, call: Call) -> SpanOutputs:
    """Returns what a call that ran on its own has to give."""
    routers = call.router_logits or {}
    return SpanOutputs(
        hidden=hidden,
        hidden_states=tuple(call.between or ()),
        router_logits=tuple(routers.values()),
        router_blocks=tuple(routers),
    )


def unpacked(step: StepInputs, part: PackedRows, hidden: Tensor, call: Call) -> SpanOutputs:
    """Cuts what a packed call has to give to one session out of it."""
    routers = (call.router_logits or {}) if step.collect_router else {}
    between = (call.between or ()) if step.collect_hidden else ()
    return SpanOutputs(
        hidden=hidden.narrow(1, part.start, part.num_tokens).reshape(step.hidden.shape),
        hidden_states=tuple(
            state.narrow(1, part.start, part.num_tokens).reshape(step.hidden.shape) for state in between
        ),
        router_logits=tuple(logits.narrow(0, part.start, part.num_tokens) for logits in routers.values()),
        router_blocks=tuple(routers),
    )

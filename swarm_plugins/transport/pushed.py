"""Requests whose input another server pushes: as they are sent without it, and as they are computed.

Plain requests are what receipts are for, and what is checked: as if the client had sent all of it.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from torch import Tensor

from swarm_plugins.transport.messages import BackwardRequest, ForwardRequest, Message, PushSlot, SessionStep

M = TypeVar("M", bound=Message)


def input_name(request: Message) -> str:
    """Returns the field of a request that another server may send: hidden states, or the gradient of the output."""
    return "grad_hidden" if isinstance(request, BackwardRequest) else "hidden"


def emptied(request: M, slot: PushSlot) -> M:
    """Returns a request without its input, which another server pushes; its shape stays, but for the width.

    A session has a slot of its own since it was opened: its steps name the size only.
    """
    name = input_name(request)
    tensor: Tensor = getattr(request, name)
    source = {"pushed_bytes": tensor.nbytes} if isinstance(request, SessionStep) else {"pushed": slot}
    return msgspec.structs.replace(request, **{name: tensor[:, :, :0]}, **source)


def plain(request: M, tensor: Tensor | None = None) -> M:
    """Returns a request without any pushing; ``tensor`` is its input, if it was pushed."""
    found = {} if tensor is None else {input_name(request): tensor}
    if isinstance(request, SessionStep):
        return msgspec.structs.replace(request, pushed_bytes=0, push_to=None, **found)
    if isinstance(request, ForwardRequest | BackwardRequest):
        return msgspec.structs.replace(request, pushed=None, push_to=None, **found)
    return request

"""Requests whose input another server pushes: as they are sent without it, and as they are computed.

Plain requests are what receipts are for, and what is checked: as if the client had sent all of it.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from swarm_plugins.transport.messages import BackwardRequest, ForwardRequest, PushSlot, SessionStep


def emptied_step(request: SessionStep) -> SessionStep:
    """Returns a step without its hidden states, which another server pushes; their shape stays, but for the width."""
    return msgspec.structs.replace(request, hidden=request.hidden[:, :, :0], pushed_bytes=request.hidden.nbytes)


def emptied_forward(request: ForwardRequest, slot: PushSlot) -> ForwardRequest:
    """Returns a forward without its hidden states, which another server pushes to a slot; see `emptied_step`."""
    return msgspec.structs.replace(request, hidden=request.hidden[:, :, :0], pushed=slot)


def emptied_backward(request: BackwardRequest, slot: PushSlot) -> BackwardRequest:
    """Returns a backward without its gradient, which another server pushes to a slot; see `emptied_step`."""
    return msgspec.structs.replace(request, grad_hidden=request.grad_hidden[:, :, :0], pushed=slot)


def plain_step(request: SessionStep, hidden: Tensor) -> SessionStep:
    """Returns a step without any pushing, with its hidden states."""
    return msgspec.structs.replace(request, hidden=hidden, pushed_bytes=0, push_to=None)


def plain_forward(request: ForwardRequest, hidden: Tensor) -> ForwardRequest:
    """Returns a forward without any pushing, with its hidden states."""
    return msgspec.structs.replace(request, hidden=hidden, pushed=None, push_to=None)


def plain_backward(request: BackwardRequest, grad: Tensor) -> BackwardRequest:
    """Returns a backward without any pushing, with the gradient of its output."""
    return msgspec.structs.replace(request, grad_hidden=grad, pushed=None, push_to=None)

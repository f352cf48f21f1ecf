"""What a request holds besides its message until its answer has been read: copies, outputs, gradients.

What running it takes on top exists for one request at a time: `swarm_plugins.server.state.cutting` bounds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.server.rpc.handlers import answer_bytes
from swarm_plugins.server.service import Service
from swarm_plugins.transport.messages import BackwardRequest, ForwardRequest, SessionStep


def forward_bytes(service: Service, request: ForwardRequest | SessionStep, num_blocks: int) -> int:
    """Returns the bytes of a forward's inputs in the server's dtype, and of its outputs."""
    dtype = service.spec.dtype
    prefix = request.prefix if isinstance(request, ForwardRequest) else ()
    inputs = _converted((request.hidden, *prefix), dtype)
    outputs = request.hidden.numel() * (num_blocks if request.collect_hidden else 1)
    made = 0 if dtype == request.hidden.dtype else outputs * dtype.itemsize
    return inputs + made + answer_bytes([outputs * request.hidden.element_size()], request.reply_codec)


def backward_bytes(service: Service, request: BackwardRequest, adapters: Sequence[LoadedAdapter]) -> int:
    """Returns the bytes of a backward's gradients, given and found, apart from its forward's."""
    dtype = service.spec.dtype
    given = (request.grad_hidden, *request.grad_hidden_states, *request.grad_router_logits)
    found = [request.grad_hidden.nbytes] if request.needs_hidden else []
    if request.needs_adapters:
        found.extend(adapter.num_bytes for adapter in adapters)
    if request.needs_prefix and request.forward is not None:
        found.extend(tensor.nbytes for tensor in request.forward.prefix)
    return _converted(given, dtype) + answer_bytes(found, request.reply_codec)


def _converted(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    return sum(tensor.numel() * dtype.itemsize for tensor in tensors if tensor.dtype != dtype)

"""Norms of weights on servers, which some adapters start from (DoRA: Liu et al. 2024, section 4)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarm_plugins.block_io import AdapterUse, LoadedAdapter
from swarm_plugins.client.calls.retries import ChainRetries
from swarm_plugins.client.digests import CallAdapters
from swarm_plugins.errors import ProtocolError, SwarmError
from swarm_plugins.routing import Demand
from swarm_plugins.transport.messages import NormsRequest, NormsResponse

if TYPE_CHECKING:
    from swarm_plugins.client.servers import Servers


async def weight_norms(servers: Servers, adapter: LoadedAdapter, blocks: range) -> dict[tuple[int, str], Tensor]:
    """Returns the norm of each row of the adapted weights, updates included, by block and path of the module.

    Raises:
        MissingBlocksError: If no living server holds some block.
        SwarmError: If a server refuses, or too many servers failed.
    """
    adapters, retries = CallAdapters(servers.digests, AdapterUse(adapters=(adapter,))), ChainRetries(servers.view)
    queue = deque(await retries.chain(blocks, Demand()))
    found: dict[tuple[int, str], Tensor] = {}
    while queue:
        peer, start, end = queue.popleft()
        [part] = adapters.part(range(start, end)).shipped
        if not part.spec.layers:
            continue
        try:
            found.update(await _asked(servers, peer, part))
        except SwarmError as exc:
            retries.note(peer, exc)
            queue.extendleft(reversed(await retries.chain(range(start, end), Demand())))
    retries.succeeded()
    return found


async def _asked(servers: Servers, peer: str, part: LoadedAdapter) -> dict[tuple[int, str], Tensor]:
    layers = [layer for layer in part.spec.peft.layers if layer.needs_norm] if part.spec.peft else []
    factors = part.tensors[len(part.tensors) - len(part.spec.peft.shapes) :] if part.spec.peft else ()
    # A norm has the type of its layer's second factor, `[out, r]`.
    seconds = [factors[layer.places[layer.names.index("lora_B.weight")]] for layer in layers]
    size = sum(len(factor) * factor.element_size() for factor in seconds)
    request = NormsRequest(digest=part.digest, num_bytes=size)
    answer = await servers.peers.with_adapters(
        peer, [part], lambda: servers.peers.request(peer, "rpc_adapter", request, NormsResponse)
    )
    found, expected = [list(norm.shape) for norm in answer.norms], [[len(factor)] for factor in seconds]
    if found != expected:
        raise ProtocolError(f"server {peer} answered with norms of shapes {found[:8]}; expected {expected[:8]}")
    for norm in answer.norms:
        _check_norm(peer, norm)
    return {
        (layer.block, layer.module): norm.to(torch.float32) for layer, norm in zip(layers, answer.norms, strict=True)
    }


def _check_norm(peer: str, norm: Tensor) -> None:
    if not norm.is_floating_point():
        raise ProtocolError(f"server {peer} answered with norms of {norm.dtype}; expected floating point")
    wrong = norm[~(norm.isfinite() & (norm >= 0))]
    if len(wrong):
        raise ProtocolError(f"server {peer} answered with a norm of {float(wrong[0])}, negative or not finite")

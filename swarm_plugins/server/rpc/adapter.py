"""``rpc_adapter``: a client's adapter arrives, is checked and held under its digest; norms that it starts from."""

from __future__ import annotations

import asyncio

import torch

from swarm_plugins.adapter_spec import adapter_digest
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.blocks.adapters.norms import normed_layers
from swarm_plugins.ledger import Charge
from swarm_plugins.server import limits
from swarm_plugins.server.failures import BadRequestError, RequestError
from swarm_plugins.server.rpc.checks import check_finite
from swarm_plugins.server.rpc.handlers import Answer
from swarm_plugins.server.service import Service
from swarm_plugins.transport.messages import AdapterStored, AdapterUpload, NormsRequest, NormsResponse

_INLINE_BYTES, _INLINE_PARTS = 1 << 20, 256
"""Up to this size, and so many tensors and modules, checks of layers that are not built take some milliseconds: not
worth another thread."""


async def answer_adapter(service: Service, upload: AdapterUpload | NormsRequest, charge: Charge) -> Answer:
    """Holds an upload, or returns norms."""
    if isinstance(upload, NormsRequest):
        return await _norms(service, upload, charge), "none"
    size = service.adapters.size_of(upload)
    if size > service.adapters.peer_bytes:
        raise RequestError(
            "out_of_memory",
            f"the adapter takes {size} bytes, one client may hold {service.adapters.peer_bytes} here: "
            "lower its rank or adapt fewer modules, or use a server that allows more",
        )
    charge.claim(size)  # the copy that is kept
    num_parts = len(upload.tensors) + len(upload.spec.modules)
    if upload.num_bytes <= _INLINE_BYTES and num_parts <= _INLINE_PARTS and upload.spec.peft is None:
        adapter = _checked(service, upload)
    else:
        adapter = await _checked_elsewhere(service, upload, charge.peer)
    service.adapters.put(charge.peer, adapter)
    return AdapterStored(digest=upload.digest), "none"


async def _norms(service: Service, request: NormsRequest, charge: Charge) -> NormsResponse:
    with service.adapters.using(charge.peer, [request.digest]) as (adapter,):
        layers = list(normed_layers(adapter))
        # Factors may be shared: norms can take more than the whole adapter.
        charge.claim(sum(layer.norm_bytes for layer in layers))
        norms = await service.scheduler.train(
            service.runner.weight_norms(layers), timeout_s=limits.REQUEST_TIMEOUT_S, peer=charge.peer
        )
    return NormsResponse(norms=norms)


async def _checked_elsewhere(service: Service, upload: AdapterUpload, peer: str) -> LoadedAdapter:
    # One at a time: threads take the interpreter from the compute thread.
    async with service.uploads.turn(service.points.group(peer)):
        if upload.spec.peft is None:
            return await asyncio.to_thread(_checked, service, upload)
        await asyncio.to_thread(_check_content, upload)
    # Layers are built in Python alone, which would hold up the compute thread wherever it runs: they take turns there.
    checking = service.runner.checking_adapter(upload.digest, upload.spec, upload.tensors, service.run_limits.run_bytes)
    adapter = await service.scheduler.train(checking, timeout_s=limits.REQUEST_TIMEOUT_S, peer=peer)
    return await asyncio.to_thread(adapter.map, torch.clone)


def _checked(service: Service, upload: AdapterUpload) -> LoadedAdapter:
    _check_content(upload)
    # Tensors of a message are views of it: kept as they are, they would keep all of its bytes alive, uncounted.
    checked = service.runner.check_adapter(upload.digest, upload.spec, upload.tensors, service.run_limits.run_bytes)
    return checked.map(torch.clone)


def _check_content(upload: AdapterUpload) -> None:
    for tensor in upload.tensors:
        check_finite(tensor, "an adapter tensor")
    found = adapter_digest(upload.spec, upload.tensors)
    if found != upload.digest:
        raise BadRequestError(
            f"the adapter is named {upload.digest[:64]!r}, its content hashes to {found!r}: "
            "send tensors uncompressed and name the adapter by adapter_digest()",
        )

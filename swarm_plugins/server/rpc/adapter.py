"""``rpc_adapter``: a client's adapter arrives, is checked and held under its digest; norms that it starts from."""

from __future__ import annotations

import asyncio

import torch

from swarm_plugins.adapter_spec import adapter_digest
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.ledger import Charge
from swarm_plugins.server import limits
from swarm_plugins.server.compute.work import Load
from swarm_plugins.server.failures import BadRequestError, RequestError
from swarm_plugins.server.rpc.checks import check_finite
from swarm_plugins.server.rpc.handlers import Answer
from swarm_plugins.server.service import Service
from swarm_plugins.transport.messages import AdapterStored, AdapterUpload, NormsRequest, NormsResponse

_INLINE_BYTES, _INLINE_TENSORS = 1 << 20, 256
"""Up to this size checks of layers that are not built take some milliseconds: not worth another thread."""


async def answer_adapter(service: Service, upload: AdapterUpload | NormsRequest, charge: Charge) -> Answer:
    """Holds an upload, or returns norms."""
    if isinstance(upload, NormsRequest):
        return await _norms(service, upload, charge), "none"
    size = upload.num_bytes
    if size > service.adapters.peer_bytes:
        raise RequestError(
            "out_of_memory",
            f"the adapter has {size} bytes, one client may hold {service.adapters.peer_bytes} here: "
            "lower its rank or adapt fewer modules, or use a server that allows more",
        )
    charge.claim(size)  # the copy that is kept
    if size <= _INLINE_BYTES and len(upload.tensors) <= _INLINE_TENSORS and upload.spec.peft is None:
        adapter = _checked(service, upload)
    else:
        adapter = await asyncio.to_thread(_checked, service, upload)
    service.adapters.put(charge.peer, adapter)
    return AdapterStored(digest=upload.digest), "none"


async def _norms(service: Service, request: NormsRequest, charge: Charge) -> NormsResponse:
    with service.adapters.using(charge.peer, [request.digest]) as (adapter,):
        # Each norm is smaller than one of the factors of its update.
        charge.claim(adapter.num_bytes)
        norms = await service.scheduler.train(
            lambda: tuple(norm.cpu() for norm in service.runner.weight_norms(adapter)),
            timeout_s=limits.REQUEST_TIMEOUT_S,
            peer=charge.peer,
            load=Load(16, max(1, len(adapter.spec.layers))),
        )
    return NormsResponse(norms=norms)


def _checked(service: Service, upload: AdapterUpload) -> LoadedAdapter:
    for tensor in upload.tensors:
        check_finite(tensor, "an adapter tensor")
    found = adapter_digest(upload.spec, upload.tensors)
    if found != upload.digest:
        raise BadRequestError(
            f"the adapter is named {upload.digest[:64]!r}, its content hashes to {found!r}: "
            "send tensors uncompressed and name the adapter by adapter_digest()",
        )
    adapter = service.runner.check_adapter(upload.digest, upload.spec, upload.tensors, service.run_limits.run_bytes)
    # Tensors of a message are views of it: kept as they are, they would keep all of its bytes alive, uncounted.
    return adapter.map(torch.clone)

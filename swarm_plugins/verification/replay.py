"""Replays evidence: a third party's way to the same verdict."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from torch import Tensor

from swarm_plugins.adapter_spec import adapter_digest
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.messages import (
    AdapterUpload,
    BackwardRequest,
    BackwardResponse,
    Commitment,
    CommitRequest,
    ForwardRequest,
    ForwardResponse,
    Message,
    OpenedStates,
    Receipt,
)
from swarm_plugins.transport.receipts import check_receipt, message_hash
from swarm_plugins.transport.wire import decode
from swarm_plugins.verification.evidence import Evidence, OpenedFrames
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.openings import Opening, check_opening, state_indices
from swarm_plugins.verification.recompute import Asked, recompute_backward, recompute_forward, recompute_opened
from swarm_plugins.verification.scores import Verdict

M = TypeVar("M", bound=Message)


async def replay(evidence: Evidence, blocks: LocalBlocks) -> list[Verdict]:
    """Checks the signatures of evidence and computes its blocks again; the answer is wrong if a verdict says so.

    Raises:
        ProtocolError: If a signature, a digest or a frame does not fit: then the evidence shows nothing.
        SwarmError: If the blocks cannot be read or run here.
    """
    request, answer = _read(evidence.request, ForwardRequest), _read(evidence.answer, ForwardResponse)
    if evidence.backward is None:
        backward, receipt = None, check_receipt(evidence.peer, request, answer)
    else:
        backward = _read(evidence.backward[0], BackwardRequest), _read(evidence.backward[1], BackwardResponse)
        receipt = _check_backward(evidence.peer, request, answer, *backward)
    if receipt.version != request.version or not evidence.model.endswith(request.version):
        raise ProtocolError(f"the receipt is for version {receipt.version}, the request for {request.version}")
    adapters = tuple(_adapter(_read(frame, AdapterUpload)) for frame in evidence.adapters)
    if tuple(one.digest for one in adapters) != request.adapters:
        raise ProtocolError("the evidence holds other adapters than its request names")
    asked = Asked(request, adapters, Kind(receipt.dtype, receipt.quantization))
    grad = None if backward is None else backward[0].grad_hidden
    if evidence.opening is not None:
        opening = _read_opening(evidence.peer, evidence.opening, request, grad)
        return await recompute_opened(asked, answer if backward is None else backward[1], opening, blocks)
    if backward is not None:
        return await recompute_backward(asked, *backward, blocks)
    return await recompute_forward(asked, answer, blocks)


def _check_backward(
    peer: str, request: ForwardRequest, answer: ForwardResponse, second: BackwardRequest, found: BackwardResponse
) -> Receipt:
    """Checks that a server has signed a backward that belongs to a forward."""
    receipt = check_receipt(peer, second, found)
    if second.forward is None:
        # Only here the server answered the forward too.
        check_receipt(peer, request, answer)
        is_same = second.ticket == answer.ticket
    else:
        is_same = _is_repeated(second.forward, request)
    if not is_same:
        raise ProtocolError("the backward of the evidence belongs to another forward")
    return receipt


def _read_opening(peer: str, frames: OpenedFrames, forward: ForwardRequest, grad: Tensor | None) -> Opening:
    """Reads what a server has opened of a forward, or of its backward for a gradient, and checks its signature."""
    request, states = _read(frames.request, CommitRequest), _read(frames.states, OpenedStates).states
    blocks = range(request.forward.start, request.forward.end)
    due = state_indices(blocks, frames.blocks, has_grad=request.grad is not None)
    if not frames.blocks or any(block not in blocks for block in frames.blocks) or frames.indices != due:
        raise ProtocolError(f"the evidence opens states {frames.indices} at blocks {frames.blocks}, expected {due}")
    if len(states) != len(due):
        raise ProtocolError(f"the evidence has {len(states)} states, expected {len(due)}")
    opening = Opening(
        request=request,
        commitment=_read(frames.commitment, Commitment),
        blocks=frames.blocks,
        states=dict(zip(due, states, strict=True)),
    )
    check_opening(peer, opening)
    if not _is_repeated(request.forward, forward):
        raise ProtocolError("what the server has opened in the evidence belongs to another request")
    if not _is_equal(request.grad, grad):
        raise ProtocolError("what the server has opened in the evidence is for another gradient")
    return opening


def _is_repeated(again: ForwardRequest, request: ForwardRequest) -> bool:
    one, other = (message_hash(msgspec.structs.replace(each, keep=False), "none") for each in (again, request))
    return one == other


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else one.equal(other)


def _adapter(upload: AdapterUpload) -> LoadedAdapter:
    digest = adapter_digest(upload.spec, upload.tensors)
    if digest != upload.digest:
        raise ProtocolError(f"an adapter of the evidence has digest {digest}, it claims {upload.digest}")
    return LoadedAdapter(digest=digest, spec=upload.spec, tensors=upload.tensors)


def _read(frame: bytes, kind: type[M]) -> M:
    message = decode(frame)
    if not isinstance(message, kind):
        raise ProtocolError(f"the evidence holds a {type(message).__name__}, expected a {kind.__name__}")
    return message

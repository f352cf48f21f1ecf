"""Replays evidence: a third party's way to the same verdict."""

from __future__ import annotations

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    ForwardRequest,
    ForwardResponse,
    Receipt,
)
from swarm_plugins.transport.receipts import check_receipt
from swarm_plugins.verification.evidence import Evidence
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.openings import Opening
from swarm_plugins.verification.reading import (
    PastSession,
    check_version,
    is_repeated,
    read_adapters,
    read_frame,
    read_opening,
    read_session,
)
from swarm_plugins.verification.recompute import (
    Asked,
    recompute_backward,
    recompute_forward,
    recompute_opened,
    travelled,
)
from swarm_plugins.verification.repeated import check_repeatable
from swarm_plugins.verification.scores import Verdict
from swarm_plugins.verification.shadow import Shadow


async def replay(evidence: Evidence, blocks: LocalBlocks) -> list[Verdict]:
    """Checks the signatures of evidence and computes its blocks again; the answer is wrong if a verdict says so.

    Raises:
        ProtocolError: If a signature, a digest or a frame does not fit: then the evidence shows nothing.
        SwarmError: If the blocks cannot be read or run here.
    """
    if evidence.session is not None:
        return await _replay_session(read_session(evidence), blocks)
    request, answer = read_frame(evidence.request, ForwardRequest), read_frame(evidence.answer, ForwardResponse)
    if evidence.backward is None:
        backward, receipt = None, check_receipt(evidence.peer, request, answer)
    else:
        backward = read_frame(evidence.backward[0], BackwardRequest), read_frame(evidence.backward[1], BackwardResponse)
        receipt = _check_backward(evidence.peer, request, answer, *backward)
    check_version(evidence, receipt, request.version)
    adapters = read_adapters(evidence)
    if tuple(one.digest for one in adapters) != request.adapters:
        raise ProtocolError("the evidence holds other adapters than its request names")
    asked = Asked(request, adapters, Kind(receipt.dtype, receipt.quantization))
    codec = request.reply_codec
    # The signature is for the packed answer, from which other values than these could be packed too.
    answer = travelled(answer, codec)
    grad = None if backward is None else backward[0].grad_hidden
    if evidence.opening is not None:
        opening = read_opening(evidence.peer, evidence.opening, request, grad)
        found = answer if backward is None else travelled(backward[1], codec)
        return await recompute_opened(asked, found, opening, blocks)
    if backward is not None:
        return await recompute_backward(asked, backward[0], travelled(backward[1], codec), blocks)
    return await recompute_forward(asked, answer, blocks)


async def _replay_session(past: PastSession, blocks: LocalBlocks) -> list[Verdict]:
    """Computes a session again, and compares the server's answers to its last steps.

    Raises:
        SwarmError: If the blocks cannot be read or run here.
    """
    if past.opening is not None:
        return await _replay_opened(past, past.opening, blocks)
    shadow = Shadow(past.opened.prefix, range(past.opened.start, past.opened.end), past.kind)
    first = len(past.steps) - len(past.answers)
    await shadow.skip(past.steps[:first], blocks)
    for (step, use), answer in zip(past.steps[first:], past.answers, strict=True):
        shadow.add(step, use, answer.hidden)
    return await shadow.compare(blocks)


async def _replay_opened(past: PastSession, opening: Opening, blocks: LocalBlocks) -> list[Verdict]:
    if len(past.steps) > 1:
        await check_repeatable(past.opened.start, past.kind, blocks)
    asked = Asked(past.repeated, past.steps[-1][1].adapters, past.kind)
    return await recompute_opened(asked, ForwardResponse(hidden=past.answers[-1].hidden), opening, blocks)


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
        is_same = is_repeated(second.forward, request)
    if not is_same:
        raise ProtocolError("the backward of the evidence belongs to another forward")
    # How far an answer may be off follows from the forward.
    if (second.reply_codec, second.grad_hidden.dtype) != (request.reply_codec, request.hidden.dtype):
        raise ProtocolError("the backward of the evidence has travelled in another type than its forward")
    return receipt

"""Replays evidence, a third party's way to the same verdict: checks what the server has signed, and computes it again.

The receipt of a step of a session names a hash of the session's opening and of all requests before the step, so the
evidence holds all of them. It shows nothing about a session whose cache was changed in between (cropped, reordered,
forked): then the answers depend on more than the tokens that were sent.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from swarm_plugins.adapter_spec import adapter_digest
from swarm_plugins.block_io import AdapterUse, LoadedAdapter
from swarm_plugins.borders import pieces
from swarm_plugins.errors import CapacityError, ProtocolError, SwarmError, is_out_of_memory, one_line
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
    SessionOpen,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.optional import or_none
from swarm_plugins.transport.receipts import check_receipt, history_after, request_hash
from swarm_plugins.transport.wire import decode
from swarm_plugins.verification.claims import Claim, travelled
from swarm_plugins.verification.evidence import Evidence, SessionFrames
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.openings import Opening, check_opening, state_indices
from swarm_plugins.verification.recompute import recompute
from swarm_plugins.verification.repeated import check_repeatable, repeated_forward, session_history
from swarm_plugins.verification.scores import Verdict
from swarm_plugins.verification.shadow import Shadow

M = TypeVar("M", bound=Message)

_MOST_BLOCKS = 1 << 16
"""Of a model: whoever makes evidence may write any number."""


Replay = Callable[[LocalBlocks], Awaitable[list[Verdict]]]
"""Computes blocks again and compares; raises SwarmError if they cannot be read or run here."""


async def replay(evidence: Evidence, blocks: LocalBlocks) -> list[Verdict]:
    """Checks the signatures of evidence and computes its blocks again; the answer is wrong if a verdict says so.

    Raises:
        ProtocolError: If a signature, a digest or a frame does not fit, or the tensors do not fit each other: then the
            evidence shows nothing.
        CapacityError: If memory does not suffice.
        SwarmError: If the blocks cannot be read or run here.
    """
    try:
        return await checked(evidence)(blocks)
    except SwarmError:
        raise
    except Exception as exc:
        if is_out_of_memory(exc):
            # The machine is at fault: the evidence may well show something.
            text = f"too little memory to replay the evidence ({one_line(exc)}): free some, or use another machine"
            raise CapacityError(text) from exc
        # Of any kind, from any line that meets a tensor of another shape: who has made the evidence may sign anything.
        raise ProtocolError(f"the evidence shows nothing: it cannot be replayed ({one_line(exc)})") from exc


def checked(evidence: Evidence) -> Replay:
    """Checks what a server has signed; returns what computes it again.

    Raises:
        ProtocolError: If a signature, a hash, a digest or a frame does not fit, or the cache of a session was changed
            between its steps: then the evidence shows nothing.
        UncheckableError: If no forward repeats a session, although one was opened.
    """
    return _checked_answer(evidence) if evidence.session is None else _checked_session(evidence, evidence.session)


def _checked_answer(evidence: Evidence) -> Replay:
    """Checks a forward or a backward."""
    forward, outputs = _read(evidence.request, ForwardRequest), _read(evidence.answer, ForwardResponse)
    backward = None
    if evidence.backward is not None:
        backward = _read(evidence.backward[0], BackwardRequest), _read(evidence.backward[1], BackwardResponse)
    # How the server computes is what its receipt says.
    claim = Claim(peer=evidence.peer, kind=Kind("", ""), forward=forward, outputs=outputs, backward=backward)
    receipt = claim.check_receipts()
    if backward is not None:
        _check_belongs(forward, outputs, backward[0])
    _check_version(evidence, receipt, forward.version)
    adapters = _adapters(evidence)
    if tuple(one.digest for one in adapters) != forward.adapters:
        raise ProtocolError("the evidence holds other adapters than its request names")
    # The signature is for the packed answer, from which other values than these could be packed too.
    codec = forward.reply_codec
    claim = replace(
        claim,
        kind=Kind(receipt.dtype, receipt.quantization),
        adapters=tuple(adapters),
        outputs=travelled(outputs, codec),
        backward=None if backward is None else (backward[0], travelled(backward[1], codec)),
    )
    opening = _opening(evidence, forward, None if backward is None else backward[0].grad_hidden)
    return functools.partial(recompute, claim, opening)


def _checked_session(evidence: Evidence, frames: SessionFrames) -> Replay:
    """Checks a session whose server has signed its last answers."""
    opened = _read(frames.opened, SessionOpen)
    steps = [_read(frame, SessionStep) for frame in frames.steps]
    answers = [_read(frame, SessionStepResponse) for frame in frames.answers]
    if not 0 < len(answers) <= len(steps):
        raise ProtocolError(
            f"the evidence has {len(answers)} answers to {len(steps)} steps, expected 1 to {len(steps)}"
        )
    first = len(steps) - len(answers)
    pairs = list(zip(steps[first:], answers, strict=True))
    receipt = _check_step_receipts(evidence.peer, pairs, history_after(opened, steps[:first]))
    _check_version(evidence, receipt, opened.version)
    _check_shapes(opened, steps, pairs)
    _check_unchanged(opened, steps)
    known = {one.digest: one for one in _adapters(evidence)}
    if any(digest not in known for step in steps for digest in step.adapters):
        raise ProtocolError("the evidence lacks adapters that its steps name")
    uses = [AdapterUse(adapters=tuple(known[one] for one in step.adapters), rows=step.adapter_rows) for step in steps]
    kind, used = Kind(receipt.dtype, receipt.quantization), list(zip(steps, uses, strict=True))
    # The signature is for the packed answer, from which other values than these could be packed too.
    found = [travelled(answer, step.reply_codec).hidden for step, answer in pairs]
    if evidence.opening is None:
        return functools.partial(_replay_session, opened, kind, used, found)
    forward = repeated_forward(session_history(opened, used), steps[-1], opened.version)
    claim = Claim(
        peer=evidence.peer,
        kind=kind,
        adapters=uses[-1].adapters,
        forward=forward,
        outputs=ForwardResponse(hidden=torch.cat(found, dim=1)),
        steps=tuple((hidden, step.reply_codec) for hidden, (step, _) in zip(found, pairs, strict=True)),
    )
    opening = _opening(evidence, forward, None)
    return functools.partial(_replay_opened_session, claim, opening, num_steps=len(steps))


async def _replay_session(
    opened: SessionOpen,
    kind: Kind,
    steps: Sequence[tuple[SessionStep, AdapterUse]],
    found: Sequence[Tensor],
    blocks: LocalBlocks,
) -> list[Verdict]:
    """Computes a session again, and compares the server's outputs of its last steps."""
    shadow = Shadow(opened.prefix, range(opened.start, opened.end), kind)
    first = len(steps) - len(found)
    await shadow.skip(steps[:first], blocks)
    for (step, use), hidden in zip(steps[first:], found, strict=True):
        shadow.add(step, use, hidden)
    return await shadow.compare(blocks)


async def _replay_opened_session(
    claim: Claim, opening: Opening | None, blocks: LocalBlocks, *, num_steps: int
) -> list[Verdict]:
    """Computes the opened blocks of the forward that repeats a session."""
    if num_steps > 1:
        await check_repeatable(claim.blocks, claim.kind, blocks)
    return await recompute(claim, opening, blocks)


def _read(frame: bytes, kind: type[M]) -> M:
    """Returns the message of a frame.

    Raises:
        ProtocolError: If it is malformed, or a message of another kind.
    """
    message = decode(frame)
    if not isinstance(message, kind):
        raise ProtocolError(f"the evidence holds a {type(message).__name__}, expected a {kind.__name__}")
    return message


def _adapters(evidence: Evidence) -> list[LoadedAdapter]:
    """Returns the adapters of evidence; raises ProtocolError if one has another digest than it claims."""
    adapters = []
    for upload in (_read(frame, AdapterUpload) for frame in evidence.adapters):
        digest = adapter_digest(upload.spec, upload.tensors)
        if digest != upload.digest:
            raise ProtocolError(f"an adapter of the evidence has digest {digest}, it claims {upload.digest}")
        adapters.append(LoadedAdapter(digest=digest, spec=upload.spec, tensors=upload.tensors))
    return adapters


def _check_version(evidence: Evidence, receipt: Receipt, version: str) -> None:
    """Raises ProtocolError unless a receipt is for the model version that was asked for, which the evidence names."""
    if receipt.version != version or not evidence.model.endswith(version):
        raise ProtocolError(f"the receipt is for version {receipt.version}, the request for {version}")


def _opening(evidence: Evidence, forward: ForwardRequest, grad: Tensor | None) -> Opening | None:
    """Returns what a server has opened of a forward, or of its backward for a gradient.

    Raises:
        ProtocolError: If the server has not signed it, or it belongs to another request.
    """
    frames = evidence.opening
    if frames is None:
        return None
    request, states = _read(frames.request, CommitRequest), _read(frames.states, OpenedStates).states
    blocks = range(request.forward.start, request.forward.end)
    if not 0 <= blocks.start < blocks.stop <= _MOST_BLOCKS:
        raise ProtocolError(
            f"the evidence is about blocks {blocks.start}:{blocks.stop}, expected some of 0:{_MOST_BLOCKS}"
        )
    starts = [piece.start for piece in pieces(blocks, frozenset(frames.tied))]
    due = state_indices(starts, frames.blocks, has_grad=request.grad is not None)
    if not frames.blocks or any(block not in starts for block in frames.blocks) or frames.indices != due:
        raise ProtocolError(f"the evidence opens states {frames.indices} at blocks {frames.blocks}, expected {due}")
    if len(states) != len(due):
        raise ProtocolError(f"the evidence has {len(states)} states, expected {len(due)}")
    opening = Opening(
        request=request,
        commitment=_read(frames.commitment, Commitment),
        blocks=frames.blocks,
        tied=frozenset(frames.tied),
        states=dict(zip(due, states, strict=True)),
    )
    check_opening(evidence.peer, opening)
    if not _is_repeated(request.forward, forward):
        raise ProtocolError("what the server has opened in the evidence belongs to another request")
    one, other = request.grad, grad
    if one is not other and (one is None or other is None or not one.equal(other)):
        raise ProtocolError("what the server has opened in the evidence is for another gradient")
    return opening


def _is_repeated(again: ForwardRequest, request: ForwardRequest) -> bool:
    """Returns whether a forward is asked for again, but perhaps for its graph."""
    one, other = (request_hash(msgspec.structs.replace(each, keep=False)) for each in (again, request))
    return one == other


def _check_belongs(forward: ForwardRequest, outputs: ForwardResponse, backward: BackwardRequest) -> None:
    """Raises ProtocolError unless a backward belongs to a forward."""
    is_same = backward.ticket == outputs.ticket if backward.forward is None else _is_repeated(backward.forward, forward)
    if not is_same:
        raise ProtocolError("the backward of the evidence belongs to another forward")
    # How far an answer may be off follows from the forward.
    if (backward.reply_codec, backward.grad_hidden.dtype) != (forward.reply_codec, forward.hidden.dtype):
        raise ProtocolError("the backward of the evidence has travelled in another type than its forward")


def _check_step_receipts(
    peer: str, pairs: Sequence[tuple[SessionStep, SessionStepResponse]], history: bytes
) -> Receipt:
    """Returns the receipt of the last answer; all must say the same about the server, and name all steps before."""
    said = set()
    for step, answer in pairs:
        receipt, history = check_receipt(peer, step, answer, history)
        if not history:
            raise ProtocolError(f"server {peer} has not signed for the session's history")
        said.add((receipt.version, receipt.dtype, receipt.quantization))
    if len(said) != 1:
        raise ProtocolError("the receipts of the evidence are for different versions, types or quantizations")
    return receipt


def _check_shapes(
    opened: SessionOpen, steps: Sequence[SessionStep], pairs: Sequence[tuple[SessionStep, SessionStepResponse]]
) -> None:
    def fits(step: SessionStep) -> bool:
        hidden, positions = step.hidden, step.position_ids
        is_batch = hidden.ndim == 3 and hidden.shape[0] == opened.batch_size
        ids = or_none(step.token_ids)
        are_ids = ids is None or ids.shape == hidden.shape[:2]
        return is_batch and are_ids and (positions is None or positions.shape[-1] == hidden.shape[1])

    is_session = all(map(fits, steps)) and all(tensor.ndim == 4 for tensor in opened.prefix)
    if not is_session or any(answer.hidden.shape != step.hidden.shape for step, answer in pairs):
        raise ProtocolError("the tensors of the evidence do not have the shapes of a session")


def _check_unchanged(opened: SessionOpen, steps: Sequence[SessionStep]) -> None:
    """Raises ProtocolError unless the cache holds the prefix and the tokens of all steps, each as it was sent."""
    if opened.fork_of is not None:
        raise ProtocolError("the session of the evidence is a fork: what its cache began with is not in the evidence")
    length = opened.prefix[0].shape[2] if opened.prefix else 0
    last = _mask(steps[-1], length + sum(step.hidden.shape[1] for step in steps))
    for step in steps:
        if step.ops or step.cached_tokens != length:
            raise ProtocolError("the cache of the evidence's session was changed between two steps")
        length += step.hidden.shape[1]
        # Steps are computed together, with the last one's mask.
        if not _mask(step, length).equal(last[:, :length]):
            raise ProtocolError("the steps of the evidence have masks that contradict each other")


def _mask(step: SessionStep, length: int) -> Tensor:
    mask = step.attention_mask
    return torch.ones(step.hidden.shape[0], length, dtype=torch.bool) if mask is None else mask

"""Reads evidence, and checks that the server has signed it.

The receipt of a step of a session names a hash of the session's opening and of all requests before the step, so the
evidence holds all of them. It shows nothing about a session whose cache was changed in between (cropped, reordered,
forked): then the answers depend on more than the tokens that were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from swarm_plugins.adapter_spec import adapter_digest
from swarm_plugins.block_io import AdapterUse, LoadedAdapter
from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.messages import (
    AdapterUpload,
    Commitment,
    CommitRequest,
    ForwardRequest,
    Message,
    OpenedStates,
    Receipt,
    SessionOpen,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.receipts import check_step_receipt, history_after, request_hash
from swarm_plugins.transport.wire import decode
from swarm_plugins.verification.evidence import Evidence, OpenedFrames
from swarm_plugins.verification.local_blocks import Kind
from swarm_plugins.verification.openings import Opening, check_opening, state_indices
from swarm_plugins.verification.recompute import travelled
from swarm_plugins.verification.repeated import repeated_forward, session_history

M = TypeVar("M", bound=Message)


def read_frame(frame: bytes, kind: type[M]) -> M:
    """Returns the message of a frame.

    Raises:
        ProtocolError: If it is malformed, or a message of another kind.
    """
    message = decode(frame)
    if not isinstance(message, kind):
        raise ProtocolError(f"the evidence holds a {type(message).__name__}, expected a {kind.__name__}")
    return message


def read_adapters(evidence: Evidence) -> tuple[LoadedAdapter, ...]:
    """Returns the adapters of evidence, whose digests are right.

    Raises:
        ProtocolError: If one has another digest than it claims.
    """
    return tuple(_adapter(read_frame(frame, AdapterUpload)) for frame in evidence.adapters)


def check_version(evidence: Evidence, receipt: Receipt, version: str) -> None:
    """Raises ProtocolError unless a receipt is for the model version that was asked for, which the evidence names."""
    if receipt.version != version or not evidence.model.endswith(version):
        raise ProtocolError(f"the receipt is for version {receipt.version}, the request for {version}")


def read_opening(peer: str, frames: OpenedFrames, forward: ForwardRequest, grad: Tensor | None) -> Opening:
    """Returns what a server has opened of a forward, or of its backward for a gradient.

    Raises:
        ProtocolError: If the server has not signed it, or it belongs to another request.
    """
    request, states = read_frame(frames.request, CommitRequest), read_frame(frames.states, OpenedStates).states
    blocks = range(request.forward.start, request.forward.end)
    due = state_indices(blocks, frames.blocks, has_grad=request.grad is not None)
    if not frames.blocks or any(block not in blocks for block in frames.blocks) or frames.indices != due:
        raise ProtocolError(f"the evidence opens states {frames.indices} at blocks {frames.blocks}, expected {due}")
    if len(states) != len(due):
        raise ProtocolError(f"the evidence has {len(states)} states, expected {len(due)}")
    opening = Opening(
        request=request,
        commitment=read_frame(frames.commitment, Commitment),
        blocks=frames.blocks,
        states=dict(zip(due, states, strict=True)),
    )
    check_opening(peer, opening)
    if not is_repeated(request.forward, forward):
        raise ProtocolError("what the server has opened in the evidence belongs to another request")
    if not _is_equal(request.grad, grad):
        raise ProtocolError("what the server has opened in the evidence is for another gradient")
    return opening


def is_repeated(again: ForwardRequest, request: ForwardRequest) -> bool:
    """Returns whether a forward is asked for again, but perhaps for its graph."""
    one, other = (request_hash(msgspec.structs.replace(each, keep=False)) for each in (again, request))
    return one == other


@dataclass(frozen=True, kw_only=True)
class PastSession:
    """A session whose server has signed its last answers."""

    opened: SessionOpen
    kind: Kind
    steps: Sequence[tuple[SessionStep, AdapterUse]]
    answers: Sequence[SessionStepResponse]
    """To the last steps."""
    opening: Opening | None
    """What the server has opened of the forward that repeats the session, if two blocks are to be computed instead."""

    @property
    def repeated(self) -> ForwardRequest:
        """The forward that repeats the session; see `repeated_forward`."""
        history = session_history(self.opened, self.steps)
        return repeated_forward(history, self.steps[-1][0], self.opened.version)


def read_session(evidence: Evidence) -> PastSession:
    """Checks what a server has signed of a session.

    Raises:
        ProtocolError: If a signature, a hash or a frame does not fit, or the cache was changed between the steps: then
            the evidence shows nothing.
        UncheckableError: If no forward repeats the session, although one was opened.
    """
    frames = evidence.session
    if frames is None:
        raise ProtocolError("the evidence is not about a session")
    opened = read_frame(frames.opened, SessionOpen)
    steps = [read_frame(frame, SessionStep) for frame in frames.steps]
    answers = [read_frame(frame, SessionStepResponse) for frame in frames.answers]
    if not 0 < len(answers) <= len(steps):
        raise ProtocolError(
            f"the evidence has {len(answers)} answers to {len(steps)} steps, expected 1 to {len(steps)}"
        )
    receipt = _check_receipts(evidence.peer, opened, steps, answers)
    check_version(evidence, receipt, opened.version)
    _check_shapes(opened, steps, answers)
    _check_unchanged(opened, steps)
    past = PastSession(
        opened=opened,
        kind=Kind(receipt.dtype, receipt.quantization),
        steps=list(zip(steps, _uses(steps, read_adapters(evidence)), strict=True)),
        # The signature is for the packed answer, from which other values than these could be packed too.
        answers=[
            travelled(answer, step.reply_codec)
            for answer, step in zip(answers, steps[len(steps) - len(answers) :], strict=True)
        ],
        opening=None,
    )
    if evidence.opening is None:
        return past
    return replace(past, opening=read_opening(evidence.peer, evidence.opening, past.repeated, None))


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else one.equal(other)


def _adapter(upload: AdapterUpload) -> LoadedAdapter:
    digest = adapter_digest(upload.spec, upload.tensors)
    if digest != upload.digest:
        raise ProtocolError(f"an adapter of the evidence has digest {digest}, it claims {upload.digest}")
    return LoadedAdapter(digest=digest, spec=upload.spec, tensors=upload.tensors)


def _check_receipts(
    peer: str, opened: SessionOpen, steps: Sequence[SessionStep], answers: Sequence[SessionStepResponse]
) -> Receipt:
    """Returns the receipt of the last answer; all must say the same about the server, and name all steps before."""
    first = len(steps) - len(answers)
    history = history_after(opened, steps[:first])
    found: list[Receipt] = []
    for step, answer in zip(steps[first:], answers, strict=True):
        receipt, history = check_step_receipt(peer, step, answer, history)
        if not history:
            raise ProtocolError(f"server {peer} has not signed for the session's history")
        found.append(receipt)
    if len({(one.version, one.dtype, one.quantization) for one in found}) != 1:
        raise ProtocolError("the receipts of the evidence are for different versions, types or quantizations")
    return found[-1]


def _check_shapes(opened: SessionOpen, steps: Sequence[SessionStep], answers: Sequence[SessionStepResponse]) -> None:
    wrong = [step for step in steps if step.hidden.ndim != 3 or step.hidden.shape[0] != opened.batch_size]
    wrong += [
        step for step in steps if step.position_ids is not None and step.position_ids.shape[-1] != step.hidden.shape[1]
    ]
    unlike = [
        step
        for step, answer in zip(steps[len(steps) - len(answers) :], answers, strict=True)
        if answer.hidden.shape != step.hidden.shape
    ]
    if wrong or unlike or any(tensor.ndim != 4 for tensor in opened.prefix):
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


def _mask(step: SessionStep, length: int) -> torch.Tensor:
    mask = step.attention_mask
    return torch.ones(step.hidden.shape[0], length, dtype=torch.bool) if mask is None else mask


def _uses(steps: Sequence[SessionStep], adapters: Sequence[LoadedAdapter]) -> list[AdapterUse]:
    known = {one.digest: one for one in adapters}
    if any(digest not in known for step in steps for digest in step.adapters):
        raise ProtocolError("the evidence lacks adapters that its steps name")
    return [
        AdapterUse(adapters=tuple(known[digest] for digest in step.adapters), rows=step.adapter_rows) for step in steps
    ]

"""Evidence of a wrong answer: what was asked and answered, signed by the server, for a third party to replay.

A file holds the frames of the messages, with the server's receipts. Whoever has the model's checkpoint can check the
signatures and compute the blocks again; nothing in the file needs to be believed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from swarm_plugins.adapter_spec import adapter_digest
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.client.observer import BackwardCall, ForwardCall
from swarm_plugins.errors import CheckpointError, ProtocolError, one_line
from swarm_plugins.transport.messages import (
    AdapterUpload,
    BackwardRequest,
    BackwardResponse,
    Codec,
    Commitment,
    CommitRequest,
    ForwardRequest,
    ForwardResponse,
    Message,
    OpenedStates,
)
from swarm_plugins.transport.receipts import check_receipt
from swarm_plugins.transport.wire import decode, encode
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.openings import Opening, check_opening, state_indices
from swarm_plugins.verification.recompute import Asked, recompute_backward, recompute_forward, recompute_opened
from swarm_plugins.verification.scores import Verdict

_MAX_FILES = 32
"""Files kept; the oldest goes first."""
_MAX_FILE_BYTES = 1 << 30
M = TypeVar("M", bound=Message)


class OpenedFrames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A commitment and the opened states."""

    request: bytes
    commitment: bytes
    blocks: tuple[int, ...]
    """The blocks to compute again."""
    indices: tuple[int, ...]
    """Of the states."""
    states: bytes
    """Frame of an `OpenedStates`."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One wrong answer."""

    format: int = 1
    peer: str
    model: str
    """Model version."""
    reason: str
    at: float
    """Unix time."""
    request: bytes
    """Frame of the forward request."""
    answer: bytes
    """Frame of the answer to it."""
    adapters: tuple[bytes, ...]
    """Frames of the uploads of its adapters."""
    backward: tuple[bytes, bytes] | None = None
    """Frames of a backward request and the answer to it, if those are wrong. None: the forward is."""
    opening: OpenedFrames | None = None
    """What the server has opened, if only some blocks were computed again."""


def evidence_of(
    call: ForwardCall | BackwardCall, asked: Asked, opening: Opening | None = None, *, model: str, reason: str
) -> Evidence:
    """Returns the evidence of a wrong answer."""
    forward = call.request if isinstance(call, ForwardCall) else call.forward
    outputs = call.response if isinstance(call, ForwardCall) else call.outputs
    codec = forward.reply_codec
    uploads = (AdapterUpload(digest=one.digest, spec=one.spec, tensors=one.tensors) for one in asked.adapters)
    return Evidence(
        peer=call.peer,
        model=model,
        reason=reason,
        at=time.time(),
        request=_frame(forward, codec),
        answer=_frame(outputs, codec),
        adapters=tuple(_frame(one, "none") for one in uploads),
        backward=(
            (_frame(call.request, codec), _frame(call.response, codec)) if isinstance(call, BackwardCall) else None
        ),
        opening=None if opening is None else _opened_frames(opening),
    )


def save_evidence(folder: Path, evidence: Evidence) -> Path:
    """Writes evidence to a new file of a folder, and deletes the oldest files beyond a few dozen.

    Raises:
        OSError: If it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".evidence-", dir=folder)
    path = folder / f"{evidence.peer}-{time.time_ns()}.evidence"
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(msgspec.msgpack.encode(evidence))
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    for old in sorted(folder.glob("*.evidence"), key=lambda file: file.stat().st_mtime_ns)[:-_MAX_FILES]:
        old.unlink(missing_ok=True)
    return path


def read_evidence(path: Path) -> Evidence:
    """Reads evidence.

    Raises:
        CheckpointError: If the file is missing, too large or damaged.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        return msgspec.msgpack.decode(path.read_bytes(), type=Evidence)
    except (msgspec.MsgspecError, ValueError, RecursionError, OSError) as exc:
        raise CheckpointError(
            f"{path} is not readable evidence ({one_line(exc)}): ask its sender for it again"
        ) from exc


async def replay(evidence: Evidence, blocks: LocalBlocks) -> list[Verdict]:
    """Checks the signatures of evidence and computes its blocks again; the answer is wrong if a verdict says so.

    Raises:
        ProtocolError: If a signature, a digest or a frame does not fit: then the evidence shows nothing.
        SwarmError: If the blocks cannot be read or run here.
    """
    request, answer = _read(evidence.request, ForwardRequest), _read(evidence.answer, ForwardResponse)
    receipt = check_receipt(evidence.peer, request, answer)
    if receipt.version != request.version or not evidence.model.endswith(request.version):
        raise ProtocolError(f"the receipt is for version {receipt.version}, the request for {request.version}")
    adapters = tuple(_adapter(_read(frame, AdapterUpload)) for frame in evidence.adapters)
    if tuple(one.digest for one in adapters) != request.adapters:
        raise ProtocolError("the evidence holds other adapters than its request names")
    asked = Asked(request, adapters, Kind(receipt.dtype, receipt.quantization))
    opening = None if evidence.opening is None else _read_opening(evidence.opening)
    if opening is not None:
        check_opening(evidence.peer, opening)
        if not _is_repeated(opening.request.forward, request):
            raise ProtocolError("what the server has opened in the evidence belongs to another request")
    if evidence.backward is None:
        if opening is not None:
            return await recompute_opened(asked, answer, opening, blocks)
        return await recompute_forward(asked, answer, blocks)
    second, found = _read(evidence.backward[0], BackwardRequest), _read(evidence.backward[1], BackwardResponse)
    check_receipt(evidence.peer, second, found)
    is_same = second.ticket == answer.ticket if second.forward is None else _is_repeated(second.forward, request)
    if not is_same:
        raise ProtocolError("the backward of the evidence belongs to another forward")
    if opening is None:
        return await recompute_backward(asked, second, found, blocks)
    if opening.request.grad is None or not opening.request.grad.equal(second.grad_hidden):
        raise ProtocolError("what the server has opened in the evidence is for another gradient")
    return await recompute_opened(asked, found, opening, blocks)


def _opened_frames(opening: Opening) -> OpenedFrames:
    return OpenedFrames(
        request=_frame(opening.request, "none"),
        commitment=_frame(opening.commitment, "none"),
        blocks=opening.blocks,
        indices=tuple(opening.states),
        states=_frame(OpenedStates(states=tuple(opening.states.values())), "none"),
    )


def _read_opening(frames: OpenedFrames) -> Opening:
    request, states = _read(frames.request, CommitRequest), _read(frames.states, OpenedStates).states
    blocks = range(request.forward.start, request.forward.end)
    due = state_indices(blocks, frames.blocks, has_grad=request.grad is not None)
    if not frames.blocks or any(block not in blocks for block in frames.blocks) or frames.indices != due:
        raise ProtocolError(f"the evidence opens states {frames.indices} at blocks {frames.blocks}, expected {due}")
    if len(states) != len(due):
        raise ProtocolError(f"the evidence has {len(states)} states, expected {len(due)}")
    return Opening(
        request=request,
        commitment=_read(frames.commitment, Commitment),
        blocks=frames.blocks,
        states=dict(zip(due, states, strict=True)),
    )


def _is_repeated(again: ForwardRequest, request: ForwardRequest) -> bool:
    plain = (msgspec.structs.replace(one, keep=False) for one in (again, request))
    one, other = (_frame(message, "none") for message in plain)
    return one == other


def _adapter(upload: AdapterUpload) -> LoadedAdapter:
    digest = adapter_digest(upload.spec, upload.tensors)
    if digest != upload.digest:
        raise ProtocolError(f"an adapter of the evidence has digest {digest}, it claims {upload.digest}")
    return LoadedAdapter(digest=digest, spec=upload.spec, tensors=upload.tensors)


def _frame(message: Message, codec: Codec) -> bytes:
    return b"".join(encode(message, codec=codec))


def _read(frame: bytes, kind: type[M]) -> M:
    message = decode(frame)
    if not isinstance(message, kind):
        raise ProtocolError(f"the evidence holds a {type(message).__name__}, expected a {kind.__name__}")
    return message


def files_about(folder: Path, peer: str) -> Sequence[Path]:
    """Returns the files with evidence about a peer, oldest first."""
    if not peer.isalnum():
        return ()
    return sorted(folder.glob(f"{peer}-*.evidence"))

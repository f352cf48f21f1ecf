"""Evidence of a wrong answer: what was asked and answered, signed by the server, for a third party to replay.

A file holds the frames of the messages, with the server's receipts. Whoever has the model's checkpoint can check the
signatures and compute the blocks again; nothing in the file needs to be believed. Frames are not packed, whatever the
messages were on their way: they hold the values that arrived.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.errors import CheckpointError, one_line
from swarm_plugins.kept_files import write_whole
from swarm_plugins.transport.messages import (
    AdapterUpload,
    Message,
    OpenedStates,
    SessionOpen,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.wire import encode
from swarm_plugins.verification.claims import Claim

if TYPE_CHECKING:
    from swarm_plugins.verification.openings import Opening

_MAX_FILES = 32
"""Files kept; the oldest goes first."""
_MAX_FILE_BYTES = 1 << 30
_MAX_BYTES = 4 << 30
"""Of all files together."""
_LATEST = 1 << 37
"""Unix time in the year 6325: later dates cannot be shown."""


class OpenedFrames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A commitment and the opened states."""

    request: bytes
    commitment: bytes
    blocks: tuple[int, ...]
    """The blocks to compute again; of those that only run together, the first."""
    indices: tuple[int, ...]
    """Of the states."""
    states: bytes
    """Frame of an `OpenedStates`."""
    tied: tuple[int, ...] = ()
    """Blocks that only run behind the one before; see `swarm_plugins.borders`."""


class SessionFrames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A session from its beginning, and the server's answers to its last steps, among which a wrong one is."""

    opened: bytes
    steps: tuple[bytes, ...]
    answers: tuple[bytes, ...]


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One wrong answer."""

    format: int = 1
    peer: str
    model: str
    """Model version."""
    reason: str
    at: float
    """Unix time."""
    request: bytes = b""
    """Frame of the forward request; empty for a session."""
    answer: bytes = b""
    adapters: tuple[bytes, ...]
    """Frames of the uploads of its adapters, or of all that the session has used."""
    session: SessionFrames | None = None
    """A session, if one of its steps is wrong."""
    backward: tuple[bytes, bytes] | None = None
    """Frames of a backward request and the answer to it, if those are wrong. None: the forward is."""
    opening: OpenedFrames | None = None
    """What the server has opened, if only some blocks were computed again."""


def evidence_of(claim: Claim, opening: Opening | None, *, model: str, reason: str) -> Evidence:
    """Returns the evidence of a wrong answer; ``opening`` is what the server has opened, if not all was computed."""
    return Evidence(
        peer=claim.peer,
        model=model,
        reason=reason,
        at=time.time(),
        request=_frame(claim.forward),
        answer=_frame(claim.outputs),
        adapters=_uploads(claim.adapters),
        backward=None if claim.backward is None else (_frame(claim.backward[0]), _frame(claim.backward[1])),
        opening=_opened(opening),
    )


def evidence_of_session(
    peer: str,
    opened: SessionOpen,
    steps: Sequence[SessionStep],
    answers: Sequence[SessionStepResponse],
    adapters: Sequence[LoadedAdapter],
    opening: Opening | None = None,
    *,
    model: str,
    reason: str,
) -> Evidence:
    """Returns the evidence of a wrong step of a session.

    Args:
        peer: The server.
        opened: The session's opening.
        steps: All steps, as they arrived at the server.
        answers: To the last steps.
        adapters: All that the steps name.
        opening: What the server has opened of the forward that repeats the session, if it was not computed here.
        model: Model version.
        reason: What is wrong.
    """
    return Evidence(
        peer=peer,
        model=model,
        reason=reason,
        at=time.time(),
        adapters=_uploads(adapters),
        session=SessionFrames(opened=_frame(opened), steps=_frames(steps), answers=_frames(answers)),
        opening=_opened(opening),
    )


def _uploads(adapters: Sequence[LoadedAdapter]) -> tuple[bytes, ...]:
    return _frames([AdapterUpload(digest=one.digest, spec=one.spec, tensors=one.tensors) for one in adapters])


def _opened(opening: Opening | None) -> OpenedFrames | None:
    if opening is None:
        return None
    return OpenedFrames(
        request=_frame(opening.request),
        commitment=_frame(opening.commitment),
        blocks=opening.blocks,
        tied=tuple(sorted(opening.tied)),
        indices=tuple(opening.states),
        states=_frame(OpenedStates(states=tuple(opening.states.values()))),
    )


def save_evidence(folder: Path, evidence: Evidence) -> Path:
    """Writes evidence to a new file of a folder, and deletes the oldest files beyond a few dozen.

    Raises:
        OSError: If it cannot be written, or would be larger than what is read.
    """
    content = msgspec.msgpack.encode(evidence)
    if len(content) > _MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it has {len(content)} bytes, at most {_MAX_FILE_BYTES} are kept")
    path = folder / f"{evidence.peer}-{time.time_ns()}.evidence"
    write_whole(path, content)
    num_bytes = 0
    newest_first = sorted(folder.glob("*.evidence"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for index, file in enumerate(newest_first):
        num_bytes += file.stat().st_size
        if index >= _MAX_FILES or (index and num_bytes > _MAX_BYTES):
            file.unlink(missing_ok=True)
    return path


def read_evidence(path: Path) -> Evidence:
    """Reads evidence.

    Raises:
        CheckpointError: If the file is missing, too large or damaged.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        evidence = msgspec.msgpack.decode(path.read_bytes(), type=Evidence)
        if not 0 <= evidence.at < _LATEST:
            raise ValueError(f"it is of the time {evidence.at}")
        return evidence
    except (msgspec.MsgspecError, ValueError, RecursionError, OSError) as exc:
        raise CheckpointError(
            f"{path} is not readable evidence ({one_line(exc)}): ask its sender for it again"
        ) from exc


def _frames(messages: Sequence[Message]) -> tuple[bytes, ...]:
    return tuple(map(_frame, messages))


def _frame(message: Message) -> bytes:
    return b"".join(encode(message))

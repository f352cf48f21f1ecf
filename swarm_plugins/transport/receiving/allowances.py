"""How large an answer may be, by what was asked: no server can fill the memory of those who ask it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport import limits
from swarm_plugins.transport.messages import (
    AdapterUpload,
    BackwardRequest,
    CommitRequest,
    DrainRequest,
    ExpertsRequest,
    ForwardRequest,
    Message,
    NormsRequest,
    PushedHidden,
    SessionOpen,
    SessionStep,
)
from swarm_plugins.transport.run_messages import BlobRequest, RunStatus
from swarm_plugins.transport.server_info import EchoRequest, InfoRequest

_PADDING_BYTES = 1 << 20
"""Of metadata and tensors."""
_UNASKED_BYTES = 1 << 16
"""Of what comes without a question: a refusal. Nothing may ever read it, as on streams that only push."""


class Allowances:
    """The answers that one end of a stream waits for: one for each message that it has sent, in order.

    A request that does not tell the size of its answer may get the largest message.
    """

    def __init__(self) -> None:
        self._awaited: deque[int] = deque()

    def asked(self, message: Message) -> None:
        """Notes a message that is about to be sent."""
        if isinstance(message, PushedHidden):
            return  # only a refusal comes back
        tensors = _tensor_bytes(message)
        self._awaited.append(limits.MAX_MESSAGE_BYTES if tensors is None else tensors)

    def begin(self, body_bytes: int) -> int:
        """Takes the start of an answer; returns how many bytes its tensors may have.

        Raises:
            ProtocolError: If it is larger than what was asked for can be.
        """
        if self._awaited:
            tensors = self._awaited.popleft()
            most = tensors + limits.MAX_METADATA_BYTES + _PADDING_BYTES
        else:
            tensors, most = 0, _UNASKED_BYTES
        if body_bytes > most:
            raise ProtocolError(f"an answer of {body_bytes} bytes declared, that to the request has at most {most}")
        return tensors


def unpacking_claim(tensor_bytes: int) -> Callable[[int], None]:
    """Returns a function that counts what the tensors of an answer unpack to, and raises ProtocolError beyond it."""
    left = tensor_bytes

    def claim(num_bytes: int) -> None:
        nonlocal left
        left -= num_bytes
        if left < 0:
            raise ProtocolError(f"an answer unpacks to far more than the {tensor_bytes} bytes that were asked for")

    return claim


def _tensor_bytes(message: Message) -> int | None:
    """Returns the most bytes of the tensors in an answer; None: not known."""
    found: int | None = None
    match message:
        case InfoRequest() | SessionOpen() | AdapterUpload() | CommitRequest() | DrainRequest() | RunStatus():
            found = 0
        case BlobRequest() | NormsRequest():
            found = message.num_bytes
        case EchoRequest():
            found = message.payload.nbytes
        case ForwardRequest(collect_router=False):
            hidden = message.hidden.nbytes if message.pushed is None else message.pushed.num_bytes
            found = hidden * (max(1, message.end - message.start) if message.collect_hidden else 1)
        case SessionStep(collect_hidden=False, collect_router=False):
            found = message.pushed_bytes or message.hidden.nbytes
        case BackwardRequest(needs_adapters=False, needs_prefix=False):
            found = message.grad_hidden.nbytes if message.pushed is None else message.pushed.num_bytes
        case ExpertsRequest():
            found = message.rows.numel() * message.hidden.shape[-1] * message.hidden.element_size()
    return found

"""Messages between client and server: one typed record each.

A message is metadata (msgpack, validated by msgspec, which builds nothing but these records) and the raw bytes of its
tensors, in the order in which the metadata names them. Received data is untrusted: sizes, shapes and dtypes are checked
before a tensor is created.

Shapes: ``B`` batch, ``S`` new tokens, ``L`` cached + new tokens, ``D`` hidden width.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from torch import Tensor

from swarm_plugins.block_io import CacheOp, LoadedAdapter, SpanOutputs
from swarm_plugins.layer_masks import LayerMasks
from swarm_plugins.transport.run_messages import BlobPart, BlobRequest, RunStatus
from swarm_plugins.transport.server_info import BaseMessage, EchoRequest, EchoResponse, InfoRequest, ServerInfo

Codec = Literal["none", "float16", "bfloat16", "rotated8"]
"""Packing of floating tensors on the wire; see `swarm_plugins.transport.codec`."""

CODECS: tuple[Codec, ...] = get_args(Codec)
"""Those that this release knows."""

ShortBytes = Annotated[bytes, msgspec.Meta(max_length=32)]
"""A hash, a token, a nonce."""

PushName = Annotated[str, msgspec.Meta(max_length=64)]
"""What a client calls a session, or a request, to which other servers push."""

FailureKind = Literal[
    "bad_request",  # the request is malformed or breaks a limit: do not repeat it
    "wrong_version",  # this server serves another model version
    "wrong_span",  # this server does not hold the blocks
    "draining",  # this server is leaving the blocks: look up the swarm again
    "unknown_adapter",  # upload it, then repeat
    "unknown_ticket",  # the kept graph is gone: send the inputs again
    "unknown_session",  # open a new session and replay
    "not_pushed",  # no other server has sent the hidden states of this step: send them yourself
    "missing_experts",  # this server's blocks need experts that no living holder has
    "out_of_memory",  # a budget is full: try another server, or later
    "not_finite",  # NaN or infinity in the inputs: another server would refuse them too
    "not_finite_output",  # NaN or infinity in the outputs: a server with another dtype, or a healthy one, may do better
    "wrong_run",  # this peer trains something else under the name of the run
    "refused",  # this server talks only with peers of a list, or with those that know a secret
    "overloaded",  # too many streams or requests of this peer
    "internal",  # the server's own fault
]


class Failure(BaseMessage, kw_only=True):
    """Answers a request that could not be served."""

    kind: FailureKind
    message: str


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server's signature under a request and its answer; see `swarm_plugins.transport.receipts`."""

    public_key: Annotated[bytes, msgspec.Meta(max_length=2048)]
    """In libp2p's encoding; the peer id follows from it."""
    signature: Annotated[bytes, msgspec.Meta(max_length=1024)]
    version: str
    """Model version whose blocks the server says it computed with."""
    dtype: str
    """What it says it computed in."""
    quantization: str
    """How it says it keeps its weights, and keys and values of sessions."""
    history: ShortBytes = b""
    """Of a step of a session: hash of the session's opening and of all requests before this one. Empty if the server
    does not vouch for them: an older server, or one that has failed at a step, or signed none for it."""


class _BlockRequest(BaseMessage, kw_only=True):
    """Runs blocks on hidden states."""

    hidden: Tensor
    """``[B, S, D]``."""
    position_ids: Tensor | None = None
    """``[B or 1, S]``, or of several planes, ``[3 or 4, B or 1, S]``, int64. None: consecutive positions after the
    cached tokens or the prefix."""
    attention_mask: Tensor | None = None
    """``[B, L]`` (without a session: ``[B, prefix + S]``), bool: True for real tokens. None: no padding."""
    layer_masks: LayerMasks | msgspec.UnsetType = msgspec.UNSET
    """What new tokens see, if some see later ones; left out otherwise."""
    token_ids: Tensor | msgspec.UnsetType = msgspec.UNSET
    """``[B, S]``, int64, of models whose blocks take them; left out otherwise."""
    adapters: tuple[str, ...] = ()
    """Digests of the adapters in use."""
    adapter_rows: tuple[int, ...] | None = None
    """For each row, the index of its adapter in ``adapters``, -1 for none; plus 65536 times the first token that it
    applies to, cached ones counted. None: all adapters on all rows."""
    collect_hidden: bool = False
    """Also return the output of every block but the last."""
    collect_router: bool = False
    """Also return the router logits of every mixture-of-experts block."""
    reply_codec: Codec = "none"
    nonce: ShortBytes = b""
    """Random bytes; if there are any, the answer has a receipt. So in all requests."""


class PushTo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a server sends its output, or the gradient of its input, on: the next input of a session, or of a slot."""

    peer: Annotated[str, msgspec.Meta(max_length=128)]
    session: PushName
    """What the client calls the session, or the slot."""
    step: int
    token: ShortBytes
    """Shows that the client allows it."""


class PushSlot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the hidden states, or gradients, of a request without a session come by ``rpc_push``."""

    name: PushName
    """Chosen by the client, the same for all its requests."""
    step: int
    """Counts them."""
    key: ShortBytes
    """Secret by which the client allows another server to push."""
    num_bytes: int
    """Size of what comes; the request has it with a last dimension of 0."""


class ForwardRequest(_BlockRequest, kw_only=True):
    """Runs blocks ``[start, end)`` without a session."""

    version: str
    start: int
    end: int
    dropout_seed: int | None = None
    """Seed of the adapters' dropout; None: no dropout."""
    prefix: tuple[Tensor, ...] = ()
    """Keys and values before the sequence, K then V for each block: ``[B, kv heads, prefix, head width]``."""
    keep: bool = False
    """Keep the graph for a backward request, if memory permits; the answer then has a ticket."""
    pushed: PushSlot | None = None
    """Where ``hidden`` comes from, if not from here."""
    push_to: PushTo | None = None
    """Who else gets the output."""


class ForwardResponse(SpanOutputs, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Answers a forward request."""

    ticket: str | None = None
    """Identifies the kept graph in a backward request."""
    not_pushed: str = ""
    """Why the output was not sent to ``push_to``, if it was not."""
    input_hash: ShortBytes = b""
    """Of hidden states that were pushed."""
    receipt: Receipt | None = None


class BackwardRequest(BaseMessage, kw_only=True):
    """Asks for the gradients of a forward request, given by ticket or as the request itself to run again."""

    ticket: str | None = None
    forward: ForwardRequest | None = None
    grad_hidden: Tensor
    grad_hidden_states: tuple[Tensor, ...] = ()
    grad_router_logits: tuple[Tensor, ...] = ()
    needs_hidden: bool = True
    needs_adapters: bool = False
    needs_prefix: bool = False
    pushed: PushSlot | None = None
    """Where ``grad_hidden`` comes from, if not from here."""
    push_to: PushTo | None = None
    """Who else gets the gradient of the hidden states."""
    reply_codec: Codec = "none"
    nonce: ShortBytes = b""


class BackwardResponse(BaseMessage, kw_only=True):
    """Gradients, in the order of the request's inputs."""

    grad_hidden: Tensor | None = None
    grad_adapters: tuple[Tensor, ...] = ()
    """One for each tensor of each adapter in the request, in order."""
    grad_prefix: tuple[Tensor, ...] = ()
    not_pushed: str = ""
    """Why the gradient was not sent to ``push_to``, if it was not."""
    input_hash: ShortBytes = b""
    """Of gradients that were pushed."""
    receipt: Receipt | None = None


class SessionOpen(BaseMessage, kw_only=True):
    """Opens a session as the first message of an ``rpc_session`` stream; the session ends with the stream."""

    version: str
    start: int
    end: int
    batch_size: int
    fork_of: str | None = None
    """Session of the same client whose cache is copied."""
    prefix: tuple[Tensor, ...] = ()
    """Keys and values the cache starts with, K then V for each block."""
    push_name: PushName = ""
    """What servers that push hidden states to the session call it; chosen by the client. Empty: none push."""
    push_key: ShortBytes = b""
    """Secret by which the client allows them to."""


class SessionOpened(BaseMessage, kw_only=True):
    """Confirms an opened session."""

    session: str
    """Id of the session, for forks."""
    max_tokens: int
    """Longest sequence the server will hold for the session."""


class PushedHidden(BaseMessage, kw_only=True):
    """Sends hidden states of one step from server to server; not answered, but a refusal ends the stream."""

    session: PushName
    step: int
    token: ShortBytes = b""
    """Of `PushTo`; none if the session's client sends this."""
    hidden: Tensor
    """``[B, S, D]``."""


class SessionStep(_BlockRequest, kw_only=True):
    """Sends new tokens to a session: a prefill, a chunk of one, or a decode step."""

    cached_tokens: int
    """Length of the cache after ``ops`` and before this step, by the client's count."""
    ops: tuple[CacheOp, ...] = ()
    pushed_bytes: int = 0
    """Size of the hidden states if they come by ``rpc_push``; ``hidden`` is then ``[B, S, 0]``."""
    push_to: PushTo | None = None
    """Who else gets the output."""


class SessionStepResponse(SpanOutputs, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Answers a session step."""

    not_pushed: str = ""
    """Why the output was not sent to ``push_to``, if it was not."""
    input_hash: ShortBytes = b""
    """Of hidden states that were pushed."""
    receipt: Receipt | None = None


class ExpertsRequest(BaseMessage, kw_only=True):
    """Runs tokens through some experts of a block, or asks for the gradient of that.

    ``T`` tokens, ``N`` rows: one for each choice of an expert by a token, sorted by expert.
    """

    version: str
    block: int
    slice: tuple[int, int] | None = None
    """The part of each expert that the server is believed to hold; see `ServerInfo`."""
    experts: tuple[int, ...]
    """Distinct, ascending."""
    counts: tuple[int, ...]
    """Rows of each of these experts, at least 1; their sum is ``N``."""
    hidden: Tensor
    """``[T, D]``."""
    rows: Tensor
    """``[N]``, int32: the token of each row."""
    grad: Tensor | None = None
    """``[N, D]``, gradient of the experts' outputs; the answer is then the gradient of the rows."""
    reply_codec: Codec = "none"


class ExpertsResponse(BaseMessage, kw_only=True):
    """Answers an experts request: outputs without routing weights, or gradients, ``[N, D]`` in the request's order."""

    rows: Tensor


class CommitRequest(BaseMessage, kw_only=True):
    """Asks for the hashes of the states between the blocks of a forward, which is run again."""

    forward: ForwardRequest
    grad: Tensor | None = None
    """``[B, S, D]``, gradient of the output: also hash the gradients of the states."""
    nonce: ShortBytes = b""
    reply_codec: Codec = "none"


class Commitment(BaseMessage, kw_only=True):
    """Answers a commit request: binds the server to the states before the client names one."""

    hashes: tuple[ShortBytes, ...]
    """Of the outputs of all blocks but the last; then, if asked for, of their gradients."""
    receipt: Receipt | None = None


class OpenRequest(BaseMessage, kw_only=True):
    """Asks for some of the states of the last commitment on the same stream."""

    states: tuple[int, ...]
    """Indices of hashes."""


class OpenedStates(BaseMessage, kw_only=True):
    """Answers an open request: ``[B, S, D]`` each, in the type that the server computes in."""

    states: tuple[Tensor, ...]


class AdapterUpload(LoadedAdapter, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Uploads an adapter; later requests refer to it by its digest."""

    digest: str


class AdapterStored(BaseMessage, kw_only=True):
    """Confirms that the server has stored an adapter."""

    digest: str


class NormsRequest(BaseMessage, kw_only=True):
    """Asks for the norms of adapted weights, their low-rank updates included, on the stream of uploads."""

    digest: str
    """An adapter that the server holds."""
    num_bytes: int
    """Size of all norms; a larger answer is refused."""


class NormsResponse(BaseMessage, kw_only=True):
    """Answers a request for norms."""

    norms: tuple[Tensor, ...]
    """Of the rows of each weight, ``[out]``, in the order of the layers that need them."""


class DrainRequest(BaseMessage, kw_only=True):
    """Asks a server to drain and to end; signed with the server's own key."""

    issued_at: float
    """Unix time."""
    signature: bytes


class DrainAccepted(BaseMessage, kw_only=True):
    """Answers a drain request."""

    sessions: int
    """Sessions that are open now."""
    drain_s: float
    """How long they may go on."""


Message = (
    Failure
    | InfoRequest
    | EchoRequest
    | EchoResponse
    | ServerInfo
    | ForwardRequest
    | ForwardResponse
    | BackwardRequest
    | BackwardResponse
    | SessionOpen
    | SessionOpened
    | SessionStep
    | SessionStepResponse
    | PushedHidden
    | ExpertsRequest
    | ExpertsResponse
    | CommitRequest
    | Commitment
    | OpenRequest
    | OpenedStates
    | AdapterUpload
    | AdapterStored
    | NormsRequest
    | NormsResponse
    | DrainRequest
    | DrainAccepted
    | RunStatus
    | BlobRequest
    | BlobPart
)

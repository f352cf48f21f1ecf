"""The messages of ``rpc_info``: what a server says of itself, and echoes, which measure the network."""

from __future__ import annotations

from typing import Literal

import msgspec
from torch import Tensor


class BaseMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, tagged by class name, unknown fields refused."""


class InfoRequest(BaseMessage, frozen=True, kw_only=True):
    """Asks a server for its `ServerInfo`."""


class ServerInfo(BaseMessage, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A server's description of itself, in ``rpc_info`` and (signed) in the DHT.

    What a later version adds is ignored here: its servers stay visible.
    """

    version: str
    """Served model version."""
    model: str
    """Display name of the model."""
    num_blocks: int
    """Blocks of the whole model."""
    start: int
    """First block served."""
    end: int
    """One past the last block served."""
    dtype: str
    """Compute dtype, such as ``float32``."""
    quantization: str
    """``none``, ``int8``, ``int4`` or ``nf4``, or how the weights were published; behind it or alone ``kv-int8``, where
    sessions keep keys and values in 8 bits."""
    state: Literal["joining", "online", "draining", "stuck"] = "online"
    """``draining``: open sessions go on, new ones are refused, and the server ends soon. ``stuck``: its compute thread
    does not get on with its work."""
    throughput: float = 0.0
    """Tokens per second through one block in a batched forward, as the server measured."""
    decode_s: float = 0.0
    """Seconds of a single-token step through one block, as the server measured."""
    free_kv_tokens: int = 0
    """Tokens, cached for the whole span, that still fit in the KV budget."""
    total_kv_tokens: int = 0
    """Tokens, cached for the whole span, that the KV budget holds."""
    kv_row_tokens: int = 0
    """Tokens of that count that each row of a session after the first takes at any length, for states of fixed size."""
    kv_token_bytes: int = 0
    """Bytes that a token of a session takes in the caches of the whole span, as far as all tokens are kept."""
    kv_row_bytes: int = 0
    """Bytes that each row of a session takes there at any length: states, and those before the last step."""
    has_states: bool = False
    """Whether some block keeps states. They see padding only in a session's first step."""
    max_batch_tokens: int = 0
    """Largest ``B * S`` of one request."""
    max_session_tokens: int = 0
    """Longest sequence of one session."""
    load: float = 0.0
    """Share of the last seconds the compute thread was busy, 0 to 1."""
    adapters: tuple[str, ...] = ()
    """Preloaded published adapters."""
    adapter_digests: tuple[str, ...] = ()
    """Their digests on the whole span, only in ``rpc_info``: clients with the same adapter need not upload it."""
    software: str = ""
    """Package version of the server."""
    experts: tuple[int, int] | None = None
    """``[first, end)``: only these experts of each block are served, and nothing else. None: whole blocks."""
    slice: tuple[int, int] | None = None
    """``(k, n)``: the k-th, from 0, of n equal parts of each expert's inner dimension. None: whole experts."""
    mobility: Literal["pinned", "drops-first", "loads-first"] = "pinned"
    """Whether the server may move: not; after dropping its span, as memory holds only one; or while it serves it."""
    target: tuple[int, int] | None = None
    """``[start, end)``: the span that it is moving to."""
    leaving: tuple[int, int] | None = None
    """``[start, end)``: the span that it has moved from, and still holds for the sessions open there."""
    network_tokens_s: float = 0.0
    """Hidden states per second that its network carries, in and out, as the server measured; 0: unknown."""
    needs: tuple[tuple[int, int, int, int], ...] = ()
    """``(start, end, first, end expert)``: experts of the served blocks that this server fetches from other peers."""
    pushes: bool = False
    """Whether it sends hidden states to other servers, and takes theirs."""
    refused_pushes: int = 0
    """Hidden states of other servers that it has refused: forged, late, repeated or of a wrong shape."""
    served_tokens: int = 0
    """Tokens that it has computed since it started, of all requests together."""
    unkept_graphs: int = 0
    """Forwards whose graph it did not keep until their backward, which ran them again."""
    codecs: tuple[str, ...] = ()
    """Codecs that it knows; ``none`` and ``float16``, which all servers know, need not be named."""
    round_trips: tuple[tuple[str, float], ...] = ()
    """Seconds to some servers of neighboring blocks and back, by peer id, as the server measured."""
    also: tuple[tuple[str, int, int], ...] = ()
    """``(version, start, end)``: other versions of the model whose blocks ``[start, end)`` are the ones served here."""

    def of(self, version: str) -> ServerInfo | None:
        """Returns what the server is to users of a model version: its blocks that this version has; None if none."""
        if version == self.version:
            return self
        span = next(((start, end) for other, start, end in self.also if other == version), None)
        if span is None:
            return None
        start, end = span
        needs = (
            (max(first, start), min(last, end), *experts)
            for first, last, *experts in self.needs
            if first < end and last > start
        )
        return msgspec.structs.replace(
            self,
            version=version,
            start=start,
            end=end,
            also=(),
            # It moves where its own version needs it, and its adapters were made for that.
            adapters=(),
            adapter_digests=(),
            mobility="pinned",
            target=None,
            leaving=None,
            needs=tuple(needs),
        )


MAX_ECHO_BYTES = 1 << 18


class EchoRequest(BaseMessage, frozen=True, kw_only=True):
    """Asks for the same bytes back, as the first message or between others of ``rpc_info``: measures the network."""

    payload: Tensor
    """``[bytes]``, uint8, at most ``MAX_ECHO_BYTES``."""


class EchoResponse(BaseMessage, frozen=True, kw_only=True):
    """Returns the bytes of an echo request."""

    payload: Tensor

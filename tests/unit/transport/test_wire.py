"""Messages survive the wire; nothing malformed does."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.block_io import CacheOp
from swarm_plugins.errors import ProtocolError
from swarm_plugins.layer_masks import LayerMasks, packed
from swarm_plugins.transport import limits, wire
from swarm_plugins.transport.codec import packed_bytes
from swarm_plugins.transport.messages import (
    AdapterUpload,
    BackwardRequest,
    BackwardResponse,
    Codec,
    Failure,
    ForwardRequest,
    ForwardResponse,
    Message,
    SessionOpen,
    SessionStep,
)
from swarm_plugins.transport.optional import or_none
from swarm_plugins.transport.server_info import InfoRequest, ServerInfo
from swarm_plugins.transport.wire import END_FRAME, decode, encode, parse_header, tensor_bytes


@pytest.fixture(scope="module", autouse=True)
def small_limits() -> Iterator[None]:
    with mock.patch.multiple(limits, MAX_MESSAGE_BYTES=1 << 20, MAX_METADATA_BYTES=1 << 16, MAX_TENSORS=64):
        yield


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8]


def frame(message: Message, codec: str = "none") -> bytes:
    return b"".join(encode(message, codec=codec))  # type: ignore[arg-type]


def raw_frame(metadata: object, payload: bytes = b"", *, declared: int | None = None) -> bytes:
    """A frame with any metadata: what a hostile peer can make."""
    encoded = msgspec.msgpack.encode(metadata)
    header = struct.pack("<2sBBIQ", b"SW", 1, 0, len(encoded), len(payload) if declared is None else declared)
    return header + encoded + bytes(-len(encoded) % 64) + payload


def step(tensor: object) -> dict[str, object]:
    return {"type": "SessionStep", "hidden": tensor, "cached_tokens": 0}


def forward(hidden: torch.Tensor, **kwargs: object) -> ForwardRequest:
    return ForwardRequest(version="v", start=0, end=2, hidden=hidden, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5), (1, 7, 1, 1, 1, 1, 1, 1)], ids=str)
def test_tensors_survive_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    received = decode(frame(SessionStep(hidden=tensor, cached_tokens=7)))
    assert isinstance(received, SessionStep)
    assert received.hidden.dtype == dtype
    assert received.hidden.shape == tensor.shape
    assert torch.equal(received.hidden, tensor)
    assert received.cached_tokens == 7


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.randn(6, 4).t(), id="transposed"),
        pytest.param(torch.randn(1, 1).expand(5, 3), id="expanded"),
        pytest.param(torch.randn(9, 4)[::2], id="strided"),
        pytest.param(torch.randn(3, 3, requires_grad=True), id="with-gradient"),
    ],
)
def test_any_memory_layout_can_be_sent(tensor: torch.Tensor) -> None:
    received = decode(frame(forward(tensor)))
    assert isinstance(received, ForwardRequest)
    assert torch.equal(received.hidden, tensor.detach())
    assert received.hidden.is_contiguous()
    assert not received.hidden.requires_grad


def test_all_fields_of_nested_messages_survive() -> None:
    prefix = tuple(torch.randn(1, 2, 3, 4) for _ in range(4))
    inner = forward(torch.randn(1, 2, 8), prefix=prefix, adapters=("a", "b"), adapter_rows=(-1, 1), dropout_seed=5)
    sent = BackwardRequest(forward=inner, grad_hidden=torch.randn(1, 2, 8), grad_router_logits=(torch.ones(2, 4),))
    received = decode(frame(sent))
    assert isinstance(received, BackwardRequest)
    assert received.forward is not None
    assert all(torch.equal(a, b) for a, b in zip(received.forward.prefix, prefix, strict=True))
    assert received.forward.adapters == ("a", "b")
    assert received.forward.adapter_rows == (-1, 1)
    assert received.forward.dropout_seed == 5
    assert torch.equal(received.grad_hidden, sent.grad_hidden)
    assert torch.equal(received.grad_router_logits[0], sent.grad_router_logits[0])
    assert tensor_bytes(received) == 4 * (16 + 4 * 24 + 16 + 8)


def test_ids_of_tokens_survive_and_are_left_out_elsewhere() -> None:
    ids = torch.tensor([[3, 1 << 40]])
    received = decode(frame(forward(torch.randn(1, 2, 8), token_ids=ids)))
    assert isinstance(received, ForwardRequest)
    found = or_none(received.token_ids)
    assert found is not None
    assert torch.equal(found, ids)
    assert b"token_ids" not in frame(forward(torch.randn(1, 2, 8)))


def test_what_tokens_of_an_image_see_survives_and_is_left_out_elsewhere() -> None:
    seen = torch.rand(1, 2, 9, generator=torch.Generator().manual_seed(0)) > 0.5
    received = decode(frame(forward(torch.randn(1, 2, 8), layer_masks=packed(["full", "sliding"], [seen, ~seen]))))
    assert isinstance(received, ForwardRequest)
    assert isinstance(received.layer_masks, LayerMasks)
    assert torch.equal(received.layer_masks.of(1), ~seen)
    assert b"layer_masks" not in frame(forward(torch.randn(1, 2, 8)))
    with pytest.raises(ProtocolError, match=r"layer_masks.kinds"):
        decode(frame(forward(torch.ones(1, 2, 8), layer_masks=packed(["kind"] * 9, [seen] * 9))))


@pytest.mark.parametrize(
    "message",
    [
        Failure(kind="overloaded", message="later"),
        InfoRequest(),
        ServerInfo(version="v", model="m", num_blocks=3, start=0, end=3, dtype="float32", quantization="none"),
        SessionOpen(version="v", start=0, end=1, batch_size=2, fork_of="s"),
        BackwardResponse(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_without_tensors_survive(message: Message) -> None:
    assert decode(frame(message)) == message


def test_adapter_structure_survives() -> None:
    module = AdapterModule(block=1, module="self_attn.q_proj", kind="lora", shapes=((2, 8), (8, 2)), scaling=0.5)
    sent = AdapterUpload(digest="d", spec=AdapterSpec(modules=(module,)), tensors=(torch.ones(2, 8), torch.ones(8, 2)))
    received = decode(frame(sent))
    assert isinstance(received, AdapterUpload)
    assert received.spec == sent.spec
    assert [tuple(tensor.shape) for tensor in received.tensors] == sent.spec.tensor_shapes()


def test_received_tensors_are_writable_and_share_nothing() -> None:
    data = bytearray(frame(forward(torch.zeros(40), position_ids=torch.zeros(40, dtype=torch.int64))))
    received = decode(data)
    assert isinstance(received, ForwardRequest)
    assert received.position_ids is not None
    received.hidden.fill_(1.0)
    assert received.position_ids.sum() == 0
    assert bytes(data) == frame(forward(torch.zeros(40), position_ids=torch.zeros(40, dtype=torch.int64)))
    assert received.hidden.untyped_storage().nbytes() == 160


def test_received_tensors_are_aligned_for_vector_instructions() -> None:
    received = decode(frame(ForwardResponse(hidden=torch.zeros(3), hidden_states=(torch.zeros(5), torch.zeros(7)))))
    assert isinstance(received, ForwardResponse)
    assert [tensor.data_ptr() % 64 for tensor in (received.hidden, *received.hidden_states)] == [0, 0, 0]


def test_large_tensors_are_sent_without_a_copy() -> None:
    tensor = torch.randn(64, 1024)
    parts = encode(forward(tensor))
    view = parts[1]
    assert isinstance(view, memoryview)
    tensor[0, 0] = 42.0
    assert struct.unpack("<f", view[:4])[0] == 42.0


@pytest.mark.parametrize(
    ("metadata", "payload", "complaint"),
    [
        pytest.param(step(["float64", "none", [1]]), bytes(64), "dtype 'float64': expected one of float32", id="dtype"),
        pytest.param(step(["object", "none", [1]]), bytes(64), "dtype 'object'", id="object"),
        pytest.param(
            step(["float32", "zip", [1]]),
            bytes(64),
            "unknown codec 'zip' of a tensor; known here: none, float16",
            id="codec",
        ),
        pytest.param(step(["float32", ["none"], [1]]), bytes(64), "codec", id="codec-unhashable"),
        pytest.param(
            {**step(["float32", "none", [1]]), "reply_codec": "zip"},
            bytes(64),
            "'zip' - at `\\$.reply_codec`; codecs known here: none, float16",
            id="reply-codec",
        ),
        pytest.param(step([["float32"], "none", [1]]), bytes(64), "dtype", id="dtype-unhashable"),
        pytest.param(step(["float32", "none", [-1]]), bytes(64), "whole numbers", id="negative"),
        pytest.param(step(["float32", "none", [True]]), bytes(64), "whole numbers", id="bool-size"),
        pytest.param(step(["float32", "none", [1.5]]), bytes(64), "whole numbers", id="float-size"),
        pytest.param(step(["float32", "none", [1] * 9]), bytes(64), "at most 8", id="dimensions"),
        pytest.param(step(["float32", "none", [2**63 - 1]]), bytes(64), "whole numbers", id="huge"),
        pytest.param(step(["float32", "none", [2**39, 2**39]]), bytes(64), "sane size", id="product"),
        pytest.param(step(["float32", "none", [0, 2**39, 2**39]]), b"", "overflows", id="zero-hides-overflow"),
        pytest.param(step(["float32", "none", [17]]), bytes(64), "needs 68 bytes, 64 are left", id="too-little"),
        pytest.param(step(["float32", "none", [1]]), bytes(128), "64 bytes .* do not belong", id="too-much"),
        pytest.param(step(["int64", "rotated8", [2048]]), bytes(2112), "does not apply", id="packed-integers"),
        pytest.param(step(["float32", "rotated8", [4]]), bytes(64), "does not apply", id="packed-small"),
        pytest.param(step(["bool", "none", [2]]), b"\x02" + bytes(63), "bytes other than 0 and 1", id="bool-bytes"),
        pytest.param(step({"a": 1}), b"", "malformed description", id="no-description"),
        pytest.param(step(None), b"", "described by|malformed", id="none"),
        pytest.param({"type": "SessionStep", "cached_tokens": 0}, b"", "missing required field", id="missing"),
        pytest.param({"type": "Shutdown"}, b"", "malformed", id="unknown-message"),
        pytest.param({"type": "InfoRequest", "extra": 1}, b"", "unknown field", id="unknown-field"),
        pytest.param({"type": "Failure", "kind": "boom", "message": ""}, b"", "malformed", id="unknown-kind"),
        pytest.param([1, 2], b"", "malformed", id="list"),
        pytest.param({"type": "Failure", "kind": 3, "message": ""}, b"", r"\$\.kind", id="wrong-type"),
    ],
)
def test_malformed_messages_are_refused(metadata: object, payload: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        decode(raw_frame(metadata, payload))


def test_tensors_cannot_claim_the_same_bytes_twice() -> None:
    metadata = {
        "type": "ForwardResponse",
        "hidden": ["float32", "none", [16]],
        "hidden_states": [["float32", "none", [16]]],
    }
    with pytest.raises(ProtocolError, match="needs 64 bytes, 0 are left"):
        decode(raw_frame(metadata, bytes(64)))


def test_too_many_tensors_are_refused() -> None:
    empty = ["float32", "none", [0]]
    metadata = {"type": "ForwardResponse", "hidden": empty, "hidden_states": [empty] * 64}
    with pytest.raises(ProtocolError, match="too many tensors"):
        decode(raw_frame(metadata))


@pytest.mark.parametrize("codec", ["rotated8", "float16"])
def test_a_message_that_unpacks_to_more_than_one_may_have_takes_no_memory(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def description(size: int) -> list[object]:
        return ["float32", codec, [size]]

    def payload(size: int) -> bytes:
        num_bytes = packed_bytes(codec, torch.float32, size)
        return bytes(num_bytes + -num_bytes % 64)

    most = limits.MAX_MESSAGE_BYTES // 4
    whole = {"type": "ForwardResponse", "hidden": description(most + 128)}
    parts = {**whole, "hidden": description(most // 2), "hidden_states": [description(most // 2 + 128)]}
    fits = {**whole, "hidden": description(most // 2)}
    assert decode(raw_frame(fits, payload(most // 2))).hidden.numel() == most // 2  # type: ignore[attr-defined]
    with pytest.raises(ProtocolError, match="unpacks to more than"):
        decode(raw_frame(parts, payload(most // 2) + payload(most // 2 + 128)))
    for name in ("unpack", "unpack_rotated8"):
        monkeypatch.setattr(wire, name, mock.Mock(side_effect=AssertionError))
    with pytest.raises(ProtocolError, match="unpacks to more than 1048576 bytes, the limit: split the batch"):
        decode(raw_frame(whole, payload(most + 128)))


def test_hostile_nesting_is_refused() -> None:
    nested = b"\x91" * 50_000 + b"\x00"
    metadata = b"\x83\xa4type\xabSessionStep\xadcached_tokens\x00\xa6hidden" + nested
    header = struct.pack("<2sBBIQ", b"SW", 1, 0, len(metadata), 0)
    with pytest.raises(ProtocolError, match="malformed"):
        decode(header + metadata + bytes(-len(metadata) % 64))


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        pytest.param(b"GE", "16 bytes of header, got 2", id="short"),
        pytest.param(b"GET / HTTP/1.1\r\n", "not a frame of protocol version 1", id="magic"),
        pytest.param(struct.pack("<2sBBIQ", b"SW", 2, 0, 0, 0), "same release", id="version"),
        pytest.param(struct.pack("<2sBBIQ", b"SW", 1, 9, 0, 0), "not a frame", id="kind"),
        pytest.param(
            struct.pack("<2sBBIQ", b"SW", 1, 0, 65537, 0), "65537 bytes declared, the limit is 65536", id="metadata"
        ),
        pytest.param(struct.pack("<2sBBIQ", b"SW", 1, 0, 0, 2**64 - 1), "the limit is 1048576", id="payload"),
        pytest.param(struct.pack("<2sBBIQ", b"SW", 1, 1, 0, 64), "declares 64 bytes, expected 0", id="end-with-body"),
    ],
)
def test_bad_headers_are_refused(header: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        parse_header(header)


def test_end_of_stream_is_no_message() -> None:
    assert parse_header(END_FRAME).is_end
    with pytest.raises(ProtocolError, match="end of the stream"):
        decode(END_FRAME)


@pytest.mark.parametrize("cut", [1, 20, 64, 65])
def test_truncated_frames_are_refused(cut: int) -> None:
    whole = frame(forward(torch.ones(32)))
    with pytest.raises(ProtocolError, match="declares"):
        decode(whole[:-cut])


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        pytest.param(torch.zeros(1, dtype=torch.float64), "cannot send a tensor of torch.float64", id="dtype"),
        pytest.param(torch.zeros([1] * 9), "9 dimensions: reshape it to at most 8", id="dimensions"),
    ],
)
def test_what_the_wire_does_not_know_is_not_sent(tensor: torch.Tensor, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        encode(forward(tensor))


@given(st.binary(max_size=400))
def test_random_bytes_never_do_anything_but_raise(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


WHOLE = frame(
    forward(torch.randn(2, 40), attention_mask=torch.ones(2, 40, dtype=torch.bool), prefix=(torch.randn(2, 3),)),
    "rotated8",
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_frames_give_a_valid_message_or_raise(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(WHOLE)
    for position, byte in changes:
        damaged[position] = byte
    try:
        message = decode(damaged)
    except ProtocolError:
        return
    assert isinstance(message, Message)


def test_cache_ops_survive() -> None:
    ops = (CacheOp(kind="crop", indices=(3,)), CacheOp(kind="reorder", indices=(1, 0)))
    received = decode(frame(SessionStep(hidden=torch.zeros(1), cached_tokens=3, ops=ops)))
    assert isinstance(received, SessionStep)
    assert received.ops == ops

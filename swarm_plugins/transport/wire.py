"""Encodes messages as frames, and decodes them.

A frame is a header of 16 bytes, the metadata (msgpack) and the raw bytes of the tensors, in the order of the metadata,
each padded to a multiple of 64 bytes:

```text
"SW" version kind | metadata bytes (u32) | payload bytes (u64) | metadata, padded | tensor | pad | tensor | pad ...
```

The metadata describes a tensor as ``[dtype, codec, [shape]]``, without its place: the decoder keeps a cursor, so
tensors can neither overlap nor be named twice, and the payload must be used up exactly.
"""

from __future__ import annotations

import asyncio
import functools
import math
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import Tensor

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport import limits
from swarm_plugins.transport.codec import is_packable, pack, packed_bytes, unpack, unpack_rotated8
from swarm_plugins.transport.messages import CODECS, Codec, Message

HEADER_BYTES = 16
_LONG_BYTES = 256 << 10
"""``rotated8`` takes 5 ms to unpack so much, and four times as long to pack it: too long for an event loop."""
_HEADER = struct.Struct("<2sBBIQ")
_MAGIC = b"SW"
_VERSION = 1
_KIND_MESSAGE, _KIND_END = 0, 1
_ALIGN = 64
_MAX_DIMS = 8
_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
    "uint8": torch.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ZEROS = bytes(_ALIGN)

END_FRAME = _HEADER.pack(_MAGIC, _VERSION, _KIND_END, 0, 0)
"""Announces to the other end that the stream is closed on purpose."""


class FrameHeader(NamedTuple):
    """The contents of a frame's header, checked against limits."""

    is_end: bool
    metadata_bytes: int
    body_bytes: int
    """Bytes that follow the header."""


def encode(message: Message, *, codec: Codec = "none") -> list[bytes | memoryview]:
    """Returns the parts of a message's frame, header and metadata first.

    Parts may be views of the message's tensors: do not change them before the parts are sent.

    Raises:
        ProtocolError: If a tensor has a dtype or more dimensions than the wire knows.
    """
    payload: list[bytes | memoryview] = []
    payload_bytes = 0

    def describe(tensor: object) -> list[object]:
        nonlocal payload_bytes
        if not isinstance(tensor, Tensor):
            raise NotImplementedError(f"cannot send a {type(tensor).__name__}")  # msgspec's contract for enc_hook
        description, data = _describe(tensor, codec)
        payload_bytes += _padded(data.nbytes)
        if data.nbytes:
            payload.append(data)
        if data.nbytes % _ALIGN:
            payload.append(_ZEROS[: -data.nbytes % _ALIGN])
        return description

    metadata = msgspec.msgpack.Encoder(enc_hook=describe).encode(message)
    header = _HEADER.pack(_MAGIC, _VERSION, _KIND_MESSAGE, len(metadata), payload_bytes)
    return [header + metadata + _ZEROS[: -len(metadata) % _ALIGN], *payload]


async def encoded(message: Message, codec: Codec) -> list[bytes | memoryview]:
    """Returns what `encode` does; long tensors are packed outside of the event loop."""
    if codec == "rotated8" and tensor_bytes(message) > _LONG_BYTES:
        return await asyncio.to_thread(encode, message, codec=codec)
    return encode(message, codec=codec)


def tensor_bytes(message: msgspec.Struct) -> int:
    """Returns how many bytes a message's tensors take unpacked, with those of a request that it contains."""
    fields = [getattr(message, name) for name in message.__struct_fields__]
    parts = [one for field in fields for one in (field if isinstance(field, tuple) else (field,))]
    inner = sum(tensor_bytes(one) for one in parts if isinstance(one, msgspec.Struct))
    return inner + sum(one.nbytes for one in parts if isinstance(one, Tensor))


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decodes one whole frame that holds a message; its tensors do not alias ``data``.

    Raises:
        ProtocolError: If it is malformed, too large, or not a message.
    """
    view = memoryview(data)
    header = parse_header(view[:HEADER_BYTES])
    if header.is_end:
        raise ProtocolError("expected a message, got the end of the stream")
    if len(view) - HEADER_BYTES != header.body_bytes:
        raise ProtocolError(f"frame has {len(view)} bytes, but its header declares {header.body_bytes} after itself")
    body = torch.empty(header.body_bytes, dtype=torch.uint8)
    body.numpy().data[:] = view[HEADER_BYTES:]
    return decode_body(header, body)


def parse_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Reads a frame's header and checks what it declares against the limits.

    Raises:
        ProtocolError: If it is not a header, or declares too much.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"a frame starts with {HEADER_BYTES} bytes of header, got {len(data)}")
    magic, version, kind, metadata_bytes, payload_bytes = _HEADER.unpack(data)
    if magic != _MAGIC or version != _VERSION or kind not in (_KIND_MESSAGE, _KIND_END):
        raise ProtocolError(
            f"not a frame of protocol version {_VERSION}: starts with {bytes(data[:4])!r}; "
            "run the same release at both ends"
        )
    if metadata_bytes > limits.MAX_METADATA_BYTES:
        raise ProtocolError(f"metadata of {metadata_bytes} bytes declared, the limit is {limits.MAX_METADATA_BYTES}")
    body_bytes = _padded(metadata_bytes) + payload_bytes
    if body_bytes > limits.MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message of {body_bytes} bytes declared, the limit is {limits.MAX_MESSAGE_BYTES}: split the batch"
        )
    if kind == _KIND_END and body_bytes:
        raise ProtocolError(f"an end of stream declares {body_bytes} bytes, expected 0")
    return FrameHeader(kind == _KIND_END, metadata_bytes, body_bytes)


def decode_body(
    header: FrameHeader,
    body: Tensor,
    claim: Callable[[int], None] | None = None,
    later: list[Callable[[], None]] | None = None,
    *,
    max_tensors: int | None = None,
) -> Message:
    """Decodes a message from a body, flat ``uint8``, that it then owns: the message's tensors are views of it.

    Args:
        header: Header of the frame.
        body: What follows the header.
        claim: Called with a number of bytes before packed tensors are unpacked to so many; may refuse.
        later: Gets what unpacks long tensors, which are of no use before that was called. None: they are unpacked.
        max_tensors: Most tensors. None: `MAX_TENSORS`.

    Raises:
        ProtocolError: If it is malformed.
        CapacityError: If there is no memory to unpack it.
    """
    buffer = body.numpy().data
    reader = _TensorReader(buffer, _padded(header.metadata_bytes), max_tensors or limits.MAX_TENSORS, claim, later)
    _local.reader = reader
    try:
        message = cast(Message, _decoder.decode(buffer[: header.metadata_bytes]))
    # msgspec names the field; recursion and overflow come from hostile nesting and numbers.
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, TypeError) as exc:
        hint = f"; codecs known here: {', '.join(CODECS)}" if "reply_codec" in str(exc) else ""
        raise ProtocolError(f"malformed message: {exc}{hint}") from exc
    finally:
        _local.reader = None
    if reader.cursor != len(buffer):
        raise ProtocolError(f"{len(buffer) - reader.cursor} bytes of the message do not belong to a tensor")
    return message


async def decoded(header: FrameHeader, body: Tensor, claim: Callable[[int], None] | None, max_tensors: int) -> Message:
    """Returns what `decode_body` does; long tensors are unpacked outside of the event loop."""
    later: list[Callable[[], None]] = []
    message = decode_body(header, body, claim, later, max_tensors=max_tensors)
    if later:
        await asyncio.to_thread(lambda: [unpack() for unpack in later])
    return message


def _padded(num_bytes: int) -> int:
    return num_bytes + (-num_bytes % _ALIGN)


def _describe(tensor: Tensor, codec: Codec) -> tuple[list[object], memoryview]:
    dtype_name = _DTYPE_NAMES.get(tensor.dtype)
    if dtype_name is None:
        raise ProtocolError(f"cannot send a tensor of {tensor.dtype}: cast it to one of {', '.join(_DTYPES)}")
    if tensor.dim() > _MAX_DIMS:
        raise ProtocolError(f"cannot send a tensor of {tensor.dim()} dimensions: reshape it to at most {_MAX_DIMS}")
    plain = tensor.detach().cpu().contiguous()
    packed = pack(plain, codec) if is_packable(codec, tensor.dtype, tensor.numel()) else None
    used: Codec = "none" if packed is None else codec
    data = (plain if packed is None else packed).reshape(-1)
    parts = data.view(torch.uint8).numpy().data if data.numel() else memoryview(b"")
    return [dtype_name, used, list(tensor.shape)], parts


class _TensorReader:
    """Turns descriptions into tensors over a body, front to back."""

    def __init__(
        self,
        buffer: memoryview,
        cursor: int,
        max_tensors: int,
        claim: Callable[[int], None] | None,
        later: list[Callable[[], None]] | None,
    ) -> None:
        self.cursor = cursor
        self._claim = claim
        self._later = later
        self._buffer = buffer
        self._tensors_left = max_tensors
        self._unpacked_left = limits.MAX_MESSAGE_BYTES

    def read(self, description: object) -> Tensor:
        dtype, codec, shape = _check_description(description)
        self._tensors_left -= 1
        if self._tensors_left < 0:
            raise ProtocolError("too many tensors in one message")
        num_elements = math.prod(shape)
        num_bytes = packed_bytes(codec, dtype, num_elements)
        start, end = self.cursor, self.cursor + _padded(num_bytes)
        if end > len(self._buffer):
            raise ProtocolError(
                f"tensor {dtype} {shape} ({codec}) needs {num_bytes} bytes, {len(self._buffer) - start} are left"
            )
        self.cursor = end
        if num_elements == 0:
            return torch.empty(shape, dtype=dtype)
        raw = self._buffer[start : start + num_bytes]
        if codec == "none":
            # Any other byte in a bool tensor is undefined behavior in compiled kernels.
            if dtype == torch.bool and torch.frombuffer(raw, dtype=torch.uint8).amax().item() > 1:
                raise ProtocolError("a bool tensor holds bytes other than 0 and 1")
            return torch.frombuffer(raw, dtype=dtype).view(shape)
        # Packed, a message could stand for four times what may be sent as it is.
        self._unpacked_left -= num_elements * dtype.itemsize
        if self._unpacked_left < 0:
            raise ProtocolError(
                f"the message unpacks to more than {limits.MAX_MESSAGE_BYTES} bytes, the limit: split the batch"
            )
        if self._claim is not None:
            self._claim(num_elements * dtype.itemsize)
        payload = torch.frombuffer(raw, dtype=torch.uint8)
        if self._later is None or codec != "rotated8" or num_bytes <= _LONG_BYTES:
            return unpack(payload, codec, dtype, num_elements).view(shape)
        values = torch.empty(num_elements, dtype=dtype)
        self._later.append(functools.partial(unpack_rotated8, payload, values))
        return values.view(shape)


def _check_description(description: object) -> tuple[torch.dtype, Codec, list[int]]:
    if not isinstance(description, list) or len(description) != 3:
        raise ProtocolError("malformed description of a tensor: expected [dtype, codec, shape]")
    dtype_name, codec, shape = description
    dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise ProtocolError(f"tensor dtype {str(dtype_name)[:40]!r}: expected one of {', '.join(_DTYPES)}")
    if codec not in CODECS:
        raise ProtocolError(
            f"unknown codec {str(codec)[:40]!r} of a tensor; known here: {', '.join(CODECS)}: use one of them, or "
            "upgrade this end"
        )
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS:
        raise ProtocolError(f"malformed tensor shape: expected a list of at most {_MAX_DIMS} sizes")
    # No dimension beyond 2**40, so that one next to a zero cannot smuggle overflowing strides into torch.
    if any(type(size) is not int or not 0 <= size < 1 << 40 for size in shape) or math.prod(shape) >= 1 << 48:
        raise ProtocolError(f"tensor shape {str(shape)[:80]}: expected whole numbers from 0 on, of sane size")
    if math.prod(size or 1 for size in shape) >= 1 << 60:
        raise ProtocolError(f"tensor shape {str(shape)[:80]} overflows")
    if codec != "none" and not is_packable(codec, dtype, math.prod(shape)):
        raise ProtocolError(f"codec {codec} does not apply to a {dtype_name} tensor of shape {shape}")
    return dtype, codec, shape


_local = threading.local()


def _read_tensor(kind: type, description: Any) -> Tensor:
    if kind is not Tensor:
        raise NotImplementedError(f"cannot receive a {kind}")  # msgspec's contract for dec_hook
    reader: _TensorReader | None = getattr(_local, "reader", None)
    if reader is None:
        raise ProtocolError("tensor outside of a message")
    return reader.read(description)


# One decoder for all messages: building its table of types takes longer than decoding a message.
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=_read_tensor)

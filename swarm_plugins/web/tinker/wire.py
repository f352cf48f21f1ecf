"""Texts and tensors of the protocol as tensors of torch, and answers as its messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError, printable
from swarm_plugins.tuning.computing import Computed
from swarm_plugins.tuning.datums import Datum, LossCall
from swarm_plugins.web.tinker.messages import message, parsed

_REQUEST = "ForwardBackwardRequest"
MAX_FIELDS = 1 << 16
"""Of a request, with those of all its texts."""
_MAX_CELLS = 1 << 22
"""Of all tensors of a request once they are dense: sparse ones are small on the way."""
_MAX_DIMS = 2
"""Of a tensor: ``[N]`` or ``[N, K]``. The product of many large ones takes minutes, in which nothing else runs."""
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4"), 4: np.dtype("<u2"),
}  # fmt: skip
_FLOAT32, _BFLOAT16 = 1, 4


@dataclass(frozen=True)
class ForwardBackward:
    """A request that waits for its turn as it was sent: its messages would take twenty times as many bytes."""

    model_id: str
    seq_id: int
    forward_only: bool
    body: bytes

    def read(self) -> Any:
        """Returns its message."""
        found = message(_REQUEST)
        found.ParseFromString(self.body)
        return found


def read_request(body: bytes) -> ForwardBackward:
    """Reads a ForwardBackwardRequest; its texts are looked at by `datums_of`.

    Raises:
        ConfigError: If the body is none.
    """
    found = parsed(_REQUEST, body, MAX_FIELDS)
    return ForwardBackward(found.model_id, found.seq_id, found.forward_only, body)


def call_of(forward_backward: ForwardBackward) -> LossCall:
    """Returns the loss of a request.

    Raises:
        ConfigError: If there is no such loss or setting.
    """
    request = forward_backward.read()
    newer = {
        key: getattr(value, value.WhichOneof("value") or "text") for key, value in request.loss_fn_config_v2.items()
    }
    return LossCall.of(request.loss_fn, newer or dict(request.loss_fn_config))


def datums_of(forward_backward: ForwardBackward) -> list[Datum]:
    """Returns the texts of a request.

    Raises:
        ConfigError: If one is not a text of tokens, or its tensors are damaged or too large.
    """
    request = forward_backward.read()
    found, room = [], _MAX_CELLS
    if not request.data:
        raise ConfigError("no datum: send at least one")
    for number, datum in enumerate(request.data):
        try:
            tokens = _tokens_of(datum.model_input)
            inputs = {}
            for name, tensor in datum.loss_fn_inputs.items():
                if len(tensor.shape) > _MAX_DIMS:
                    shown = printable(name[:100])
                    raise ConfigError(f"{shown} has {len(tensor.shape)} dimensions: at most {_MAX_DIMS} are possible")
                cells = math.prod(tensor.shape) if tensor.shape else 0
                if not 0 <= cells <= room:
                    raise ConfigError(f"the request's tensors have more than {_MAX_CELLS} cells: send less at once")
                room -= cells
                inputs[name] = tensor_of(tensor, name)
        except ConfigError as exc:
            raise ConfigError(f"datum {number} of {len(request.data)}: {exc}") from None
        found.append(Datum(tokens, inputs))
    return found


def _tokens_of(chunks: Iterable[Any]) -> Tensor:
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ConfigError(f"model_input has a chunk of {kind or 'no kind'}: this model reads tokens of text only")
        parts.append(_array(chunk.encoded_text.tokens, np.dtype("<i4"), "model_input"))
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)) if parts else torch.empty(0, dtype=torch.int64)


def tensor_of(tensor: Any, name: str) -> Tensor:
    """Returns a Tensor's values; raises ConfigError if it is damaged. Its cells are looked at before."""
    dtype = _DTYPES.get(tensor.dtype)
    shown = printable(name[:100])
    if dtype is None:
        raise ConfigError(f"{shown} has a dtype numbered {tensor.dtype}: known are {', '.join(map(str, _DTYPES))}")
    shape = list(tensor.shape)
    if tensor.WhichOneof("layout") == "sparse_csr":
        values = _dense(tensor.sparse_csr, shape, dtype, shown)
    else:
        values = _array(tensor.dense, dtype, shown)
        shape = shape or [len(values)]
    if len(values) != math.prod(shape) or min(shape) < 0:
        raise ConfigError(f"{shown} has {len(values)} values, but shape {shape}")
    if tensor.dtype == _BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    # Losses are computed in float32; a copy, since a message's bytes cannot be written.
    kind = np.float32 if tensor.dtype in (_FLOAT32, _BFLOAT16) else np.int64
    return torch.from_numpy(values.astype(kind, copy=True).reshape(shape))


def _dense(sparse: Any, shape: list[int], dtype: np.dtype[Any], name: str) -> np.ndarray[Any, Any]:
    """Returns the cells of a matrix in compressed rows; those that are not listed are 0."""
    values = _array(sparse.values, dtype, name)
    starts, columns = (_array(one, np.dtype("<i8"), name) for one in (sparse.crow_indices, sparse.col_indices))
    is_sound = (
        len(shape) == 2
        and len(starts) == shape[0] + 1
        and len(values) == len(columns)
        and len(starts) > 0
        and starts[0] == 0
        and starts[-1] == len(values)
        # Before they are subtracted: far ones wrap around, and numpy would write where nothing is.
        and bool(((starts >= 0) & (starts <= len(values))).all())
        and bool((np.diff(starts) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not is_sound:
        raise ConfigError(f"{name} is not a matrix in compressed rows of shape {shape}")
    cells = np.zeros(shape, dtype)
    cells[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return cells.reshape(-1)


def _array(data: bytes, dtype: np.dtype[Any], name: str) -> np.ndarray[Any, Any]:
    if len(data) % dtype.itemsize:
        raise ConfigError(f"{name} has {len(data)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def computed_message(results: Sequence[Computed]) -> bytes:
    """Returns a ForwardBackwardOutput: outputs of each text, and the sum of their losses."""
    records = []
    for trailing, group in groupby(results, key=lambda one: (one.logprobs.shape[1:], one.losses.shape[1:])):
        same = list(group)
        fields = {
            "logprobs": _batched([one.logprobs for one in same], trailing[0]),
            "elementwise_loss": _batched([one.losses for one in same], trailing[1]),
        }
        records.append(message("ArrayRecord", fields=fields, num_datums=len(same)))
    total = float(torch.stack([one.losses.sum(dtype=torch.float64) for one in results]).sum())
    output = message(
        "ForwardBackwardOutput",
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=records,
        metrics={"loss:sum": total},
    )
    found: bytes = output.SerializeToString()
    return found


def _batched(tensors: Sequence[Tensor], trailing: Sequence[int]) -> Any:
    parts = [float_bytes(one) for one in tensors]
    offsets = np.array([0, *accumulate(map(len, parts))], "<i8")
    return message(
        "BatchedTensor", data=b"".join(parts), offsets=offsets.tobytes(), dtype=_FLOAT32, trailing_shape=trailing
    )


def float_bytes(tensor: Tensor) -> bytes:
    """Returns a tensor's values as float32."""
    return tensor.contiguous().numpy().astype("<f4").tobytes()

"""The protocol's messages against the installed SDK's, and against senders of anything."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from tinker.proto import tinker_public_pb2

from swarm_plugins.errors import ConfigError
from swarm_plugins.tuning.datums import LossCall, TextBounds, check_datums
from swarm_plugins.web.tinker.messages import SCHEMA, message, parsed
from swarm_plugins.web.tinker.wire import MAX_FIELDS, call_of, datums_of, read_request

OURS_ALONE = {"Other"}
ENUMS = {FieldDescriptor.TYPE_ENUM: FieldDescriptor.TYPE_INT32}


@pytest.mark.parametrize("name", sorted(SCHEMA.keys() - OURS_ALONE))
def test_numbers_and_types_are_the_sdks(name: str) -> None:
    theirs = getattr(tinker_public_pb2, name).DESCRIPTOR.fields_by_name
    for field in message(name).DESCRIPTOR.fields:
        other = theirs[field.name]
        assert field.number == other.number, field.name
        # Numbers of an enum travel as whole numbers.
        assert field.type == ENUMS.get(other.type, other.type), field.name
        assert field.is_repeated == other.is_repeated, field.name


def request(num_datums: int = 2) -> Any:
    """A request as the SDK writes it."""
    found = tinker_public_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    found.loss_fn_config_v2["clip_low_threshold"].number = 0.5
    for _ in range(num_datums):
        datum = found.data.add()
        datum.model_input.add().encoded_text.tokens = bytes([5, 0, 0, 0, 6, 0, 0, 0])
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = bytes([6, *[0] * 7, 7, *[0] * 7]), 2
        for name in ("logprobs", "advantages"):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = bytes(8), 1
            tensor.shape.append(2)
    return found


def test_a_request_is_read() -> None:
    found = read_request(request().SerializeToString())
    assert (found.model_id, found.seq_id, found.forward_only) == ("m", 1, False)
    assert call_of(found) == LossCall(
        "ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2, "entropy_bonus": 0.0}
    )
    datums = datums_of(found)
    assert [one.tokens.tolist() for one in datums] == [[5, 6]] * 2
    assert datums[0].inputs["target_tokens"].tolist() == [6, 7]


def test_a_request_waits_as_it_was_sent() -> None:
    body = request().SerializeToString()
    assert dataclasses.astuple(read_request(body)) == ("m", 1, False, body)


def test_fields_are_counted_before_they_take_memory() -> None:
    empty = b"\x1a\x00" * (MAX_FIELDS + 1)  # so many texts of two bytes each
    with pytest.raises(ConfigError, match=f"more than {MAX_FIELDS} fields"):
        read_request(empty)
    inner = request(1).data[0].SerializeToString() + b"\x0a\x00" * MAX_FIELDS
    nested = b"\x1a" + varint(len(inner)) + inner
    with pytest.raises(ConfigError, match=f"more than {MAX_FIELDS} fields"):
        read_request(nested)
    assert len(parsed("ForwardBackwardRequest", b"\x1a\x00" * 10, 10).data) == 10


def varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


@pytest.mark.parametrize("shape", [[1 << 62, 1 << 62], [-1, -2], [1 << 40, 1], [0, 1 << 62]])
def test_a_sparse_tensor_names_more_than_it_may(shape: list[int]) -> None:
    found = request(1)
    tensor = found.data[0].loss_fn_inputs["weights"]
    tensor.sparse_csr.values, tensor.dtype = bytes(4), 1
    tensor.shape.extend(shape)
    with pytest.raises(ConfigError, match="datum 0 of 1"):
        datums_of(read_request(found.SerializeToString()))


@pytest.mark.parametrize("starts", [(0, 2**63 - 1, -2, 1), (0, 2, 0, 1), (0, -1, 0, 1)])
def test_rows_of_a_sparse_tensor_that_begin_nowhere(starts: tuple[int, ...]) -> None:
    """Their differences wrap around: the first ones would make numpy write where nothing is."""
    found = request(1)
    tensor = found.data[0].loss_fn_inputs["weights"]
    tensor.dtype, tensor.sparse_csr.values, tensor.sparse_csr.col_indices = 1, bytes(4), bytes(8)
    tensor.sparse_csr.crow_indices = np.array(starts, "<i8").tobytes()
    tensor.shape.extend([3, 2])
    with pytest.raises(ConfigError, match="datum 0 of 1: weights is not a matrix in compressed rows"):
        datums_of(read_request(found.SerializeToString()))


@pytest.mark.parametrize("dimension", [1, 2**63 - 1])
def test_dimensions_are_counted_before_they_are_multiplied(dimension: int) -> None:
    found = request(1)
    found.data[0].loss_fn_inputs["weights"].shape.extend([dimension] * 10)
    with pytest.raises(ConfigError, match="datum 0 of 1: weights has 10 dimensions: at most 2 are possible"):
        datums_of(read_request(found.SerializeToString()))


def test_nothing_that_is_sent_ends_in_another_error() -> None:
    draw, whole = random.Random(0), request().SerializeToString()
    refused = 0
    for _ in range(10_000):
        body = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(body))
            if draw.random() < 0.2:
                del body[place : place + draw.randrange(1, 20)]
            else:
                body[place] = draw.randrange(256)
        try:
            found = read_request(bytes(body))
            check_datums(datums_of(found), call_of(found), TextBounds(context=64, vocabulary=128))
        except ConfigError:
            refused += 1
    assert 1000 < refused < 10_000

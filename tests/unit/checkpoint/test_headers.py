"""Safetensors headers: what is right is read, what is wrong ends in a sentence."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from swarm_plugins.checkpoint.headers import MAX_HEADER_BYTES, header_bytes, parse_header
from swarm_plugins.errors import CheckpointError

TENSORS = {
    "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "bool": torch.tensor([True, False]),
    "fp8": torch.zeros(4, dtype=torch.float8_e4m3fn),
    "int": torch.arange(3),
}


def test_a_header_by_safetensors_is_understood() -> None:
    raw = save(TENSORS, metadata={"format": "pt", "shape": "text"})
    length = header_bytes(raw, "x", len(raw))
    infos = parse_header(raw[8 : 8 + length], "x", len(raw))
    assert infos.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        info = infos[name]
        assert (info.dtype, info.shape, info.num_bytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        assert raw[info.start : info.end] == bytes(
            tensor.reshape(-1).view(torch.uint8).tolist() if tensor.nbytes else b""
        )


def header(**entry: object) -> bytes:
    return json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **entry}}).encode()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param(header(dtype="F3"), r"'w' in x has the type 'F3'.*known: F64", id="dtype"),
        pytest.param(
            header(shape=[2, 3]), r"shape \[2, 3\] of F32, which takes 24 bytes, but lies at bytes 0 to 16", id="shape"
        ),
        pytest.param(header(shape=[-2, -2]), r"corrupt safetensors header .*shape", id="negative-shape"),
        pytest.param(header(shape=[10**30, 10**30]), r"corrupt safetensors header .*shape", id="absurd-shape"),
        # Multiplied, these would take minutes.
        pytest.param(header(shape=[2**50] * 500_000), r"corrupt safetensors header .*<= 64", id="absurd-rank"),
        pytest.param(header(data_offsets=[16, 0]), r"lies at bytes 16 to 0", id="backwards"),
        pytest.param(header(data_offsets=[-16, 0]), r"corrupt safetensors header .*data_offsets", id="before-file"),
        pytest.param(
            header()[:-1] + b', "v": {"dtype": "F32", "shape": [3], "data_offsets": [12, 24]}}',
            r"x puts the tensors 'w' and 'v' in the same bytes",
            id="overlap",
        ),
        pytest.param(header(data_offsets=[0]), r"corrupt safetensors header", id="one-offset"),
        pytest.param(header(shape="2"), r"corrupt safetensors header", id="shape-type"),
        pytest.param(b'{"w": 1}', r"corrupt safetensors header", id="no-entry"),
        pytest.param(b"[]", r"corrupt safetensors header", id="no-object"),
        pytest.param(b"{", r"corrupt safetensors header", id="no-json"),
        pytest.param(b'{"a":' * 100_000, r"corrupt safetensors header", id="nested"),
        pytest.param(b'{"\xff": 1}', r"corrupt safetensors header", id="no-utf8"),
    ],
)
def test_a_corrupt_header_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_header(raw, "x", None)


def test_a_short_file_names_tensor_and_both_sizes() -> None:
    raw = header()
    with pytest.raises(
        CheckpointError, match=rf"truncated: tensor 'w' ends at byte {24 + len(raw)} .* found {len(raw)}"
    ):
        parse_header(raw, "x", len(raw))


@pytest.mark.parametrize(
    ("prefix", "size", "message"),
    [
        pytest.param(b"1234", 4, r"x is not a safetensors file: it has 4 bytes", id="tiny"),
        pytest.param(b"\0" * 8, 8, r"header of 0 bytes, expected 2 to 100000000", id="zero"),
        pytest.param(
            (MAX_HEADER_BYTES + 1).to_bytes(8, "little"), None, r"100000001 bytes, expected", id="above-limit"
        ),
        pytest.param(b"\xff" * 8, None, r"expected 2 to 100000000", id="absurd"),
        pytest.param((100).to_bytes(8, "little"), 50, r"ends at byte 108, the file has 50 bytes", id="truncated"),
    ],
)
def test_an_absurd_length_is_refused(prefix: bytes, size: int | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        header_bytes(prefix, "x", size)


@given(st.binary(max_size=300))
def test_random_bytes_end_in_tensors_within_the_file_or_in_a_sentence(raw: bytes) -> None:
    try:
        infos = parse_header(raw, "x", 1000)
    except CheckpointError:
        return
    assert all(8 + len(raw) <= info.start <= info.end <= 1000 for info in infos.values())

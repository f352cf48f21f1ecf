"""Packing: how much precision it may lose, and what it must keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.transport.codec import BLOCK_ELEMENTS, has_non_finite, is_packable, pack, packed_bytes, unpack
from swarm_plugins.transport.messages import SessionStep
from swarm_plugins.transport.wire import decode, encode

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def tensors(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    def make(num_elements: int, seed: int, exponent: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(num_elements, generator=generator)
        numbers[:: max(1, num_elements // 7)] = 0.0
        return (numbers * 10.0**exponent).clamp(-60000, 60000).to(dtype)

    return st.builds(make, st.integers(1024, 3000), st.integers(0, 2**31), st.floats(-6, 4))


def restore(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    payload = pack(tensor, codec).reshape(-1).view(torch.uint8)  # type: ignore[arg-type]
    assert payload.numel() == packed_bytes(codec, tensor.dtype, tensor.numel())  # type: ignore[arg-type]
    return unpack(payload, codec, tensor.dtype, tensor.numel())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_float16_is_within_half_a_unit_of_half_precision(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = data.draw(tensors(dtype))
    error = (restore(tensor, "float16").double() - tensor.double()).abs()
    # Rounding to 11 bits, then to those of the dtype; below 2**-14 half precision has steps of 2**-24.
    allowed = tensor.double().abs() * (2.0**-11 + UNIT[dtype]) + 2.0**-25
    assert bool((error <= allowed).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_int8_is_within_half_a_step_of_its_block(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = data.draw(tensors(dtype))
    restored = restore(tensor, "int8")
    assert restored.dtype == dtype
    missing = -tensor.numel() % BLOCK_ELEMENTS
    padded = torch.nn.functional.pad(tensor.double(), (0, missing)).view(-1, BLOCK_ELEMENTS)
    step = padded.abs().amax(dim=1, keepdim=True) / 127  # [blocks, 1]
    error = torch.nn.functional.pad((restored.double() - tensor.double()).abs(), (0, missing)).view_as(padded)
    # Half a step, and rounding in float32 and to the dtype; half precision's own steps below 2**-14.
    allowed = step * 0.5 * (1 + 1e-4) + padded.abs() * UNIT[dtype] * 2 + (2.0**-24 if dtype == torch.float16 else 1e-44)
    assert bool((error <= allowed).all())


def test_float16_saturates_instead_of_overflowing() -> None:
    tensor = torch.zeros(1024)
    tensor[:2] = torch.tensor([1e6, -1e6])
    assert restore(tensor, "float16")[:2].tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("codec", ["float16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_stays_visible(codec: str, bad: float) -> None:
    tensor = torch.randn(2000)
    tensor[1500] = bad
    assert has_non_finite(restore(tensor, codec))


def test_zeros_and_subnormal_blocks_stay_finite() -> None:
    tensor = torch.zeros(1024)
    tensor[300] = 1e-44
    assert restore(tensor, "int8").abs().max() <= 1e-43


@pytest.mark.parametrize("codec", ["float16", "int8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtype_and_shape_are_restored(codec: str, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 700).to(dtype)
    received = decode(b"".join(encode(SessionStep(hidden=tensor, cached_tokens=0), codec=codec)))  # type: ignore[arg-type]
    assert isinstance(received, SessionStep)
    assert received.hidden.dtype == dtype
    assert received.hidden.shape == tensor.shape
    # Loose on purpose (the bounds are above): numbers up to 4 in steps of 4 / 254.
    assert torch.allclose(received.hidden.float(), tensor.float(), atol=0.04)


@pytest.mark.parametrize(
    ("dtype", "num_elements", "expected"),
    [
        (torch.float32, 1024, True),
        (torch.float32, 1023, False),
        (torch.bfloat16, 5000, True),
        (torch.int64, 5000, False),
        (torch.bool, 5000, False),
    ],
    ids=str,
)
def test_only_large_floating_tensors_are_packed(dtype: torch.dtype, num_elements: int, expected: bool) -> None:
    assert is_packable(dtype, num_elements) is expected


def test_a_payload_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="1039 bytes for 1024 elements packed by int8, expected 1040"):
        unpack(torch.zeros(1039, dtype=torch.uint8), "int8", torch.float32, 1024)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        pytest.param(torch.randn(100), False, id="finite"),
        pytest.param(torch.full((100,), 3e38), False, id="sum-overflows"),
        pytest.param(torch.tensor([1.0, float("nan")]), True, id="nan"),
        pytest.param(torch.tensor([float("inf"), float("-inf")]), True, id="inf"),
        pytest.param(torch.full((70000,), 65504.0, dtype=torch.float16), False, id="half"),
        pytest.param(torch.tensor([1, 2]), False, id="integers"),
        pytest.param(torch.empty(0), False, id="empty"),
    ],
)
def test_non_finite_numbers_are_found(tensor: torch.Tensor, expected: bool) -> None:
    assert has_non_finite(tensor) is expected

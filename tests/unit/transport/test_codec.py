"""Packing: how much precision it may lose, and what it must keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.transport import codec as codecs
from swarm_plugins.transport.codec import BLOCK_ELEMENTS, has_non_finite, is_packable, pack, packed_bytes, unpack
from swarm_plugins.transport.messages import Codec, ForwardRequest, SessionStep
from swarm_plugins.transport.wire import decode, encode

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
PACKED: list[Codec] = ["float16", "bfloat16", "rotated8"]


def tensors(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    def make(num_elements: int, seed: int, exponent: float, outlier: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(num_elements, generator=generator)
        numbers[:: max(1, num_elements // 7)] = 0.0
        numbers[:: max(1, num_elements // 11)] *= outlier
        return (numbers * 10.0**exponent).clamp(-60000, 60000).to(dtype)

    return st.builds(make, st.integers(1024, 3000), st.integers(0, 2**31), st.floats(-6, 4), st.floats(1, 1000))


def packed_of(tensor: torch.Tensor, codec: Codec) -> torch.Tensor:
    packed = pack(tensor, codec)
    assert packed is not None
    payload = packed.reshape(-1).view(torch.uint8)
    assert payload.numel() == packed_bytes(codec, tensor.dtype, tensor.numel())
    return payload


def restore(tensor: torch.Tensor, codec: Codec) -> torch.Tensor:
    if tensor.dtype == torch.float16 and pack(tensor, codec) is None:
        # Subnormal numbers, whose own steps are as wide as those of their block: they travel unpacked.
        assert tensor.float().abs().median() < 1e-4
        return tensor
    return unpack(packed_of(tensor, codec), codec, tensor.dtype, tensor.numel())


def received(tensor: torch.Tensor, codec: Codec) -> torch.Tensor:
    message = decode(b"".join(encode(SessionStep(hidden=tensor, cached_tokens=0), codec=codec)))
    assert isinstance(message, SessionStep)
    return message.hidden


def blocks_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole blocks, ``[blocks, 64]``."""
    return tensor[: tensor.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS].view(-1, BLOCK_ELEMENTS)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_float16_is_within_half_a_unit_of_half_precision(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = data.draw(tensors(dtype))
    error = (restore(tensor, "float16").double() - tensor.double()).abs()
    # Rounding to 11 bits, then to those of the dtype; below 2**-14 half precision has steps of 2**-24.
    allowed = tensor.double().abs() * (2.0**-11 + UNIT[dtype]) + 2.0**-25
    assert bool((error <= allowed).all())


@settings(max_examples=20, deadline=None)
@given(tensor=tensors(torch.float32))
def test_bfloat16_is_within_half_a_unit(tensor: torch.Tensor) -> None:
    error = (restore(tensor, "bfloat16").double() - tensor.double()).abs()
    assert bool((error <= tensor.double().abs() * 2.0**-8).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rotated8_is_within_half_a_step_of_each_rotated_number(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = data.draw(tensors(dtype))
    restored = restore(tensor, "rotated8")
    assert restored.dtype == dtype
    num_whole = tensor.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    assert restored[num_whole:].equal(tensor[num_whole:])
    error = (blocks_of(restored).double() - blocks_of(tensor).double()).norm(dim=1)
    # 128 errors of at most half a step, rotated back: 64 steps, each at most the norm over sqrt(128) 127, and rounded.
    # Types of 16 bits round the result, and may do so twice; an outlier has 8 bits, or two more steps of them.
    allowed = blocks_of(tensor).double().norm(dim=1) * (64 / (128**0.5 * 127) * 1.01 + 2 * UNIT[dtype] + 2.0**-6)
    allowed += 2.0**-21
    assert bool((error <= allowed).all())


@pytest.mark.parametrize("codec", PACKED)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_was_unpacked_packs_to_the_same_bytes(codec: Codec, dtype: torch.dtype, data: st.DataObject) -> None:
    # Receipts are for packed answers, and a server's output reaches the next one by two ways.
    tensor = data.draw(tensors(dtype))
    once = b"".join(encode(SessionStep(hidden=tensor, cached_tokens=0), codec=codec))
    arrived = decode(once)
    assert b"".join(encode(arrived, codec=codec)) == once


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_odd_blocks_pack_to_the_same_bytes_again(dtype: torch.dtype) -> None:
    """Outliers that hardly are some, few numbers among zeros of both signs, and whole numbers: many ties."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2000, BLOCK_ELEMENTS, generator=generator)
    border, few = normal.clone(), normal * (torch.rand(normal.shape, generator=generator) < 0.03)
    border[:, 5] = border.abs().amax(dim=1) * (2 + 0.02 * normal[:, 0])
    whole = torch.randint(-3, 4, normal.shape, generator=generator).float()
    for blocks in (border, few, whole, 3 + 0.01 * normal, torch.zeros_like(normal).neg()):
        payload = packed_of(blocks.to(dtype).view(-1), "rotated8")
        restored = unpack(payload, "rotated8", dtype, blocks.numel())
        assert packed_of(restored, "rotated8").equal(payload)


def test_rotated8_takes_five_bytes_more_for_128_numbers() -> None:
    for shape in ((1, 512, 576), (4, 7, 4096), (2, 16, 128)):
        for dtype in FLOATS:
            tensor = torch.randn(shape).to(dtype)
            assert packed_of(tensor, "rotated8").numel() <= 1.04 * tensor.numel()


def test_rotated8_keeps_the_neighbors_of_an_outlier() -> None:
    tensor = torch.randn(64 * 128, generator=torch.Generator().manual_seed(0))
    for place in (17, 40, 80):
        outliers = blocks_of(tensor)[:, place]
        outliers *= 200
        error = blocks_of(restore(tensor, "rotated8") - tensor)
        # In steps of their own block the others would be lost: 600 / 127 is more than any of them.
        assert float(error.norm() / tensor.norm()) < 0.006
        others = torch.cat([error[:, :17], error[:, 18:40], error[:, 41:80], error[:, 81:]], dim=1)
        assert float(others.abs().max()) < (0.05 if place == 17 else 3.0)


def test_rotated8_does_not_depend_on_what_is_packed_together() -> None:
    rows = torch.randn(5, 4096)
    together = restore(rows.view(-1), "rotated8").view_as(rows)
    for row, expected in zip(rows, together, strict=True):
        assert restore(row, "rotated8").equal(expected)
    wide = torch.randn(128 * codecs._BLOCKS_AT_ONCE + 128 * 100 + 5)
    assert restore(wide, "rotated8")[:4096].equal(restore(wide[:4096], "rotated8"))
    assert restore(wide, "rotated8")[-5 - 4096 :].equal(restore(wide[-5 - 4096 :], "rotated8"))


def test_rotated8_is_the_same_under_autocast_and_fast_products() -> None:
    tensor = torch.randn(4096)
    payload, expected = packed_of(tensor, "rotated8"), restore(tensor, "rotated8")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert packed_of(tensor, "rotated8").equal(payload)
            assert restore(tensor, "rotated8").equal(expected)
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_tensor_that_moves_each_time_travels_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1, 16, 128).to(torch.bfloat16)
    monkeypatch.setattr(codecs, "_MOST_TRIES", 0)
    assert pack(tensor, "rotated8") is None
    assert received(tensor, "rotated8").equal(tensor)


@pytest.mark.parametrize("codec", ["float16", "bfloat16"])
def test_16_bits_saturate_instead_of_overflowing(codec: Codec) -> None:
    most = float(torch.finfo(torch.float16 if codec == "float16" else torch.bfloat16).max)
    tensor = torch.zeros(1024)
    tensor[:2] = torch.tensor([3.4e38, -3.4e38])
    assert restore(tensor, codec)[:2].tolist() == [most, -most]


def test_bfloat16_saturates_in_float16() -> None:
    packed = pack(torch.full((1024,), 1e6, dtype=torch.bfloat16), "float16")
    assert packed is not None
    assert packed.view(torch.float16).unique().tolist() == [65504.0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_numbers_stay_finite_in_8_bits(dtype: torch.dtype) -> None:
    most = float(torch.finfo(dtype).max)
    for values in (torch.full((1024,), most), most * torch.rand(1024).round() * torch.randn(1024).sign()):
        tensor = values.clamp(-most, most).to(dtype)
        restored = received(tensor.view(1, 8, 128), "rotated8").view(-1)
        assert not has_non_finite(restored)
        assert bool(((restored.double() - tensor.double()).abs() <= 0.25 * most).all())


@pytest.mark.parametrize("codec", PACKED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [1500, 1999])
def test_a_number_that_is_not_finite_stays_visible(codec: Codec, bad: float, at: int) -> None:
    tensor = torch.randn(2000)
    tensor[at] = bad
    restored = restore(tensor, codec)
    assert has_non_finite(restored)
    assert not has_non_finite(restored[:1408])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_and_subnormal_blocks_stay_finite(dtype: torch.dtype) -> None:
    tensor = torch.zeros(1024, dtype=dtype)
    assert restore(tensor, "rotated8").equal(tensor)
    tensor[300] = torch.finfo(dtype).smallest_normal / 4
    assert restore(tensor, "rotated8").abs().max() <= 2 * tensor.max()


@pytest.mark.parametrize("codec", PACKED)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 700), (2, 5, 576), (1, 1, 1024)], ids=str)
def test_dtype_and_shape_are_restored(codec: Codec, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    arrived = received(tensor, codec)
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    # Loose on purpose (the bounds are above): numbers up to 4.
    assert torch.allclose(arrived.float(), tensor.float(), atol=0.1)


@pytest.mark.parametrize("codec", PACKED)
def test_only_floating_tensors_are_touched(codec: Codec) -> None:
    prefix = tuple(torch.randn(1, 2, 9, 128) for _ in range(2))
    request = ForwardRequest(
        version="v",
        start=0,
        end=1,
        hidden=torch.empty(1, 0, 4096),
        position_ids=torch.arange(4096)[None],
        attention_mask=torch.rand(1, 4096) > 0.5,
        prefix=prefix,
    )
    arrived = decode(b"".join(encode(request, codec=codec)))
    assert isinstance(arrived, ForwardRequest)
    assert arrived.hidden.shape == (1, 0, 4096)
    for name in ("position_ids", "attention_mask"):
        assert getattr(arrived, name).equal(getattr(request, name))
    for sent, got in zip(prefix, arrived.prefix, strict=True):
        assert got.shape == sent.shape
        assert float((got - sent).norm() / sent.norm()) < 0.01


@pytest.mark.parametrize(
    ("codec", "dtype", "num_elements", "expected"),
    [
        ("rotated8", torch.float32, 1024, True),
        ("rotated8", torch.float32, 1023, False),
        ("rotated8", torch.bfloat16, 5000, True),
        ("rotated8", torch.int64, 5000, False),
        ("float16", torch.bool, 5000, False),
        ("bfloat16", torch.float32, 1024, True),
        ("bfloat16", torch.float16, 5000, False),
    ],
    ids=str,
)
def test_only_large_floating_tensors_are_packed(
    codec: Codec, dtype: torch.dtype, num_elements: int, expected: bool
) -> None:
    assert is_packable(codec, dtype, num_elements) is expected


def test_a_payload_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="1063 bytes for 1024 elements packed by rotated8, expected 1064"):
        unpack(torch.zeros(1063, dtype=torch.uint8), "rotated8", torch.float32, 1024)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_bytes_of_the_right_size_are_numbers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for num_elements in (1024, 1087, 5000):
        size = packed_bytes("rotated8", dtype, num_elements)
        payload = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        found = unpack(payload, "rotated8", dtype, num_elements)
        assert (found.dtype, found.numel()) == (dtype, num_elements)
        packed_again = pack(found, "rotated8")
        assert packed_again is None or packed_again.numel() == size


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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rotated8_does_not_depend_on_the_default_type(dtype: torch.dtype, default_bfloat16: None) -> None:
    tensor = torch.randn(3, 700, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
    packed = packed_of(tensor, "rotated8")
    torch.set_default_dtype(torch.float32)
    assert packed.equal(packed_of(tensor, "rotated8"))
    whole = unpack(packed, "rotated8", dtype, tensor.numel())
    torch.set_default_dtype(torch.bfloat16)
    assert whole.equal(unpack(packed, "rotated8", dtype, tensor.numel()))
    assert codecs._hadamard().dtype == torch.float32

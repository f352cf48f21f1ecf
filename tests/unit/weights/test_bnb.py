"""The bytes and the numbers of bitsandbytes, called where its kernels run and in the order of the streams."""

from __future__ import annotations

import logging
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor

from swarm_plugins.weights import bnb
from swarm_plugins.weights.formats import nf4
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.formats.nf4 import Nf4Format
from swarm_plugins.weights.kernel import multiply
from swarm_plugins.weights.kernels import int8
from swarm_plugins.weights.kernels.int8 import Int8Kernel, int8_product
from swarm_plugins.weights.kernels.nf4 import Nf4Kernel

THEIRS: Any = bitsandbytes.nn
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear_4bit(weight: Tensor) -> Any:
    rows, columns = weight.shape
    made = THEIRS.Linear4bit(columns, rows, bias=False, quant_type="nf4", compress_statistics=False)
    made.weight = THEIRS.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=False)
    # It would re-pack its weight for bfloat16 on some CPUs.
    made.support_avx512bf16_for_cpu = False
    return made.to("cpu")


@FLOATS
def test_codes_scales_and_products_are_those_of_linear4bit(dtype: torch.dtype) -> None:
    weight, rows = seeded(70, 128).to(dtype), seeded(5, 128, seed=1).to(dtype)
    theirs, matrix = linear_4bit(weight), Nf4Kernel(Nf4Format((70, 128)))
    ours = matrix.format.quantize(weight, is_fitted=True)
    assert torch.equal(ours["codes"].flatten(), theirs.weight.data.flatten())
    assert torch.equal(ours["scales"].flatten(), theirs.weight.quant_state.absmax)
    assert torch.equal(matrix.product(ours, rows), theirs(rows))


@pytest.mark.parametrize("columns", [1, 31, 64, 65, 130])
def test_scales_belong_to_one_row_whatever_the_width(columns: int) -> None:
    weight = seeded(6, columns)
    matrix = Nf4Kernel(Nf4Format((6, columns)))
    whole = matrix.widen(matrix.format.quantize(weight, is_fitted=True), torch.float32)
    for index in range(6):
        row = Nf4Kernel(Nf4Format((1, columns)))
        alone = row.widen(row.format.quantize(weight[index : index + 1], is_fitted=True), torch.float32)
        assert torch.equal(alone, whole[index : index + 1])


def test_a_weight_in_pieces_is_the_weight_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, matrix = seeded(9, 100), Nf4Kernel(Nf4Format((9, 100)))
    whole = matrix.format.quantize(weight, is_fitted=True)
    monkeypatch.setattr(nf4, "_CHUNK_WEIGHTS", 300)
    pieces = matrix.format.quantize(weight, is_fitted=True)
    assert all(torch.equal(pieces[name], whole[name]) for name in whole)


def test_transposed_and_double_weights_are_taken() -> None:
    weight, matrix = seeded(64, 6), Nf4Kernel(Nf4Format((6, 64)))
    straight = matrix.format.quantize(weight.T.contiguous(), is_fitted=True)
    for other in (weight.T, weight.T.double()):
        assert torch.equal(matrix.format.quantize(other, is_fitted=True)["codes"], straight["codes"])
    assert matrix.product(straight, seeded(2, 64).double()).dtype == torch.float64


def test_a_weight_lies_between_the_levels_beside_it() -> None:
    weight, matrix = seeded(32, 64), Nf4Kernel(Nf4Format((32, 64)))
    parts = matrix.format.quantize(weight, is_fitted=True)
    steps = weight / parts["scales"]
    found = matrix.widen(parts, torch.float32) / parts["scales"]
    # The widest gap between two levels is that from -1 to -0.696.
    assert float((steps - found).abs().max()) <= 0.1525


@FLOATS
def test_the_8_bit_product_of_cuda_computes_what_ours_does(dtype: torch.dtype) -> None:
    weight, rows = seeded(48, 96), seeded(7, 96, seed=1).to(dtype)
    matrix = Int8Kernel(Int8Format((48, 96)))
    parts = matrix.format.quantize(weight, is_fitted=True)
    found = int8_product(parts["codes"], parts["scales"], rows)
    expected = matrix.product(parts, rows.float())
    assert found.dtype == dtype
    # Activations of 8 bits: each is off by up to a 254th of the largest of its row, about a hundredth of its size.
    assert float((found.float() - expected).norm() / expected.norm()) < 0.012


def test_the_8_bit_product_of_cuda_keeps_the_digits_of_outliers() -> None:
    weight, rows = seeded(48, 96), seeded(7, 96, seed=1)
    rows[2, 5] = 300.0
    matrix = Int8Kernel(Int8Format((48, 96)))
    parts = matrix.format.quantize(weight, is_fitted=True)
    found, expected = int8_product(parts["codes"], parts["scales"], rows), matrix.product(parts, rows)
    # If the outlier set the scale of its row, the other activations would be off by more than themselves.
    assert float((found - expected)[2].norm() / matrix.product(parts, rows.clamp(max=6.0))[2].norm()) < 0.012


@FLOATS
def test_the_8_bit_product_of_cuda_is_that_of_linear8bitlt(dtype: torch.dtype) -> None:
    weight, rows = seeded(48, 96).half().float(), seeded(7, 96, seed=1).to(dtype)
    rows[3, 7] = 20.0
    theirs = THEIRS.Linear8bitLt(96, 48, bias=False, has_fp16_weights=False, threshold=6.0)
    theirs.weight = THEIRS.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    theirs = theirs.to("cpu").eval()
    ours = Int8Format((48, 96)).quantize(weight, is_fitted=True)
    expected = theirs(rows)
    # A weight in the middle between two codes may go either way.
    assert int((ours["codes"].int() - theirs.state.CB.int()).abs().sum()) <= 5
    # Their scale is the largest weight, ours a 127th of it: the same but for the last digit of float32.
    torch.testing.assert_close(ours["scales"] * 127, theirs.state.SCB, rtol=3e-7, atol=0)
    # That digit moves a result to the next number of its type at most.
    digit = torch.finfo(dtype).eps
    torch.testing.assert_close(
        int8_product(theirs.state.CB, ours["scales"], rows), expected, rtol=2 * digit, atol=digit
    )


def test_the_8_bit_product_of_cuda_says_nothing_and_takes_no_rows(caplog: pytest.LogCaptureFixture) -> None:
    parts = Int8Format((48, 96)).quantize(seeded(48, 96), is_fitted=True)
    with caplog.at_level(logging.WARNING):
        int8_product(parts["codes"], parts["scales"], seeded(2, 96).bfloat16())
        assert int8_product(parts["codes"], parts["scales"], seeded(0, 96)).shape == (0, 48)
    assert not caplog.records


def test_what_it_does_on_the_default_stream_is_between_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("default"))
    with bnb.default_stream(torch.device("cuda")):
        events.append("quantizes")
    assert events == ["default waits for current", "quantizes", "current waits for default"]


@pytest.mark.parametrize(("capability", "expected"), [((7, 0), False), ((7, 5), True), ((9, 0), True)])
def test_8_bits_are_its_own_from_turing_on(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert int8.has_int8_product(torch.device("cuda")) is expected
    assert int8.has_int8_product(torch.device("cpu")) is False


def test_where_its_8_bit_product_is_used_gradients_are_still_those_of_the_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int8, "has_int8_product", lambda device: True)
    torch.manual_seed(0)
    matrix = Int8Kernel(Int8Format((70, 96)))
    parts = matrix.format.quantize(torch.randn(70, 96), is_fitted=True)
    rows = torch.randn(4, 96)
    rows[1, 3] = 30.0
    kept = rows.clone()
    rows.requires_grad_()
    found = multiply(matrix, parts, rows)
    assert torch.equal(found, int8_product(parts["codes"], parts["scales"], rows.detach()))
    found.backward(torch.ones(4, 70))
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, torch.ones(4, 70) @ matrix.widen(parts, torch.float32))
    assert torch.equal(rows, kept)

"""Weights in few bits: how far they are from the weight, and that every way to multiply agrees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from swarm_plugins.weights.choice import format_of, kernel_for
from swarm_plugins.weights.formats import int8 as int8_format
from swarm_plugins.weights.formats.groups import GroupedFormat, fold, from_tiles, to_tiles, unfold
from swarm_plugins.weights.kernel import Kernel, multiply
from swarm_plugins.weights.kernels import int4pack, int8
from swarm_plugins.weights.kernels.int4pack import Int4PackKernel
from swarm_plugins.weights.kernels.widening import WideningKernel
from swarm_plugins.weights.stored import QuantizingFormat
from swarm_plugins.weights.widths import GROUP_SIZES, Width, num_bits, stored_bits

CPU = torch.device("cpu")
WIDTHS: list[Width] = [8, 4, "nf4", 3, 2, "4dq", "3dq", "2dq"]
GROUPED: list[Width] = [4, 3, 2, "4dq", "3dq", "2dq"]
# Of normally distributed weights; rounding to the nearest 4-bit grid of 64 gives 0.09, 3 bits 0.19, 2 bits of 32 0.39.
FITTED_ERROR: dict[Width, float] = {
    8: 0.01, 4: 0.088, "nf4": 0.1, 3: 0.175, 2: 0.31, "4dq": 0.088, "3dq": 0.175, "2dq": 0.275
}  # fmt: skip
ROUNDED_ERROR: dict[Width, float] = {
    8: 0.01, 4: 0.095, "nf4": 0.1, 3: 0.2, 2: 0.41, "4dq": 0.095, "3dq": 0.2, "2dq": 0.33
}  # fmt: skip
# The 4-bit product rounds activations and results to bfloat16: 8 binary digits each.
BFLOAT16 = 5e-3
SHAPES = [(1, 1), (3, 70), (64, 64), (65, 31), (192, 160)]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def grouped(shape: tuple[int, int], bits: Width) -> GroupedFormat:
    found = format_of(shape, bits)
    assert isinstance(found, GroupedFormat)
    return found


def computed(matrix: Kernel, weight: Tensor, *, is_fitted: bool = True) -> dict[str, Tensor]:
    assert isinstance(matrix.format, QuantizingFormat)
    parts = {part.name: torch.empty(part.shape, dtype=part.dtype) for part in matrix.computed}
    matrix.convert(matrix.format.quantize(weight, is_fitted=is_fitted), parts)
    return parts


@pytest.mark.parametrize("is_fitted", [False, True], ids=["rounded", "fitted"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_errors_are_those_of_the_width(bits: Width, is_fitted: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(192, 256) * 0.05
    matrix = kernel_for(format_of((192, 256), bits), CPU)
    found = matrix.widen(computed(matrix, weight, is_fitted=is_fitted), torch.float32)
    limit = (FITTED_ERROR if is_fitted else ROUNDED_ERROR)[bits]
    assert limit / 2 < relative(found, weight) < limit


@pytest.mark.parametrize("bits", WIDTHS)
def test_bits_of_a_weight_are_bytes_over_weights(bits: Width) -> None:
    rows, columns = 256, 2048
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    parts = format_of((rows, columns), bits).quantize(weight, is_fitted=False)
    row_scales = 4 * rows if bits == 8 else 0
    assert 8 * (sum(part.nbytes for part in parts.values()) - row_scales) / weight.numel() == stored_bits(bits)


class _Floats(TorchDispatchMode):
    """Notes the most floating numbers that an operation returns, other than views."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and not func.is_view:
            self.most = max(self.most, result.numel())
        return result


def test_8_bits_widen_few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(65, 31, dtype=torch.bfloat16)
    weight[7] = 0
    stored = format_of((65, 31), 8)
    whole = stored.quantize(weight, is_fitted=False)
    monkeypatch.setattr(int8_format, "_CHUNK_WEIGHTS", 100)
    with _Floats() as made:
        parts = stored.quantize(weight, is_fitted=False)
    assert all(torch.equal(parts[name], one) for name, one in whole.items())
    assert 0 < made.most <= 100


def half_quadratic(weight: Tensor, levels: int, group: int) -> Tensor:
    """Rounds as Badri and Shaji (2023) do: grids by min and max, zero points by half-quadratic splitting, p = 0.7."""
    groups = weight.reshape(-1, group)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale, beta = (levels - 1) / (high - low), 10.0
    zero = -low * scale
    for _ in range(20):
        codes = (groups * scale + zero).round().clamp(0, levels - 1)
        error = groups - (codes - zero) / scale
        shrunk = error.sign() * (error.abs() - error.abs().clamp(min=1e-9) ** -0.3 / beta).relu()
        zero = (codes - (groups - shrunk) * scale).mean(1, keepdim=True)
        beta *= 1.01
    codes = (groups * scale + zero).round().clamp(0, levels - 1)
    return ((codes - zero) / scale).view_as(weight)


@pytest.mark.parametrize(("bits", "group"), [("4dq", 64), ("3dq", 64), ("2dq", 16)])
def test_groups_with_quantized_scales_err_less_than_half_quadratic_ones_without(bits: Width, group: int) -> None:
    torch.manual_seed(0)
    # Heavier tails than normal, and rows of different sizes, as trained weights have them.
    weight = torch.randn(256, 512) * torch.rand(256, 1).add(0.5) * torch.rand(256, 512).add(0.5)
    stored = format_of((256, 512), bits)
    found = stored.widen(stored.quantize(weight, is_fitted=True), torch.float32)
    assert relative(found, weight) < 0.99 * relative(half_quadratic(weight, 1 << num_bits(bits), group), weight)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", WIDTHS)
def test_products_are_those_of_the_widened_weight(bits: Width, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    weight, rows = torch.randn(shape), torch.randn(5, shape[1])
    matrix = kernel_for(format_of(shape, bits), CPU)
    parts = computed(matrix, weight)
    expected = functional.linear(rows, matrix.widen(parts, torch.float32))
    # 16 bits of activations with 8-bit weights.
    assert relative(matrix.product(parts, rows), expected) < (1e-4 if bits == 8 else BFLOAT16)
    assert matrix.product(parts, rows[:0]).shape == (0, shape[0])
    assert matrix.product(parts, rows.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", GROUPED)
def test_stored_and_converted_parts_are_the_same_weight(bits: Width, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    here, elsewhere = Int4PackKernel(grouped(shape, bits)), WideningKernel(grouped(shape, bits))
    stored = here.format.quantize(weight, is_fitted=True)
    assert {name: (one.dtype, tuple(one.shape)) for name, one in stored.items()} == {
        part.name: (part.dtype, part.shape) for part in here.format.parts
    }
    wide = elsewhere.widen(stored, torch.float32)
    # A CPU without AVX-512 has an order of its own, and widens by a product with bfloat16 results.
    digits = {"rtol": BFLOAT16, "atol": 1e-6} if here.is_converted else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(here.widen(computed(here, weight), torch.float32), wide, **digits)
    rows = torch.randn(3, shape[1])
    assert torch.equal(elsewhere.product(stored, rows), functional.linear(rows, wide))


@pytest.mark.parametrize("bits", [bits for bits in GROUPED if bits != "2dq"])
def test_a_cpu_with_another_order_of_codes_computes_the_same(bits: Width, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = torch.randn(70, 96), torch.randn(3, 96)
    matrix = Int4PackKernel(grouped((70, 96), bits))
    parts = computed(matrix, weight)
    expected, wide = matrix.product(parts, rows), matrix.widen(parts, torch.float32)
    monkeypatch.setattr(int4pack, "is_native_order", lambda: False)
    assert matrix.is_converted
    parts = computed(matrix, weight)
    assert torch.equal(matrix.product(parts, rows), expected)
    # It is widened by a product with bfloat16 results, whatever the default device.
    with torch.device("meta"):
        widened = matrix.widen(parts, torch.float32)
    torch.testing.assert_close(widened, wide, rtol=BFLOAT16, atol=1e-6)


def test_a_cpu_with_another_order_of_codes_widens_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4pack, "is_native_order", lambda: False)
    assert isinstance(kernel_for(format_of((70, 96), "2dq"), CPU), WideningKernel)


@pytest.mark.skipif(
    not int8.HAS_DOT_PRODUCTS, reason="this CPU multiplies 8 bits as floats, whose sums depend on the rows"
)
def test_a_row_of_8_bits_does_not_depend_on_the_other_rows() -> None:
    matrix = kernel_for(format_of((64, 96), 8), CPU)
    parts = computed(matrix, torch.randn(64, 96))
    rows = torch.randn(9, 96)
    together = matrix.product(parts, rows)
    for index in range(9):
        assert torch.equal(matrix.product(parts, rows[index : index + 1]), together[index : index + 1])


def test_outliers_in_activations_cost_8_bit_products_no_digits() -> None:
    torch.manual_seed(3)
    matrix = kernel_for(format_of((64, 96), 8), CPU)
    parts = computed(matrix, torch.randn(64, 96))
    rows = torch.randn(2, 96)
    rows[:, 5] = 100.0
    expected = functional.linear(rows, matrix.widen(parts, torch.float32))
    assert relative(matrix.product(parts, rows), expected) < 1e-4


def test_without_integer_dot_products_8_bits_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = kernel_for(format_of((64, 96), 8), CPU)
    parts = computed(matrix, torch.randn(64, 96))
    rows = torch.randn(2, 96)
    expected = matrix.product(parts, rows)
    monkeypatch.setattr("swarm_plugins.weights.kernels.int8.HAS_DOT_PRODUCTS", False)
    assert relative(matrix.product(parts, rows), expected) < 1e-4


@pytest.mark.parametrize("bits", WIDTHS)
def test_gradients_of_rows_are_those_of_the_widened_weight_and_nothing_wide_is_kept(bits: Width) -> None:
    matrix = kernel_for(format_of((70, 96), bits), CPU)
    parts = computed(matrix, torch.randn(70, 96))
    rows = torch.randn(4, 96, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.numel()) or one, lambda one: one):
        result = multiply(matrix, parts, rows)
    assert sum(kept) == 0
    grad = torch.randn(4, 70)
    result.backward(grad)
    assert rows.grad is not None
    assert relative(rows.grad, grad @ matrix.widen(parts, torch.float32)) < 1e-6


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(torch.zeros(3, 70), id="zero"),
        pytest.param(torch.full((3, 70), 0.7), id="constant"),
        pytest.param(torch.full((3, 70), -1e-30), id="tiny"),
        pytest.param(torch.full((3, 70), 1e30), id="huge"),
        pytest.param(torch.tensor([[0.0] * 69 + [5.0]]).repeat(3, 1), id="one-outlier"),
        pytest.param(torch.linspace(5.0, 6.0, 210).reshape(3, 70), id="far-from-zero"),
    ],
)
def test_degenerate_weights_stay_near_themselves(bits: Width, weight: Tensor) -> None:
    matrix = kernel_for(format_of((3, 70), bits), CPU)
    found = matrix.widen(computed(matrix, weight), torch.float32)
    # A group far from zero loses the digits that bfloat16 cannot hold. nf4 has no offset: its highest levels are 0.28
    # apart. Zero points do not reach as far as one of the groups is from zero.
    allowed = {"nf4": 0.14, "4dq": 0.03, "3dq": 0.03, "2dq": 0.03}.get(str(bits), 0.01)
    assert float((found - weight).abs().max()) <= allowed * float(weight.abs().max())


@settings(deadline=None, max_examples=40)
@given(
    bits=st.sampled_from([8, 4, 3, 2]),
    shape=st.tuples(st.integers(1, 130), st.integers(1, 130)),
    seed=st.integers(0, 1000),
    size=st.floats(1e-6, 1e6),
)
def test_no_weight_is_further_off_than_the_step_of_its_group(
    bits: int, shape: tuple[int, int], seed: int, size: float
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    matrix = kernel_for(format_of(shape, bits), CPU)
    found = matrix.widen(computed(matrix, weight, is_fitted=False), torch.float32)
    columns = shape[1] if bits == 8 else GROUP_SIZES[bits]
    for start in range(0, shape[1], columns):
        group = weight[:, start : start + columns]
        step = group.abs().amax(1) / 127 if bits == 8 else (group.amax(1) - group.amin(1)) / ((1 << bits) - 1)
        # Half a step, and what scale and offset lose as bfloat16.
        allowed = step * 0.51 + group.abs().amax(1) * 0.04
        assert bool(((found[:, start : start + columns] - group).abs() <= allowed.unsqueeze(1)).all())


@settings(deadline=None, max_examples=40)
@given(
    bits=st.sampled_from([4, 3, 2]),
    tiles=st.integers(1, 3),
    columns=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_codes_come_back_from_tiles_and_folds(bits: int, tiles: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (64 * tiles, columns), generator=generator, dtype=torch.uint8)
    folded = fold(to_tiles(codes), bits)
    assert folded.numel() * 8 == codes.numel() * bits
    assert torch.equal(from_tiles(unfold(folded, bits)), codes)

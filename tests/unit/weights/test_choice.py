"""Kernels between which a CPU has a choice: that each keeps its type's promise, and how one is chosen."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.weights import heads, trial
from swarm_plugins.weights.choice import candidates, kernel_for
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.formats.nf4 import Nf4Format
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.kernel import multiply
from swarm_plugins.weights.kernels.fp16 import Fp16Kernel
from swarm_plugins.weights.kernels.plain import PlainKernel, has_own_bfloat16, product_of_few
from swarm_plugins.weights.linears import PackedLinear, arranged, packed, wide_weight
from swarm_plugins.weights.names import GEMV, HALVES, PLAIN
from swarm_plugins.weights.plain_linears import CopiedLinear, FewRowsLinear, has_plain_weight
from swarm_plugins.weights.stored import QuantizingFormat
from swarm_plugins.weights.trial import Trial, check, chosen, most_error, try_out

CPU = torch.device("cpu")
SHAPES = [(1, 3), (70, 31), (192, 160)]


def formats(shape: tuple[int, int]) -> list[QuantizingFormat]:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return [Int8Format(shape), *(PlainFormat(shape, dtype) for dtype in floats)]


CASES = [(one, name) for shape in SHAPES for one in formats(shape) for name in candidates(one)]
IDS = [f"{name}-{one}" for one, name in CASES]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def rows_for(stored: QuantizingFormat, count: int) -> Tensor:
    rows = torch.randn(count, stored.shape[1], generator=torch.Generator().manual_seed(count))
    return rows.to(stored.dtype if isinstance(stored, PlainFormat) else torch.float32)


def parts_of(stored: QuantizingFormat) -> dict[str, Tensor]:
    weight = torch.randn(stored.shape, generator=torch.Generator().manual_seed(0)) * 0.05
    return stored.quantize(weight, is_fitted=False)


@pytest.mark.parametrize(("stored", "name"), CASES, ids=IDS)
def test_products_and_gradients_are_those_of_the_widened_weight(stored: QuantizingFormat, name: str) -> None:
    kernel, parts = kernel_for(stored, CPU, name), parts_of(stored)
    prepared = kernel.prepare(parts)
    wide = kernel.widen(prepared, torch.float32)
    assert relative(wide, stored.widen(parts, torch.float32)) < 1e-6
    for count in (1, 2, 3, 5, 64):
        rows = rows_for(stored, count)
        with torch.no_grad():
            found = kernel.product(prepared, rows)
        assert found.dtype == rows.dtype
        assert relative(found, functional.linear(rows.float(), wide)) <= most_error(stored)
    rows = rows_for(stored, 5).requires_grad_()
    grad = torch.randn(5, stored.shape[0]).to(rows.dtype)
    multiply(kernel, prepared, rows).backward(grad)
    assert rows.grad is not None
    assert relative(rows.grad, grad.float() @ wide) <= most_error(stored)
    assert kernel.product(prepared, rows_for(stored, 5)[:0]).shape == (0, stored.shape[0])


@pytest.mark.parametrize(("stored", "name"), CASES, ids=IDS)
def test_no_kernel_mixes_rows_of_a_batch(stored: QuantizingFormat, name: str) -> None:
    kernel = kernel_for(stored, CPU, name)
    parts = kernel.prepare(parts_of(stored))
    rows = rows_for(stored, 9)
    with torch.no_grad():
        alone = kernel.product(parts, rows[:1])
        rows[1:] *= 1000  # scales and rounding of others
        among = kernel.product(parts, rows)[:1]
    if kernel.is_opaque or isinstance(stored, Int8Format):
        assert torch.equal(alone, among)
    else:  # torch's own products differ in the order of sums
        torch.testing.assert_close(among, alone, rtol=1e-2 if rows.dtype != torch.float32 else 1e-4, atol=1e-4)


def test_rows_of_zeros_stay_zeros() -> None:
    stored = Int8Format((64, 96))
    for name in candidates(stored):
        kernel = kernel_for(stored, CPU, name)
        parts = kernel.prepare(stored.quantize(torch.zeros(64, 96), is_fitted=False))
        assert not kernel.product(parts, torch.zeros(2, 96)).any()
        assert not kernel.product(parts, torch.ones(2, 96)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_keeps_its_weight_bias_and_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for name in candidates(PlainFormat((64, 96), dtype)):
        linear = nn.Linear(96, 64, dtype=dtype).requires_grad_(False)
        hidden = torch.randn(2, 1, 96, dtype=dtype)
        expected, weight = linear(hidden), linear.weight.detach().clone()
        layer = arranged(linear, name)
        assert isinstance(layer, nn.Linear)
        assert relative(wide_weight(layer).float(), weight.float()) < 1e-6
        with torch.no_grad():
            torch.testing.assert_close(layer(hidden), expected, rtol=2e-2, atol=2e-2 if dtype.itemsize == 2 else 1e-5)
        assert layer.weight.shape == (64, 96)
        assert layer.weight.dtype == dtype
        hidden.requires_grad_()
        layer(hidden).sum().backward()
        assert hidden.grad is not None
        assert relative(hidden.grad[0, 0], weight.float().sum(0)) < 2e-2


@pytest.mark.parametrize("name", candidates(Int8Format((64, 64))))
def test_an_8_bit_layer_takes_every_kernel(name: str) -> None:
    linear = nn.Linear(96, 64)
    layer = packed(linear, 8, kernel=name)
    assert relative(layer(torch.eye(96)).detach(), linear.weight.detach().T + linear.bias.detach()) < 0.01
    assert relative(wide_weight(layer), linear.weight.detach()) < 0.01


def test_a_weight_beyond_the_range_of_float16_stays_as_it_is() -> None:
    stored = PlainFormat((64, 96), torch.bfloat16)
    for factor in (1e6, 1e-8):
        linear = nn.Linear(96, 64, dtype=torch.bfloat16).requires_grad_(False)
        linear.weight.data *= factor
        assert not Fp16Kernel(stored).takes({"codes": linear.weight})
        if "fp16" in candidates(stored):
            assert type(arranged(linear, "fp16")) is nn.Linear


def test_an_arranged_layer_keeps_its_type_and_its_processor() -> None:
    names = [name for name in candidates(PlainFormat((64, 96), torch.bfloat16)) if name not in (PLAIN, GEMV)]
    for name in names:
        layer = arranged(nn.Linear(96, 64, dtype=torch.bfloat16).requires_grad_(False), name)
        assert isinstance(layer, PackedLinear)
        layer.float()
        assert layer.weight_codes.dtype == torch.bfloat16
        assert layer(torch.ones(1, 96)).dtype == torch.float32
        with pytest.raises(UnsupportedError, match="arranged for this CPU"):
            layer.to("meta")


@pytest.mark.skipif(not has_own_bfloat16(), reason="torch has one product of bfloat16")
def test_a_row_of_bfloat16_leaves_onednn_to_others() -> None:
    weight, row = torch.randn(64, 96).bfloat16(), torch.randn(1, 96).bfloat16()
    with torch.no_grad():
        found = product_of_few(row, weight, None)
    assert relative(found.float(), row.float() @ weight.float().T) < 2**-8
    assert torch._C._get_mkldnn_enabled()
    with pytest.raises(RuntimeError):
        product_of_few(row[:, 1:], weight, None)
    assert torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        assert not has_own_bfloat16()
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_a_named_kernel_is_taken_and_an_unknown_one_named() -> None:
    stored = PlainFormat((64, 64), torch.float32)
    assert type(kernel_for(stored, CPU, PLAIN)) is PlainKernel
    with pytest.raises(ConfigError, match=r"kernel 'fbgemm' does not multiply with .*float32.*it has plain, halves"):
        kernel_for(stored, CPU, "fbgemm")
    with pytest.raises(ConfigError, match="no choice of kernels"):
        kernel_for(Nf4Format((64, 64)), CPU, PLAIN)


class _Wrong(PlainKernel):
    def product(self, parts: Any, rows: Tensor) -> Tensor:
        return super().product(parts, rows) * 1.01


class _Broken(PlainKernel):
    def prepare(self, stored: Any) -> dict[str, Any]:
        raise RuntimeError("this processor lacks an instruction")


def test_a_kernel_that_fails_is_dropped_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored = PlainFormat((64, 64), torch.float32)
    found = {"plain": lambda: PlainKernel(stored), "wrong": lambda: _Wrong(stored), "broken": lambda: _Broken(stored)}
    monkeypatch.setattr(trial, "candidates", lambda _: found)
    with caplog.at_level(logging.WARNING):
        assert [one.name for one in try_out([stored, stored])] == ["plain"]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "kernel wrong is not used: its products err by 0.01" in messages[0]
    assert "kernel broken is not used: this processor lacks an instruction" in messages[1]
    with pytest.raises(ValueError, match="1e-05 is allowed"):
        check(stored, _Wrong(stored), parts_of(stored))


def test_trying_out_takes_no_random_numbers() -> None:
    before = torch.get_rng_state()
    assert try_out([PlainFormat((64, 64), torch.float32)], budget_s=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_best_of_both_products_is_chosen_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trials = [Trial("plain", 0.004, 0.016, 0.1), Trial("halves", 0.002, 0.032, 0.1), Trial("onednn", 0.001, 0.032, 0.3)]
    monkeypatch.setattr(trial, "try_out", lambda formats, among: trials)
    large = [PlainFormat((2048, 2048), torch.float32)]
    with caplog.at_level(logging.INFO):
        assert chosen(large, "float32") == HALVES
        assert chosen(large, "head", trains=False) == "onednn"
    assert (
        "kernel of float32 weights: halves; 1/64 rows, and their gradient, took plain 4.000/16.00/100.00 ms, halves"
        in caplog.text
    )
    assert chosen([PlainFormat((64, 64), torch.float32)], "float32") is None
    assert chosen([Nf4Format((2048, 2048))], "nf4") is None
    assert chosen([], "float32") is None


def test_a_head_in_halves_trains_and_stays_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            tie_word_embeddings=True,
        )
    )
    heads.quicken_head(model)
    assert type(model.lm_head) is nn.Linear  # too small to matter
    monkeypatch.setattr(heads, "_fastest", lambda shape, dtype: HALVES)
    hidden = torch.randn(1, 1, 16)
    expected = model.lm_head(hidden)
    heads.quicken_head(model)
    assert type(model.lm_head) is FewRowsLinear
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(hidden), expected)
    model.lm_head(hidden).sum().backward()
    torch.testing.assert_close(model.lm_head.weight.grad, hidden[0].expand(64, 16))


def copied_layer() -> CopiedLinear:
    layer = nn.Linear(96, 64, dtype=torch.bfloat16)
    layer.__class__ = CopiedLinear
    assert isinstance(layer, CopiedLinear)
    return layer


def check_product(layer: CopiedLinear, hidden: Tensor) -> None:
    with torch.no_grad():
        expected = functional.linear(hidden, layer.weight, layer.bias)
        torch.testing.assert_close(layer(hidden), expected, rtol=2e-2, atol=2e-2)


def test_a_copied_weight_follows_its_layer() -> None:
    layer = copied_layer()
    assert has_plain_weight(layer)
    hidden = torch.randn(1, 3, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        for factor in (1, 2, 1e9):  # the last is beyond float16
            layer.weight.mul_(factor)
            check_product(layer, hidden)
        assert layer(hidden[:0]).shape == (0, 3, 64)
    assert "copied" in layer.__dict__
    assert "copied" not in copy.deepcopy(layer).__dict__
    layer(hidden).float().sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("is_merged", [True, False], ids=["merged", "fused step"])
def test_a_copied_weight_follows_changes_that_count_no_version(is_merged: bool) -> None:
    layer, hidden = copied_layer(), torch.ones(1, 3, 96, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    layer(hidden).float().sum().backward()
    check_product(layer, hidden)  # makes a copy
    if is_merged:
        layer.weight.data.add_(1)
    else:
        optimizer.step()
    check_product(layer, hidden)


def test_a_copy_goes_where_its_weight_trains() -> None:
    layer, hidden = copied_layer(), torch.ones(1, 3, 96, dtype=torch.bfloat16)
    layer.requires_grad_(False)
    check_product(layer, hidden)
    layer(hidden)
    is_kept = "copied" in layer.__dict__
    layer.requires_grad_(True)
    layer(hidden)
    assert (is_kept, "copied" in layer.__dict__) == (True, False)


def test_a_weight_of_inference_mode_is_not_copied() -> None:
    with torch.inference_mode():
        layer = copied_layer()
    check_product(layer, torch.randn(1, 3, 96, dtype=torch.bfloat16))
    assert "copied" not in layer.__dict__

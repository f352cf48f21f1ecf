"""Models in few bits against transformers' eager model with the same weights widened: every layout of experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from offload_models import SETTINGS, save_toy, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_plugins import OffloadConfig, load_offloaded
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.moe import EXPERT_PARAMETERS, is_fused_experts
from swarm_plugins.offload.quantizing import quantize_checkpoint
from swarm_plugins.weights.choice import format_of, kernel_for
from swarm_plugins.weights.kernels import int4pack
from swarm_plugins.weights.linears import PackedLinear, quantizable_linears
from swarm_plugins.weights.widths import Width

CPU = torch.device("cpu")
FEW = OffloadConfig(fast_bytes=60_000)
# Logits of about one. 8 bits: activations have 16. Fewer: activations and products are rounded to bfloat16.
FEW_BITS: list[Width] = [4, "nf4", 3, 2, "4dq", "3dq", "2dq"]
LIMITS: dict[Width, float] = {8: 2e-3, **dict.fromkeys(FEW_BITS, 0.1)}


def widened(weight: Tensor, bits: Width, *, is_fitted: bool) -> Tensor:
    matrix = kernel_for(format_of((weight.shape[0], weight.shape[1]), bits), CPU)
    parts = {part.name: torch.empty(part.shape, dtype=part.dtype) for part in matrix.computed}
    matrix.convert(matrix.format.quantize(weight, is_fitted=is_fitted), parts)
    return matrix.widen(parts, torch.float32)


@torch.no_grad()
def reference(
    model: PreTrainedModel, expert_bits: Width, other_bits: Width | None, *, is_fitted: bool
) -> PreTrainedModel:
    """Rounds the weights of a model in place to what a few bits can say."""
    for module in model.modules():
        if is_fused_experts(module):
            for name in EXPERT_PARAMETERS:
                for weight in getattr(module, name, ()):
                    turned = weight.T if module.is_transposed else weight
                    turned.copy_(widened(turned, expert_bits, is_fitted=is_fitted))
    if other_bits is not None:
        for embedding in (one for one in model.modules() if isinstance(one, nn.Embedding)):
            embedding.weight.copy_(embedding.weight.bfloat16())
        for linear in quantizable_linears(model).values():
            linear.weight.copy_(widened(linear.weight, other_bits, is_fitted=is_fitted))
    return model


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids, attention_mask=torch.ones_like(ids)).logits
    return found


@pytest.mark.parametrize("family", sorted(SETTINGS))
def test_a_store_of_8_bits_computes_with_its_rounded_weights(tmp_path: Path, family: str) -> None:
    plain = save_toy(family, tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "q", expert_bits=8, other_bits=8, progress=False)
    model = load_offloaded(tmp_path / "q", FEW, device="cpu")
    assert type(model) is type(plain)
    ids = tokens()
    expected = logits(reference(plain, 8, 8, is_fitted=True), ids)
    assert float((logits(model, ids) - expected).abs().max()) < LIMITS[8]


@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_stores_of_few_bits_compute_with_their_rounded_weights(tmp_path: Path, family: str, bits: Width) -> None:
    plain = save_toy(family, tmp_path / "plain")
    others: Width = "4dq" if str(bits).endswith("dq") else 4
    quantize_checkpoint(tmp_path / "plain", tmp_path / "q", expert_bits=bits, other_bits=others, progress=False)
    model = load_offloaded(tmp_path / "q", FEW, device="cpu")
    ids = tokens(1, 12)
    expected = logits(reference(plain, bits, others, is_fitted=True), ids)
    assert float((logits(model, ids) - expected).abs().mean()) < LIMITS[bits] / 4


@pytest.mark.parametrize("is_fused", [False, True], ids=["original", "fused"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "granitemoe"])
def test_experts_quantized_as_they_are_read_are_rounded_to_the_nearest(
    tmp_path: Path, family: str, is_fused: bool
) -> None:
    plain = save_toy(family, tmp_path / "plain", is_fused=is_fused)
    model = load_offloaded(tmp_path / "plain", OffloadConfig(fast_bytes=60_000, expert_bits=8), device="cpu")
    ids = tokens()
    expected = logits(reference(plain, 8, None, is_fitted=False), ids)
    assert float((logits(model, ids) - expected).abs().max()) < LIMITS[8]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_store_of_16_bits_computes_with_bfloat16_experts(tmp_path: Path, family: str) -> None:
    plain = save_toy(family, tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "q", expert_bits=16, progress=False)
    model = load_offloaded(tmp_path / "q", FEW, device="cpu")
    ids = tokens()
    # Every weight is rounded to 8 binary digits; that sends one token or another to another expert.
    assert float((logits(model, ids) - logits(plain, ids)).abs().amax(-1).median()) < 0.05
    assert next(model.parameters()).dtype == torch.float32


def test_generation_goes_on_from_the_cache(tmp_path: Path) -> None:
    save_toy("mixtral", tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "q", expert_bits=8, other_bits=8, progress=False)
    model = load_offloaded(tmp_path / "q", FEW, device="cpu")
    ids = tokens(1, 5)
    found = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=True)  # type: ignore[operator]
    # 8-bit products are exact sums: a token alone gives what it gives among others.
    assert found.tolist() == model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False).tolist()  # type: ignore[operator]


@pytest.mark.parametrize("bits", [8, 4, "nf4", "4dq", "2dq"])
def test_adapters_train_on_a_quantized_model_as_on_one_with_its_rounded_weights(tmp_path: Path, bits: Width) -> None:
    plain = save_toy("mixtral", tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "q", expert_bits=bits, other_bits=bits, progress=False)
    ids = tokens(1, 12)
    grads: list[dict[str, Tensor]] = []
    for base in (
        load_offloaded(tmp_path / "q", FEW, device="cpu"),
        reference(plain, bits, bits, is_fitted=True),
    ):
        torch.manual_seed(0)
        model: PeftModel = get_peft_model(base, LoraConfig(target_modules=["q_proj", "o_proj"], r=4))  # type: ignore[assignment]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    found, expected = grads
    assert found.keys() == expected.keys()
    assert len(found) == 12
    # A product with nf4 is that of the widened weight in float32; the others round activations.
    limit = {8: 1e-2, "nf4": 1e-5}.get(bits, 0.3)
    for name, one in found.items():
        assert float((one - expected[name]).norm() / expected[name].norm()) < limit, name


def test_quantized_layers_keep_their_types_when_the_model_is_cast_and_copied(tmp_path: Path) -> None:
    save_toy("mixtral", tmp_path / "plain")
    model = load_offloaded(tmp_path / "plain", OffloadConfig(expert_bits=4, other_bits=4), device="cpu")
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(layers) == 2 * 3, "q_proj and o_proj of three layers; the others are below the least size"
    ids = tokens()
    expected = logits(model, ids)
    model.to(torch.bfloat16)
    assert {layer.weight_scales.dtype for layer in layers} == {torch.bfloat16}
    assert torch.isfinite(logits(model, ids)).all()
    model.to(torch.float32)
    assert {layer.weight_codes.dtype for layer in layers} == {torch.uint8}
    assert float((logits(model, ids) - expected).abs().mean()) < 0.1


def test_a_cpu_with_another_order_of_codes_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_toy("mixtral", tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "q", expert_bits=3, other_bits=4, progress=False)
    ids = tokens(1, 12)
    expected = logits(load_offloaded(tmp_path / "q", FEW, device="cpu"), ids)
    monkeypatch.setattr(int4pack, "is_native_order", lambda: False)
    model = load_offloaded(tmp_path / "q", FEW, device="cpu")
    assert torch.equal(logits(model, ids), expected)
    with pytest.raises(UnsupportedError, match="cannot be moved to meta: load the model with device='meta'"):
        model.to("meta")

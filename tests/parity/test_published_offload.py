"""Experts as they are published, offloaded: the numbers of the widened model, from the bytes of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_models import tokens
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import OffloadConfig, load_offloaded

pytest.importorskip("compressed_tensors", exc_type=ImportError)
from published_models import WAYS, check_gradients, save_fused_fp8, save_mxfp4, save_published

# Sums of an expert's products run in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
FEW_BYTES = 60_000
IDS = tokens(2, 9)
SAVERS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    **{f"mixtral-{way}": lambda place, way=way: save_published(way, "mixtral", place) for way in WAYS},
    "deepseek_v3-fp8": lambda place: save_published("fp8", "deepseek_v3", place),
    "gpt_oss-mxfp4": save_mxfp4,
    "qwen3_moe-fp8-fused": save_fused_fp8,
}


def pair(kind: str, place: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Returns a published checkpoint, offloaded, and its widened twin in memory."""
    directory, twin = SAVERS[kind](place)
    few = load_offloaded(directory, OffloadConfig(fast_bytes=FEW_BYTES), device="cpu", dtype=torch.float32)
    return few, AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, experts_implementation="eager").eval()


def lora_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the gradients of an adapter on attention and experts, the same for every model of a shape."""
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["o_proj"], target_parameters=experts))
    factors = {name: one for name, one in tuned.named_parameters() if "lora" in name}
    generator = torch.Generator().manual_seed(0)
    for name in sorted(factors):
        torch.nn.init.normal_(factors[name], std=0.1, generator=generator)
    tuned(IDS, labels=IDS).loss.backward()
    return {name: one.grad for name, one in factors.items() if one.grad is not None}


@pytest.mark.parametrize("kind", SAVERS)
def test_offloaded_experts_give_the_numbers_of_the_widened_model(kind: str, tmp_path: Path) -> None:
    few, local = pair(kind, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(few(IDS).logits, local(IDS).logits, **CLOSE)
    options: Any = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(few.generate(IDS, **options), local.generate(IDS, **options))
    check_gradients(few, local, IDS, **CLOSE)
    torch.testing.assert_close(*(lora_gradients(model) for model in (few, local)), **CLOSE)

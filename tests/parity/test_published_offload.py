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
from swarm_plugins.offload.interfaces import ExpertKey
from swarm_plugins.offload.model.attach import formats_of
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.offload.store.checkpoint_store import CheckpointStore

pytest.importorskip("compressed_tensors", exc_type=ImportError)
pytest.importorskip("gguf")
from gguf_models import save_gguf
from published_models import WAYS, check_gradients, save_fused_fp8, save_mxfp4, save_published

# Sums of an expert's products run in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
GGUF_KINDS = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q4_1", "BF16")
IDS = tokens(2, 9)
SAVERS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    **{f"mixtral-{way}": lambda place, way=way: save_published(way, "mixtral", place) for way in WAYS},
    "deepseek_v3-fp8": lambda place: save_published("fp8", "deepseek_v3", place),
    "gpt_oss-mxfp4": save_mxfp4,
    "qwen3_moe-fp8-fused": save_fused_fp8,
    **{f"mixtral-{kind}": lambda place, kind=kind: save_gguf("mixtral", kind, place) for kind in GGUF_KINDS},
    "qwen3moe-Q4_K": lambda place: save_gguf("qwen3moe", "Q4_K", place),
}


def expert_bytes(directory: Path) -> int:
    """Returns what the largest expert takes in memory: what it takes in the file, if it is packed."""
    moe = MoeCheckpoint.open(directory, dtype=torch.float32)
    assert isinstance(moe.store, CheckpointStore)
    formats = formats_of(moe, OffloadConfig(), torch.device("cpu"))
    for layer in moe.packed:
        in_file = sum(num_bytes for _, _, num_bytes, _ in moe.store.pieces(ExpertKey(layer, 0)))
        # Each tensor begins at a multiple of 64 bytes.
        assert formats[layer].computed.num_bytes <= in_file + 64 * len(formats[layer].computed.tensors)
    return max(form.computed.num_bytes for form in formats.values())


def pair(kind: str, place: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Returns a published checkpoint, offloaded, and its widened twin in memory."""
    directory, twin = SAVERS[kind](place)
    few = load_offloaded(
        directory, OffloadConfig(fast_bytes=4 * expert_bytes(directory)), device="cpu", dtype=torch.float32
    )
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

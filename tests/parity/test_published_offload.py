"""Experts as they are published, offloaded: the numbers of the widened model, from the bytes of the file."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_models import tokens
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, OffloadConfig, load_offloaded
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.offload import quantize_checkpoint
from swarm_plugins.offload.interfaces import ExpertKey
from swarm_plugins.offload.model.attach import formats_of
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.offload.store.checkpoint_store import CheckpointStore
from swarm_plugins.testing.in_process import InProcessSwarm

pytest.importorskip("compressed_tensors", exc_type=ImportError)
pytest.importorskip("gguf")
from gguf_models import save_gguf
from published_models import WAYS, check_gradients, save_fused_fp8, save_mixed, save_mxfp4, save_published

# Sums of an expert's products run in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
GGUF_KINDS = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q4_1", "BF16")
IDS = tokens(2, 9)
SAVERS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    **{f"mixtral-{way}": lambda place, way=way: save_published(way, "mixtral", place) for way in WAYS},
    "deepseek_v3-fp8": lambda place: save_published("fp8", "deepseek_v3", place),
    # Its mixer multiplies by the weight of a linear layer itself.
    "jamba-fp8": lambda place: save_published("fp8", "jamba", place),
    "mixtral-mixed": lambda place: save_mixed(place, "mixtral"),
    "gpt_oss-mxfp4": save_mxfp4,
    "qwen3_moe-fp8-fused": save_fused_fp8,
    **{f"mixtral-{kind}": lambda place, kind=kind: save_gguf("mixtral", kind, place) for kind in GGUF_KINDS},
    "qwen3moe-Q4_K": lambda place: save_gguf("qwen3moe", "Q4_K", place),
    "deepseek2-Q8_0": lambda place: save_gguf("deepseek2", "Q8_0", place),
    "deepseek2-halves-Q4_0": lambda place: save_gguf("deepseek2-halves", "Q4_0", place),
    "gpt-oss-MXFP4": lambda place: save_gguf("gpt-oss", "MXFP4", place),
    "gpt-oss-BF16": lambda place: save_gguf("gpt-oss", "BF16", place),
}

# One of each layout; others differ by what is done with the numbers, which the tests of hosted blocks see as well.
FAST = {
    "mixtral-fp8",
    "mixtral-int4-zeros",
    "mixtral-nvfp4",
    "mixtral-gptq-order",
    "mixtral-awq",
    "mixtral-bnb-nf4-nested",
    "mixtral-bnb-nf4-as-bf16",
    "mixtral-fp8-powers",
    "mixtral-bnb-int8",
    "jamba-fp8",
    "mixtral-mixed",
    "deepseek_v3-fp8",
    "gpt_oss-mxfp4",
    "qwen3_moe-fp8-fused",
    "mixtral-BF16",
    "mixtral-Q8_0",
    "qwen3moe-Q4_K",
    "gpt-oss-MXFP4",
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


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in FAST else pytest.mark.slow) for kind in SAVERS]
)
def test_offloaded_experts_give_the_numbers_of_the_widened_model(kind: str, tmp_path: Path) -> None:
    few, local = pair(kind, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(few(IDS).logits, local(IDS).logits, **CLOSE)
    options: Any = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(few.generate(IDS, **options), local.generate(IDS, **options))
    check_gradients(few, local, IDS, **CLOSE)
    torch.testing.assert_close(*(lora_gradients(model) for model in (few, local)), **CLOSE)


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("mixtral-fp8", "fp8"),
        ("qwen3moe-Q4_K", r"gguf \(Q4_K\)"),
        pytest.param("gpt-oss-MXFP4", r"gguf \((MXFP4, )?Q8_0\)", marks=pytest.mark.slow),
    ],
)
def test_servers_that_read_packed_experts_on_demand_give_the_numbers_of_the_widened_model(
    kind: str, stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    directory, twin = SAVERS[kind](tmp_path)
    local = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, experts_implementation="eager").eval()
    few = OffloadConfig(fast_bytes=4 * expert_bytes(directory))
    with InProcessSwarm(directory, dtype=torch.float32, offload=few) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, dtype=torch.float32)
        check_gradients(remote, local, IDS, **CLOSE)
        torch.testing.assert_close(lora_gradients(remote), lora_gradients(local), **CLOSE)
    assert re.search(rf"offloaded experts: packed weights stay {stored}; each product widens", caplog.text)
    assert re.search(rf"blocks 0:2: packed weights stay {stored}; each product widens", caplog.text)


def test_the_experts_of_a_layer_have_to_be_packed_alike(tmp_path: Path) -> None:
    directory, _ = save_mixed(tmp_path, "mixtral", ".experts.0.", r"re:.*\.experts\.0\..*")
    with pytest.raises(UnsupportedError, match=r"experts\.1\..* and .*experts\.0\..* are packed in different ways"):
        load_offloaded(directory, device="cpu")


@pytest.mark.parametrize(
    ("field", "settings"), [("expert_bits", OffloadConfig(expert_bits=8)), ("other_bits", OffloadConfig(other_bits=8))]
)
def test_what_is_packed_is_not_quantized_again(field: str, settings: OffloadConfig, tmp_path: Path) -> None:
    directory, _ = SAVERS["mixtral-fp8"](tmp_path)
    with pytest.raises(ConfigError, match=rf"{field} is 8, but .* is published as fp8: leave {field} out"):
        load_offloaded(directory, settings, device="cpu")


def test_a_store_is_made_of_wide_weights_only(tmp_path: Path) -> None:
    directory, _ = SAVERS["mixtral-fp8"](tmp_path)
    with pytest.raises(UnsupportedError, match="is published as fp8, and packed weights are not quantized again"):
        quantize_checkpoint(directory, tmp_path / "store", expert_bits=4)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_scales_that_make_nonsense_are_found_when_their_expert_is_read(value: float, tmp_path: Path) -> None:
    directory, _ = SAVERS["mixtral-fp8"](tmp_path)
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if ".experts." in name and name.endswith("_scale_inv"):
            tensors[name][-1, -1] = value
    save_file(tensors, directory / "model.safetensors")
    few = load_offloaded(directory, device="cpu")
    with pytest.raises(CheckpointError, match=r"up_proj of expert \d in layer 0 .* its scales hold .*; fetch"):
        few(IDS)

"""What is found out without weights is what the model with weights has."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.moe import is_fused_experts
from swarm_plugins.offload import OffloadConfig, quantize_checkpoint
from swarm_plugins.offload.model.attach import formats_of
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.offload.plan.sizes import model_sizes
from swarm_plugins.testing.models import save_tiny, tiny_model
from swarm_plugins.weights.formats.ggml import GgmlFormat
from swarm_plugins.weights.formats.groups import SizedGroups
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.formats.nibbles import NibblesFormat
from swarm_plugins.weights.formats.scaled import ScaledFormat
from swarm_plugins.weights.formats.stacked import StackedFormat
from swarm_plugins.weights.kernels import int4pack
from swarm_plugins.weights.linears import PackedLinear

CONTEXT = 24
FAMILIES = ["mixtral", "mixtral_sliding", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe"]


def expert_bytes(model: PreTrainedModel) -> int:
    experts = [module for module in model.modules() if is_fused_experts(module)]
    return sum(parameter.nbytes for module in experts for parameter in module.parameters())


def cache_bytes(model: PreTrainedModel) -> int:
    ids = torch.ones((1, CONTEXT), dtype=torch.long)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    tensors = [(layer.keys, layer.values) for layer in cache.layers]
    return sum(keys.nbytes + values.nbytes for keys, values in tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path, num_layers=2)
    model = tiny_model(family, num_layers=2)
    sizes = model_sizes(Checkpoint.open(tmp_path), context_tokens=CONTEXT)
    everything = sum(parameter.nbytes for parameter in model.parameters())
    assert sizes.expert_bytes == expert_bytes(model)
    assert sizes.other_bytes == everything - expert_bytes(model)
    assert sizes.cache_bytes == cache_bytes(model)
    assert sizes.num_layers == 2
    assert {(layer.num_experts, layer.experts_per_token) for layer in sizes.layers} == {(4, 2)}
    assert sizes.token_bytes == sizes.expert_bytes // 2
    assert sizes.dtype == torch.float32


def test_layers_without_experts_are_left_out(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path, num_layers=3)
    assert [layer.layer for layer in model_sizes(Checkpoint.open(tmp_path)).layers] == [1, 2]


PACKED = {
    "Q8_0": [NibblesFormat, StackedFormat, GgmlFormat],
    "Q4_0": [SizedGroups, StackedFormat, GgmlFormat],
    "Q4_K": [GgmlFormat, StackedFormat],
    "int-channel": [Int8Format, StackedFormat, ScaledFormat],
}
"""What linear layers become in bfloat16, and experts, which are read as they are needed."""


@pytest.mark.parametrize("way", PACKED)
def test_packed_weights_count_as_what_they_become(way: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", exc_type=ImportError)
    pytest.importorskip("gguf")
    from gguf_models import save_gguf
    from published_models import save_published

    is_gguf = way.startswith("Q")
    path, _ = save_gguf("mixtral", way, tmp_path) if is_gguf else save_published(way, "mixtral", tmp_path)
    moe = MoeCheckpoint.open(path, dtype=torch.bfloat16)
    sizes = model_sizes(moe.checkpoint, context_tokens=CONTEXT, dtype=torch.bfloat16)
    rest = moe.load_rest(torch.device("cpu"))
    linears = [module for module in rest.modules() if isinstance(module, PackedLinear)]
    packed = {id(one): one for linear in linears for one in linear.buffers()}
    plain = {id(one): one for one in rest.parameters()}
    assert sizes.other_bytes == sum(one.nbytes for one in (packed | plain).values())
    assert sizes.published is not None
    products = sizes.published.products
    assert {type(one.sample) for one in products} == set(PACKED[way])
    in_experts = [math.prod(form.shape) for some in moe.packed.values() for form in some.values()]
    # Two of four experts.
    in_linears = sum(one.out_features * one.in_features for one in linears)
    assert sum(one.num_weights for one in products) == 2 * sum(in_experts) + in_linears


@pytest.mark.parametrize("is_native", [True, False], ids=["avx512", "another order"])
def test_experts_of_few_bits_count_as_they_lie_in_memory(
    is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("mixtral", tmp_path / "plain", num_layers=2)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "store", expert_bits=2, progress=False)
    monkeypatch.setattr(int4pack, "is_native_order", lambda: is_native)
    moe = MoeCheckpoint.open(tmp_path / "store")
    formats = formats_of(moe, OffloadConfig(), torch.device("cpu"))
    for layer in model_sizes(moe.checkpoint, context_tokens=CONTEXT).layers:
        assert layer.expert_bytes == formats[layer.layer].computed.num_bytes
        assert layer.stored_bytes == formats[layer.layer].stored.num_bytes
        assert (layer.expert_bytes == layer.stored_bytes) == is_native


def test_a_device_of_another_kind_repacks_nothing(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from gguf_models import save_gguf

    file, _ = save_gguf("mixtral", "Q4_0", tmp_path)
    on_cpu, elsewhere = (
        model_sizes(Checkpoint.open(file), context_tokens=CONTEXT, device=torch.device(name)).published
        for name in ("cpu", "meta")
    )
    assert on_cpu is not None
    assert elsewhere is not None
    assert on_cpu.widening.repacked
    assert not elsewhere.widening.repacked
    assert {type(one.sample) for one in elsewhere.products} == {GgmlFormat, StackedFormat}

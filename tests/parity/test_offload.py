"""Offloaded models against the same weights in memory: every layout of experts, every way of decoding."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_modes import MODES
from offload_models import SETTINGS, Toys, save_toy, tokens, toy
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, PreTrainedModel

from swarm_plugins import OffloadConfig, load_offloaded
from swarm_plugins.errors import CapacityError

# Room for three or four of a toy's experts, of 9,600 to 18,688 bytes, in all layers together.
FEW_BYTES = 60_000
# Products of the same numbers in another order: a few roundings of float32 at logits of about one.
ROUNDING = 1e-5


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids, attention_mask=torch.ones_like(ids)).logits
    return found


@pytest.mark.parametrize("is_fused", [False, True], ids=["original", "fused"])
@pytest.mark.parametrize("family", sorted(SETTINGS))
def test_few_experts_in_memory_give_the_bits_of_all_and_the_numbers_of_eager(
    toys: Toys, family: str, is_fused: bool
) -> None:
    path = toys(family, is_fused=is_fused)
    eager = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval()
    few = load_offloaded(path, OffloadConfig(fast_bytes=FEW_BYTES), device="cpu")
    whole = load_offloaded(path, OffloadConfig(fast_bytes=1 << 30), device="cpu")
    assert type(few) is type(eager)
    for ids in (tokens(2, 9), tokens(1, 1)):
        expected = logits(whole, ids)
        assert torch.equal(logits(few, ids), expected)
        assert torch.equal(logits(few, ids), expected), "a second pass finds other experts in memory"
        assert (expected - logits(eager, ids)).abs().max() < ROUNDING
    assert few.offload_stats().bytes_read > whole.offload_stats().bytes_read


def test_the_papers_policy_gives_the_same_bits_and_refuses_fewer_experts_than_a_token_takes(toys: Toys) -> None:
    path = toys("mixtral")
    counting = load_offloaded(path, OffloadConfig(fast_bytes=1 << 30), device="cpu")
    sizes = {num: num * FEW_BYTES for num in (5, 8)}
    settings = [
        OffloadConfig(fast_bytes=size, policy="lru", prefetch=ahead)
        for size in sizes.values()
        for ahead in (True, False)
    ]
    ids = tokens(1, 9)
    for config in settings:
        found = load_offloaded(path, config, device="cpu")
        assert torch.equal(logits(found, ids), logits(counting, ids))
        assert found.generate(ids, max_new_tokens=8).equal(counting.generate(ids, max_new_tokens=8))
    refusals = {
        1: "one expert of each of 3 layers and 4 that are read",
        3: "keeps 1 of the experts of each .*a token takes 2",
    }
    for num, message in refusals.items():
        with pytest.raises(CapacityError, match=f'policy="lru" with {num * FEW_BYTES} bytes:? {message}'):
            load_offloaded(path, OffloadConfig(fast_bytes=num * FEW_BYTES, policy="lru"), device="cpu")


@pytest.mark.parametrize("num_experts", [2, 6])
def test_the_papers_policy_keeps_all_experts_if_there_is_room(tmp_path: Path, num_experts: int) -> None:
    save_toy("mixtral", tmp_path, num_local_experts=num_experts)
    model = load_offloaded(tmp_path, OffloadConfig(fast_bytes=1 << 30, policy="lru", prefetch=True), device="cpu")
    ids = tokens(4, 20)
    logits(model, ids)
    warm = model.offload_stats()
    assert warm.uses == dict.fromkeys(range(3), (1,) * num_experts)
    logits(model, ids)
    assert model.offload_stats().misses == warm.misses


def test_experts_that_are_read_in_place_give_the_bits_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 192 KB, in files with headers of several lengths: the bits of a product depend on how a weight is aligned.
    local = toy("mixtral", hidden_size=64, intermediate_size=256)
    local.save_pretrained(tmp_path, max_shard_size="500KB")
    most_targets, real = 0, os.preadv

    def note(fd: int, into: Sequence[memoryview], start: int) -> int:
        nonlocal most_targets
        most_targets = max(most_targets, len(into))
        return real(fd, into, start)

    monkeypatch.setattr(os, "preadv", note)
    few = load_offloaded(tmp_path, OffloadConfig(fast_bytes=1 << 20, prefetch=True), device="cpu")
    whole = load_offloaded(tmp_path, OffloadConfig(fast_bytes=1 << 30), device="cpu")
    for seed in range(20):
        ids = tokens(1, 1, seed)
        assert torch.equal(logits(few, ids), logits(whole, ids))
        assert (logits(few, ids) - logits(local, ids)).abs().max() < ROUNDING
    assert most_targets > 1
    assert few.offload_stats().misses > whole.offload_stats().misses


def test_a_static_cache_compiles_nothing(toys: Toys) -> None:
    few = load_offloaded(toys("mixtral"), OffloadConfig(fast_bytes=FEW_BYTES), device="cpu")
    ids = tokens(1, 5)
    options: Any = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    # What it would do on CUDA by itself.
    compiled = CompileConfig(backend="eager")
    compiled._compile_all_devices = True
    found = few.generate(ids, cache_implementation="static", compile_config=compiled, **options)
    assert torch.equal(found, few.generate(ids, **options))


@pytest.mark.parametrize("name", sorted(MODES))
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_every_mode_of_decoding_gives_the_same(toys: Toys, family: str, name: str) -> None:
    path = toys(family)
    local = AutoModelForCausalLM.from_pretrained(path).eval()
    few = load_offloaded(path, OffloadConfig(fast_bytes=FEW_BYTES), device="cpu")
    assistant = AutoModelForCausalLM.from_pretrained(path).eval()
    assert MODES[name](few, assistant) == MODES[name](local, assistant)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "jamba"])
@pytest.mark.parametrize("name", ["greedy_padded", "beam", "sampling"])
def test_other_families_decode_the_same(toys: Toys, family: str, name: str) -> None:
    path = toys(family)
    local = AutoModelForCausalLM.from_pretrained(path).eval()
    few = load_offloaded(path, OffloadConfig(fast_bytes=FEW_BYTES), device="cpu")
    assert MODES[name](few, local) == MODES[name](local, local)


def test_shards_of_an_original_checkpoint_are_read_where_they_are(tmp_path: Path) -> None:
    local = save_toy("mixtral", tmp_path, max_shard_size="60KB")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert sum(file.suffix == ".safetensors" for file in before) > 3
    few = load_offloaded(tmp_path, OffloadConfig(fast_bytes=FEW_BYTES), device="cpu")
    ids = tokens()
    assert (logits(few, ids) - logits(local, ids)).abs().max() < ROUNDING
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before


def test_a_batch_reads_each_expert_once_per_layer(toys: Toys) -> None:
    path = toys("mixtral")
    few = load_offloaded(path, OffloadConfig(fast_bytes=FEW_BYTES, prefetch=False), device="cpu")
    logits(few, tokens(8, 32))
    layers, experts, expert_bytes = 3, 6, 3 * 32 * 48 * 4
    assert few.offload_stats().bytes_read <= layers * experts * expert_bytes


@pytest.mark.parametrize(
    ("dtype", "implementation", "tolerance"),
    [
        # bfloat16 rounds to 3 digits; the products of both sides differ in a few of these roundings.
        pytest.param(torch.bfloat16, "grouped_mm", 0.05, id="bfloat16"),
        # Grouped products do not know float64.
        pytest.param(torch.float64, "eager", 1e-12, id="float64"),
    ],
)
def test_another_type_is_cast_as_transformers_casts(
    toys: Toys, dtype: torch.dtype, implementation: str, tolerance: float
) -> None:
    path = toys("mixtral")
    local = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation=implementation).eval()
    few = load_offloaded(path, OffloadConfig(fast_bytes=2 * FEW_BYTES), dtype=dtype, device="cpu")
    expected, found = logits(local, tokens()), logits(few, tokens())
    assert found.dtype == dtype
    assert (found - expected).abs().max() < tolerance


def test_autocast_gives_what_transformers_gives(toys: Toys) -> None:
    path = toys("mixtral")
    local = AutoModelForCausalLM.from_pretrained(path).eval()
    few = load_offloaded(path, OffloadConfig(fast_bytes=FEW_BYTES), device="cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = logits(local, tokens()), logits(few, tokens())
    # Attention in bfloat16 on both sides, experts in float32: the same roundings up to the last bits of the products.
    assert (found - expected).abs().max() < 0.05


# By one config that all of them understand.
OTHERS = (
    "afmoe", "cohere2_moe", "deepseek_v4", "dots1", "exaone_moe", "flex_olmo", "granitemoe_swa", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "laguna", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "qwen3_5_moe_text",
    "qwen3_next", "solar_open",
)  # fmt: skip
OTHER_SETTINGS: dict[str, int] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "sliding_window": 16,
    "n_shared_experts": 1, "num_shared_experts": 1, "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "index_head_dim": 8, "index_n_heads": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_more_families_of_the_interface_give_the_logits_of_the_model_in_memory(family: str, tmp_path: Path) -> None:
    known = AutoConfig.for_model(family)
    config = AutoConfig.for_model(family, **{name: one for name, one in OTHER_SETTINGS.items() if hasattr(known, name)})
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        local = build(config, dtype=torch.float32).eval()
    local.save_pretrained(tmp_path)
    few = load_offloaded(tmp_path, OffloadConfig(fast_bytes=FEW_BYTES), device="cpu")
    expected, found = logits(local, tokens()), logits(few, tokens())
    assert few.offload_stats().bytes_read > 0
    # Products of the same numbers, some in another order; HF's initial values give logits of about 0.1.
    assert (found - expected).abs().max() < 1e-6

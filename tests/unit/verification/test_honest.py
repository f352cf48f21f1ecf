"""Honest servers pass, whatever they are asked, although no two of their runs agree to the last bit."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lies_kit import IDS, OtherMachine, all_checked, finish_checks, verifier_of
from peft import LoraConfig, PeftConfig, PrefixTuningConfig, get_peft_model

from kits.liars import LyingSwarm
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig
from swarm_plugins.testing import save_tiny
from swarm_plugins.verification import Quarantine
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks

MASK = torch.ones_like(IDS)
MASK[1, :5] = 0
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.2, task_type="CAUSAL_LM")
PREFIX = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")


@pytest.mark.parametrize("verify_bytes", [1 << 30, 0], ids=["whole", "opened"])
@pytest.mark.parametrize(
    ("adapter", "settings", "dtype"),
    [
        (LORA, {"codec": "float16"}, None),
        (PREFIX, {}, None),
        (LORA, {"codec": "rotated8"}, torch.bfloat16),
    ],
    ids=["lora-float16", "prefix", "bfloat16-rotated8"],
)
def test_no_honest_server_is_caught(
    mixtral: Path,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    adapter: PeftConfig,
    settings: dict[str, Any],
    dtype: torch.dtype | None,
    verify_bytes: int,
) -> None:
    config = SwarmConfig(verify="on", verify_bytes=verify_bytes, **settings)
    liars = {0: OtherMachine(), 1: OtherMachine()}
    with LyingSwarm(mixtral, config=config, dtype=dtype, liars=liars) as swarm:
        model = get_peft_model(all_checked(swarm), copy.copy(adapter)).train()
        for _ in range(2):
            model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
        model.eval()
        with torch.no_grad():
            model(input_ids=IDS, attention_mask=MASK, output_hidden_states=True, use_cache=False)
        model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False)
        finish_checks(model)
        assert set(verifier_of(model).checker.checked) == set(swarm.peers)
    assert not Quarantine(cache / "quarantine").peers()
    assert "failed (failure" not in caplog.text


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of twelve blocks."""
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "deep", num_layers=12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_errors_of_a_whole_span_accuse_nobody_where_single_blocks_are_opened(
    deep: Path, cache: Path, dtype: torch.dtype
) -> None:
    config = SwarmConfig(verify="on", verify_bytes=0)
    with LyingSwarm(deep, spans=[(0, 12)], config=config, dtype=dtype, liars={0: OtherMachine()}) as swarm:
        base = all_checked(swarm)
        base.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False)
        model = get_peft_model(base, copy.copy(LORA)).train()
        model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
        finish_checks(model)
        assert sum(verifier_of(model).checker.checked.values()) >= 4
    assert not Quarantine(cache / "quarantine").peers()


def test_gradients_that_are_rounding_errors_accuse_nobody(llama: Path, cache: Path) -> None:
    # Attention of a single token to itself does not depend on the query: its true gradient is zero.
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    config = SwarmConfig(verify="on")
    with LyingSwarm(llama, spans=[(0, 4)], config=config, liars={0: OtherMachine()}) as swarm:
        model = get_peft_model(all_checked(swarm), lora)
        model(input_ids=IDS[:, :1]).logits.square().mean().backward()
        finish_checks(model)
    assert not Quarantine(cache / "quarantine").peers()


def test_a_mixture_is_known_as_one_when_its_blocks_have_been_dropped(mixtral: Path, llama: Path) -> None:
    for directory, is_mixture in ((mixtral, True), (llama, False)):
        blocks = LocalBlocks(lambda directory=directory: Checkpoint.open(directory), limit_bytes=0)  # type: ignore[misc]
        for block in (1, 2):
            assert asyncio.run(blocks.has_fixed_positions(range(block, block + 1), Kind("float32", "none")))
        assert len(blocks._spans) == 1
        assert blocks.has_experts(range(1, 2)) == is_mixture

"""Servers whose experts stay on disk, for models with states and inside multimodal checkpoints."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from every_type import compare, compare_with_local
from transformers import AutoModelForCausalLM
from type_models import save_type

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, OffloadConfig, load_offloaded
from swarm_plugins.backbone import swarm_connection
from swarm_plugins.backbone.served import stack_of

TYPES = ("nemotron_h", "qwen3_5_moe", "qwen3_5_moe_text")
# Spans, and whether they keep states. Of nemotron_h, the second block has experts and caches nothing.
HALVES = {(0, 2): True, (2, 4): True}
SPANS = {"nemotron_h": {(0, 1): True, (1, 2): False, (2, 4): False}}
# Three or four of the experts of a span, of 8 to 9 kB each; a span has up to eight.
FEW = OffloadConfig(fast_bytes=32_000)


@pytest.mark.parametrize("model_type", TYPES)
def test_servers_that_read_experts_on_demand_say_what_local_says(model_type: str, tmp_path: Path) -> None:
    compare(model_type, save_type(model_type, tmp_path), offload=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_their_processes_say_what_local_says(model_type: str, tmp_path: Path) -> None:
    directory = save_type(model_type, tmp_path)
    spans = SPANS.get(model_type, HALVES)
    with LocalSwarm(directory, spans=list(spans), dtype="float32", offload="fast=32KB", kv_bytes="16MB") as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, initial_peers=swarm.initial_peers)
        compare_with_local(remote, directory)
        with closing(swarm_connection(remote)):
            infos = stack_of(remote).remote.view.infos.values()
            assert {(info.start, info.end): info.kv_row_tokens > 0 and info.has_states for info in infos} == spans


@torch.no_grad()
def test_of_a_multimodal_checkpoint_the_language_model_is_loaded_here(tmp_path: Path) -> None:
    directory = save_type("qwen3_5_moe", tmp_path)
    local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    few = load_offloaded(directory, FEW, device="cpu")
    ids = torch.arange(5, 15)[None]
    assert type(few) is type(local)
    torch.testing.assert_close(few(ids).logits, local(ids).logits, rtol=1e-5, atol=1e-5)
    assert few.offload_stats().bytes_read > FEW.fast_bytes

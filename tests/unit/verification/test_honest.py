"""Honest servers pass, whatever they are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lies_kit import IDS
from peft import LoraConfig, PeftConfig, PrefixTuningConfig, get_peft_model

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.client import SwarmConfig
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.verification import Quarantine, Verifier

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
        (LORA, {"codec": "int8"}, torch.bfloat16),
    ],
    ids=["lora-float16", "prefix", "bfloat16-int8"],
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
    with InProcessSwarm(mixtral, config=config, dtype=dtype) as swarm:
        base = AutoSwarmModelForCausalLM.from_pretrained(mixtral, connection=swarm.connection)
        stack = next(module.swarm_stack for module in base.modules() if hasattr(module, "swarm_stack"))
        model = get_peft_model(base, adapter).train()
        for _ in range(2):
            model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
        model.eval()
        with torch.no_grad():
            model(input_ids=IDS, attention_mask=MASK, output_hidden_states=True, use_cache=False)
        model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False)
        verifier = stack.remote.view.observer
        assert isinstance(verifier, Verifier)
        assert set(verifier.checked) == set(swarm.peers)
    assert not Quarantine(cache / "quarantine.json").peers()
    assert "failed (failure" not in caplog.text

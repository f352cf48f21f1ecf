"""Adapters on offloaded experts when threads share a model: each call has its own, and leaves none behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_models import save_toy, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from swarm_plugins import OffloadConfig, load_offloaded

TIMEOUT_S = 30.0


@pytest.fixture
def tuned(tmp_path: Path) -> PeftModel:
    save_toy("mixtral", tmp_path)
    model = load_offloaded(tmp_path, OffloadConfig(fast_bytes=1 << 30), device="cpu")
    config = LoraConfig(r=4, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    tuned = get_peft_model(model, config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return tuned


@torch.no_grad()
def logits(model: PeftModel) -> Tensor:
    found: Tensor = model(tokens()).logits
    return found


def test_overlapping_calls_leave_no_adapter_behind(tuned: PeftModel) -> None:
    with tuned.disable_adapter():
        bare = logits(tuned)
    expected = logits(tuned)
    wrapper: Any = tuned.get_submodule("base_model.model.model.layers.1.mlp.experts")
    meeting = threading.Barrier(2)
    # Two calls are in the same experts at once, and the one that came first is the first to leave.
    first_left = threading.Event()

    def meet(module: object, arguments: object, output: object) -> None:
        if meeting.wait(TIMEOUT_S) == 1:
            assert first_left.wait(TIMEOUT_S)

    hook = wrapper.get_base_layer().register_forward_hook(meet)

    def call() -> Tensor:
        try:
            return logits(tuned)
        finally:
            first_left.set()

    with ThreadPoolExecutor(2) as threads:
        found = [one.result(2 * TIMEOUT_S) for one in [threads.submit(call) for _ in range(2)]]
    hook.remove()
    assert all(torch.equal(one, expected) for one in found)
    assert torch.equal(logits(tuned), expected)
    with tuned.disable_adapter():
        assert torch.equal(logits(tuned), bare)

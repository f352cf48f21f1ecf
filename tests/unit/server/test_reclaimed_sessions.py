"""A session whose memory went to others goes on: its client replays it, and no token differs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor
from type_models import save_type

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.server import limits
from swarm_plugins.testing import InProcessSwarm

LEASE_S = 0.2
PROMPT = torch.arange(3, 63)[None]


class PauseAt(LogitsProcessor):
    """Lets another generation run in the middle of this one, after a pause longer than a lease."""

    def __init__(self, other: object, call: int) -> None:
        self.other, self.call, self.num_calls = other, call, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == self.call:
            time.sleep(1.5 * LEASE_S)
            self.other()  # type: ignore[operator]
        return scores


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_moe_text"])
def test_a_reclaimed_session_is_replayed_to_the_same_tokens(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_type(model_type, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(model).eval().generate(PROMPT, max_new_tokens=8, do_sample=False)
    with InProcessSwarm(model, spans=[(0, 4)]) as swarm:
        service = swarm.services["peer0"]
        spec = service.spec
        # One generation of two pages of 64 tokens at a time. Without their states, two would fit.
        num_pages = 4 if spec.kv_row_bytes else 3
        service.kv_bytes = num_pages * 64 * spec.kv_token_bytes + spec.kv_row_bytes * 3 // 2
        service.runner.pool.budget_bytes = service.kv_bytes
        monkeypatch.setattr(limits, "SESSION_LEASE_S", LEASE_S)
        monkeypatch.setattr(limits, "MAX_KV_SHARE", 1.0)
        remote = AutoSwarmModelForCausalLM.from_pretrained(model, connection=swarm.connection)
        found: list[Tensor] = []

        def generate(pause: list[LogitsProcessor]) -> None:
            found.append(remote.generate(PROMPT, max_new_tokens=8, do_sample=False, logits_processor=pause))

        generate([PauseAt(lambda: generate([]), 7)])
        assert len(found) == 2
        for tokens in found:
            assert torch.equal(tokens, expected)
        # The one that waited is replayed; the other one found room.
        assert set(service.counts.refusals) == {"unknown_session"}

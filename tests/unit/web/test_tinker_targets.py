"""Tokens that a request names are scored by few distributions at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from swarm_plugins.errors import NumericError
from swarm_plugins.tuning.datums import Datum
from swarm_plugins.web.tinker.targets import target_logprobs

TEXT = Datum(torch.arange(5, 15), {"target_tokens": torch.arange(30).view(10, 3)})


@pytest.fixture
def model(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny).eval()


@torch.no_grad()
def wanted(model: Any) -> torch.Tensor:
    logits = model(input_ids=TEXT.tokens[None]).logits[0, -10:]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, TEXT.inputs["target_tokens"])
    return found


def test_a_prompt_is_scored_piece_by_piece(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.targets.SCORED_AT_ONCE", 4)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda layer, given, output: rows.append(output.shape[1]))
    found = target_logprobs(model, TEXT)
    assert rows == [4, 4, 2]
    torch.testing.assert_close(found, wanted(model), rtol=1e-4, atol=1e-5)


def test_a_prompt_after_virtual_tokens_is_scored_whole(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.targets.SCORED_AT_ONCE", 4)
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    soft = get_peft_model(model, config).eval()
    torch.testing.assert_close(target_logprobs(soft, TEXT), wanted(soft), rtol=1e-4, atol=1e-5)


def test_numbers_that_are_not_finite_are_an_error(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    with pytest.raises(NumericError, match="log probabilities are NaN or infinite: sample with an earlier checkpoint"):
        target_logprobs(model, TEXT)

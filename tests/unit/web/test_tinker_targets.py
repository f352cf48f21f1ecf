"""Tokens that a request names are scored by few distributions at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from swarm_plugins.errors import ConfigError, NumericError
from swarm_plugins.tuning.datums import Datum, TextBounds
from swarm_plugins.web.tinker.bodies import TensorBody
from swarm_plugins.web.tinker.targets import is_read_whole, target_datum, target_logprobs

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


def test_cells_without_a_token_are_0(model: Any) -> None:
    named = TEXT.inputs["target_tokens"].clone()
    named[3, 1] = named[9] = -1
    tokens, bounds = (*range(5, 15), 4), TextBounds(64, 128)
    body = TensorBody(data=named.flatten().tolist(), shape=[10, 3])
    found = target_logprobs(model, target_datum(tokens, body, bounds))
    torch.testing.assert_close(found, wanted(model).masked_fill(named == -1, 0.0), rtol=1e-4, atol=1e-5)
    for odd in (-2, 128):
        with pytest.raises(ConfigError, match="target_tokens has ids outside of the vocabulary, 0 to 127"):
            target_datum(tokens, TensorBody(data=[odd] * 10, shape=[10, 1]), bounds)


def test_a_prompt_after_virtual_tokens_is_scored_whole(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.targets.SCORED_AT_ONCE", 4)
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    soft = get_peft_model(model, config).eval()
    torch.testing.assert_close(target_logprobs(soft, TEXT), wanted(soft), rtol=1e-4, atol=1e-5)


def test_an_activated_lora_scores_a_prompt_whole(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.targets.SCORED_AT_ONCE", 4)
    config = LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[6, 7], task_type="CAUSAL_LM")
    tuned = get_peft_model(model, config).eval()
    torch.nn.init.normal_(tuned.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default").weight)
    assert is_read_whole(tuned)
    torch.testing.assert_close(target_logprobs(tuned, TEXT), wanted(tuned), rtol=1e-4, atol=1e-5)


def test_numbers_that_are_not_finite_are_an_error(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    with pytest.raises(NumericError, match="log probabilities are NaN or infinite: sample with an earlier checkpoint"):
        target_logprobs(model, TEXT)

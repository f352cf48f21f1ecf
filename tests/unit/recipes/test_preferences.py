"""Losses of preferences and rewards, by formulas that the tuners do not use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor
from transformers import ByT5Tokenizer

from swarm_plugins.errors import ConfigError
from swarm_plugins.recipes import PairData, PreferenceTuner, PromptData, RewardTuner
from swarm_plugins.testing import tiny_model

LORA = {"peft_type": "LORA", "target_modules": ["q_proj"]}
BYTES = ByT5Tokenizer(extra_ids=0)
PAIRS = [("who", "she", "nobody at all"), ("where to", "up the long road", "x")]


def adapted(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    base = tiny_model("llama", num_layers=2)
    base.resize_token_embeddings(len(BYTES))
    return get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


def pairs(length: int = 40) -> dict[str, Tensor]:
    data = PairData("pairs.json", tokenizer="bytes", length=length)
    rows = {"prompt": [p for p, _, _ in PAIRS], "chosen": [c for _, c, _ in PAIRS], "rejected": [r for *_, r in PAIRS]}
    return data._collate(data._prepare(Dataset.from_dict(rows)))


def answer_log_prob(model: Any, prompt: str, answer: str) -> Tensor:
    """By the loss of transformers, one answer at a time and without padding."""
    start = BYTES(prompt, add_special_tokens=False)["input_ids"]
    end = [*BYTES(answer, add_special_tokens=False)["input_ids"], BYTES.eos_token_id]
    labels = torch.tensor([[*[-100] * len(start), *end]])
    loss: Tensor = model(input_ids=torch.tensor([[*start, *end]]), labels=labels, use_cache=False).loss
    return -loss * len(end)


def test_the_loss_of_pairs_is_that_of_the_paper() -> None:
    tuner = PreferenceTuner("base", LORA, beta=0.3)
    tuner.model = model = adapted().eval()
    logged: dict[str, Tensor] = {}
    tuner.log_dict = lambda found, **_: logged.update(found)  # type: ignore[assignment]
    loss = tuner.training_step(pairs(), 0)

    def preference(prompt: str, chosen: str, rejected: str) -> Tensor:
        return answer_log_prob(model, prompt, chosen) - answer_log_prob(model, prompt, rejected)

    with torch.no_grad():
        found = torch.stack([preference(*pair) for pair in PAIRS])
        with model.disable_adapter():
            reference = torch.stack([preference(*pair) for pair in PAIRS])
    margins = 0.3 * (found - reference)
    assert margins.abs().min() > 1e-3
    torch.testing.assert_close(loss.detach(), torch.log1p((-margins).exp()).mean(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logged["train_margin"], margins.mean(), rtol=1e-3, atol=1e-5)


def test_pairs_whose_answers_are_cut_off_are_refused() -> None:
    with pytest.raises(ConfigError, match="length=2 cuts every answer"):
        pairs(length=2)


def test_a_reward_raises_the_probability_of_the_better_answer_up_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    data = PromptData("prompts.json", tokenizer="bytes", length=8)
    batch = data._collate([{"prompt": "abc", "size": 1}, {"prompt": "a", "size": 2}])
    tuner = RewardTuner("base", LORA, reward=lambda completions, **_: [float(len(one)) for one in completions])
    tuner.model = model = adapted().eval()
    end, letter = BYTES.eos_token_id, BYTES("x")["input_ids"][0]
    answers = torch.tensor([[letter, end, letter], [letter, letter, letter]] * 2)
    tuner.num_generations = 2
    prompts = batch["input_ids"].repeat_interleave(2, 0)
    monkeypatch.setattr(model, "generate", lambda **_: torch.cat([prompts, answers], 1))
    monkeypatch.setattr(RewardTuner, "trainer", type("Run", (), {"datamodule": data}))
    tuner.log_dict = lambda found, **_: None  # type: ignore[assignment]
    tokens, mask, rewards = tuner._sampled(batch, 2)
    assert tokens.shape == mask.shape
    assert mask[:, -3:].tolist() == [[1, 1, 0], [1, 1, 1]] * 2
    assert rewards[0] < rewards[1]

    # Of two answers the better has the advantage 1 / sqrt(2), the other its negative: a step down the gradient tells.
    loss = tuner.training_step(batch, 0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-(0.5**0.5) * (2 * 3 - 2 * 2) / 10, rel=1e-2)
    assert any(one.grad is not None and one.grad.abs().max() > 0 for one in model.parameters())


def test_a_prefix_is_learned_at_the_positions_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = RewardTuner("base", {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3})
    tuner.model = model = get_peft_model(
        tiny_model("llama", num_layers=2), PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    )
    seen: list[Tensor] = []

    def note(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["position_ids"])

    model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    monkeypatch.setattr(tuner, "_sampled", lambda *_: (torch.full((2, 4), 5), mask, torch.tensor([0.0, 1.0])))
    tuner.num_generations, tuner.log_dict = 2, lambda found, **_: None  # type: ignore[assignment]
    tuner.training_step({"input_ids": torch.ones(1, 2)}, 0)
    assert seen[0].tolist() == [[3, 3, 3, 4], [3, 4, 5, 6]]


def test_answers_are_sampled_as_they_are_learned_and_stop_at_any_end(monkeypatch: pytest.MonkeyPatch) -> None:
    data = PromptData("prompts.json", tokenizer="bytes", length=8)
    tuner = RewardTuner("base", LORA, reward=lambda completions, **_: [0.0] * len(completions))
    tuner.model = model = adapted().eval()
    own = model.generation_config
    own.eos_token_id, own.repetition_penalty = [6, 7], 1.3
    seen: list[Any] = []

    def generate(input_ids: Tensor, **_: Any) -> Tensor:
        seen.append(model.generation_config)
        answers = torch.tensor([[9, 9, 7, 1, 6], [6, 6, 6, 6, 6]])
        return torch.cat([input_ids, answers], 1)

    monkeypatch.setattr(model, "generate", generate)
    monkeypatch.setattr(RewardTuner, "trainer", type("Run", (), {"datamodule": data}))
    _, mask, _ = tuner._sampled(data._collate([{"prompt": "abc"}]), 2)
    assert mask[:, -5:].tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    [config] = seen
    assert config.repetition_penalty is None
    assert config.eos_token_id == [BYTES.eos_token_id, 6, 7]
    assert model.generation_config is own


def test_one_answer_has_none_to_be_compared_with() -> None:
    with pytest.raises(ConfigError, match="num_generations must be 2 or more, got 1"):
        RewardTuner("base", LORA, num_generations=1)

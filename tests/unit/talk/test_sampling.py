"""How a conversation chooses words: as the model's own settings say, greedily without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedModel

from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.talk.sampling import Sampling, default_sampling
from swarm_plugins.talk.turns import Conversation
from swarm_plugins.testing.models import tiny_model, tiny_tokenizer

OWN = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.3}


def model_with(**settings: Any) -> PreTrainedModel:
    model = tiny_model("llama").eval()
    model.generation_config = GenerationConfig(**settings)
    return model


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, Sampling(top_k=50), id="none"),
        pytest.param({"temperature": 0.6, "top_p": 0.9}, Sampling(top_p=0.9, top_k=50), id="never-sampled"),
        pytest.param({"do_sample": True}, Sampling(temperature=1.0, top_k=50), id="transformers-own"),
        pytest.param(OWN, Sampling(temperature=0.8, top_p=0.9, top_k=5), id="all"),
        pytest.param(
            {"do_sample": True, "min_p": 0.1, "top_k": 0}, Sampling(temperature=1.0, min_p=0.1, top_k=0), id="min-p"
        ),
    ],
)
def test_the_default_is_the_models_own(settings: dict[str, Any], expected: Sampling) -> None:
    assert default_sampling(model_with(**settings)) == expected


def test_a_model_converted_from_gguf_is_greedy() -> None:
    # As the demonstration's: transformers derives these settings from the config.
    model = model_with()
    model.generation_config = GenerationConfig.from_model_config(LlamaConfig())
    assert default_sampling(model).options() == {"do_sample": False}


def test_what_is_asked_for_wins() -> None:
    model = model_with(**OWN)
    assert default_sampling(model, temperature=0.3, top_p=None) == Sampling(temperature=0.3, top_p=0.9, top_k=5)
    assert default_sampling(model, temperature=0.0).options() == {"do_sample": False}
    assert default_sampling(model_with(), temperature=0.3).temperature == 0.3


def test_a_temperature_that_would_overflow_logits_is_greedy() -> None:
    assert Sampling(temperature=1e-30).options() == {"do_sample": False}


@pytest.mark.parametrize("settings", [{}, OWN], ids=["greedy", "sampled"])
def test_the_options_give_what_generate_gives_by_itself(settings: dict[str, Any]) -> None:
    model, ids = model_with(**settings), torch.arange(5, 15)[None]

    def answer(**options: Any) -> Tensor:
        torch.manual_seed(3)
        output: Tensor = model.generate(ids, max_new_tokens=16, pad_token_id=0, **options)  # type: ignore[operator]
        return output

    assert answer(**default_sampling(model).options()).equal(answer())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1.5),
        ("min_p", True),
        ("top_k", -1),
    ],
)
def test_other_values_are_refused_with_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .*; expected "):
        default_sampling(model_with(), **{name: value})


def test_a_value_of_the_model_that_cannot_be_used_names_its_file() -> None:
    model = model_with()
    model.generation_config.top_p = "much"  # as a file may say
    with pytest.raises(CheckpointError, match=r"json cannot be used: top_p is 'much'; expected 0 to 1"):
        default_sampling(model)


def said(model: PreTrainedModel, seed: int, **settings: Any) -> str:
    words: list[str] = []
    torch.manual_seed(seed)
    Conversation(model, tiny_tokenizer(), max_new_tokens=12, **settings).answer("hello", words.append)
    return "".join(words)


def test_a_conversation_samples_only_with_a_model_that_says_so() -> None:
    greedy, sampled = model_with(), model_with(do_sample=True, temperature=2.0)
    assert said(greedy, 1) == said(greedy, 2) == said(sampled, 1, temperature=0.0)
    assert len({said(sampled, seed) for seed in range(4)}) > 1
    assert len({said(greedy, seed, temperature=2.0) for seed in range(4)}) > 1

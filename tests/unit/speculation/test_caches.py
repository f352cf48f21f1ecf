"""Local caches of drafts go back: keys and values are cropped, states are restored."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from type_models import tiny_type_model

from swarm_plugins.speculation.caches import Rewinder

IDS = torch.arange(5, 17)[None]


@torch.no_grad()
def logits(model: PreTrainedModel, cache: DynamicCache, start: int, end: int) -> torch.Tensor:
    return model(IDS[:, start:end], past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize(("model_type", "left"), [("llama", 7), ("lfm2", 6), ("qwen3_5_text", 6), ("falcon_h1", 6)])
def test_what_follows_is_as_if_the_tokens_had_never_run(model_type: str, left: int) -> None:
    model = tiny_type_model(model_type)
    cache, whole = DynamicCache(config=model.config), DynamicCache(config=model.config)
    cache.activate_past_recording()
    rewinder = Rewinder(cache)
    logits(model, cache, 0, 6)
    rewinder.keep(6)
    for token in range(6, 9):
        logits(model, cache, token, token + 1)
    assert rewinder.back(9, 7) == left
    found = logits(model, cache, left, 12)
    logits(model, whole, 0, left)
    torch.testing.assert_close(found, logits(model, whole, left, 12), rtol=1e-4, atol=1e-5)


def test_nothing_is_taken_back_of_a_draft_that_was_accepted() -> None:
    model = tiny_type_model("qwen3_5_text")
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    rewinder = Rewinder(cache)
    logits(model, cache, 0, 6)
    rewinder.keep(6)
    before = logits(model, cache, 6, 7)
    assert rewinder.back(7, 9) == 7
    assert rewinder.back(7, 6) == 6
    torch.testing.assert_close(logits(model, cache, 6, 7), before)

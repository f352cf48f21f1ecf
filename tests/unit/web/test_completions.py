"""Text completions: streamed, echoed, scored."""

from __future__ import annotations

from typing import Any

import openai
import pytest


@pytest.fixture
def prompt() -> str:
    return "once upon a time"


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "logprobs": 2}, {"n": 2, "logprobs": 0}])
def test_a_streamed_completion_is_the_whole_one(client: openai.OpenAI, prompt: str, more: dict[str, Any]) -> None:
    wanted: dict[str, Any] = {"model": "tiny", "prompt": [prompt, "a b c"], "max_tokens": 8, "seed": 1, **more}
    whole = client.completions.create(**wanted).choices
    texts, tokens, logprobs, offsets = ([type(empty)() for _ in whole] for empty in ("", [], [], []))
    for chunk in client.completions.create(**wanted, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
                logprobs[choice.index] += choice.logprobs.token_logprobs or []
                offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole]
    if "logprobs" in more:
        assert tokens == [choice.logprobs.tokens for choice in whole if choice.logprobs is not None]
        assert offsets == [choice.logprobs.text_offset for choice in whole if choice.logprobs is not None]
        for streamed, choice in zip(logprobs, whole, strict=True):
            assert choice.logprobs is not None
            assert streamed == [
                one if one is None else pytest.approx(one, abs=1e-4) for one in choice.logprobs.token_logprobs or []
            ]


@pytest.mark.parametrize("stream", [False, True])
def test_only_scoring_makes_no_token(client: openai.OpenAI, tokenizer: Any, prompt: str, stream: bool) -> None:
    wanted: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        choices = [chunk.choices[0] for chunk in client.completions.create(**wanted, stream=True)]
    else:
        choices = client.completions.create(**wanted).choices
    assert "".join(choice.text for choice in choices) == prompt
    assert choices[-1].finish_reason == "length"
    assert choices[0].logprobs is not None
    assert len(choices[0].logprobs.token_logprobs or []) == len(tokenizer(prompt)["input_ids"])


def test_a_prompt_as_long_as_the_context_can_be_scored_and_no_longer_one(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"model": "tiny", "max_tokens": 0, "echo": True, "logprobs": 1}
    scored = client.completions.create(prompt=[5] * 512, **wanted).choices[0].logprobs
    assert scored is not None
    assert len(scored.token_logprobs or []) == 512
    for prompt, more in (
        ([5] * 513, wanted),
        ([5] * 512, {"model": "tiny"}),
        ([5] * 500, {"model": "tiny", "max_tokens": 13}),
    ):
        with pytest.raises(openai.BadRequestError, match="the model reads 512 tokens") as caught:
            client.completions.create(prompt=prompt, **more)
        assert caught.value.code == "context_length_exceeded"

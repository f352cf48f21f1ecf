"""Text completions: streamed, echoed, scored."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from web_kit import client_of, sentence_piece_tokenizer, served

from swarm_plugins.web import create_app


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


def test_a_completion_goes_on_with_the_text_of_the_prompt(model: Any) -> None:
    tokenizer = sentence_piece_tokenizer()
    prompt = [1, 3, 4]  # "Paris is"
    with served(create_app(model, tokenizer, name="tiny")) as url, client_of(url) as client:
        for token in (3, 5, 6):
            wanted: dict[str, Any] = {"model": "tiny", "prompt": prompt, "logit_bias": {str(token): 100}}
            wanted |= {"max_tokens": 2, "temperature": 0, "logprobs": 0}
            whole = client.completions.create(**wanted).choices[0]
            assert "Paris is" + whole.text == tokenizer.decode([*prompt, token, token], skip_special_tokens=True)
            assert whole.logprobs is not None
            assert "".join(whole.logprobs.tokens or []) == whole.text
            assert whole.logprobs.text_offset == [0, len(whole.text) // 2]
            streamed = client.completions.create(**wanted, stream=True)
            assert "".join(chunk.choices[0].text for chunk in streamed) == whole.text


@pytest.mark.parametrize("stop", ["<s>", ["x", "<s>"]])
def test_a_special_token_may_be_a_stop_text(client: openai.OpenAI, prompt: str, stop: Any) -> None:
    found = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, logit_bias={"1": 100}, stop=stop)
    assert (found.choices[0].finish_reason, found.choices[0].text) == ("stop", "")
    assert found.usage is not None
    assert found.usage.completion_tokens == 1

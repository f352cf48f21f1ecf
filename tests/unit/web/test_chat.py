"""OpenAI's own client against chat completions."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import torch
from web_kit import MESSAGES, expected


def test_an_answer_is_what_generate_gives_whole_or_streamed(client: openai.OpenAI, model: Any, tokenizer: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12)
    assert answer.choices[0].message.content == expected(model, tokenizer, 12)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert len(chunks[-1].model_extra["swarm"]["servers"]) == 2


def test_sampled_answers_repeat_with_a_seed(client: openai.OpenAI) -> None:
    def answers(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=12, temperature=1.0, seed=seed, n=3
        )
        return [choice.message.content for choice in answer.choices]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)
    assert len(set(answers(1))) > 1


@pytest.mark.parametrize("more", [{"temperature": 1e-30}, {"top_p": 0.0}, {"extra_body": {"top_k": 1}}])
def test_what_leaves_one_token_is_greedy(client: openai.OpenAI, model: Any, tokenizer: Any, more: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, **{"temperature": 1.0, **more}
    )
    assert answer.choices[0].message.content == expected(model, tokenizer, 12)


def test_bias_and_penalties_change_what_is_said(client: openai.OpenAI, tokenizer: Any) -> None:
    def tokens(**more: Any) -> list[str]:
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, **more
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        return [one.token for one in logprobs.content or []]

    wanted = tokenizer.decode([10])
    assert tokens(logit_bias={"10": 100}) == [wanted] * 12
    # The bias of 100 outweighs a penalty of 2 for each time but not one of the 100 others.
    assert set(tokens(logit_bias={"10": 100, "11": 98.5}, presence_penalty=2)) == {wanted, tokenizer.decode([11])}
    assert tokens(logit_bias={"10": 100, "11": 95}, frequency_penalty=2).count(wanted) < 12


def test_probabilities_are_the_models(client: openai.OpenAI, model: Any, tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = model(input_ids=ids).logits[0, -1].float().log_softmax(-1).topk(3)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    [first] = logprobs.content or []
    assert [one.token for one in first.top_logprobs] == [tokenizer.decode([token]) for token in best.indices.tolist()]
    assert [one.logprob for one in first.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert first.logprob == first.top_logprobs[0].logprob


def test_a_prompt_beyond_the_context_is_refused(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "a" * 600}]
    with pytest.raises(openai.BadRequestError, match="the model reads 512 tokens, and this request has 6") as caught:
        client.chat.completions.create(model="tiny", messages=long)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_the_second_turn_reads_only_what_is_new(client: openai.OpenAI, model: Any, tokenizer: Any) -> None:
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, temperature=1.0, seed=3)
    messages = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content}, *MESSAGES]
    second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens  # type: ignore[union-attr, operator]
    assert second.choices[0].message.content == expected(model, tokenizer, 8, messages)

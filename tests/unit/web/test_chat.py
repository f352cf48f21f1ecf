"""OpenAI's own client against chat completions."""

from __future__ import annotations

from typing import Any

import openai
import torch

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


def expected(model: Any, tokenizer: Any, new_tokens: int, messages: list[Any] = MESSAGES) -> str:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        tokens = model.generate(input_ids=ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def test_an_answer_is_what_generate_gives(client: openai.OpenAI, model: Any, tokenizer: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12)
    assert answer.choices[0].message.content == expected(model, tokenizer, 12)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12


def test_a_streamed_answer_is_the_same(client: openai.OpenAI, model: Any, tokenizer: Any) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected(model, tokenizer, 12)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 12
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


def test_the_second_turn_reads_only_what_is_new(client: openai.OpenAI, model: Any, tokenizer: Any) -> None:
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, temperature=1.0, seed=3)
    messages = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content}, *MESSAGES]
    second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens  # type: ignore[union-attr, operator]
    assert second.choices[0].message.content == expected(model, tokenizer, 8, messages)

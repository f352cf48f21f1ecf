"""Requests whose answers are measured, and answers that are checked against the local model's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from recipes.benchmarks.arms import TEXT, prompt_tokens
from swarm_plugins.errors import SwarmError
from swarm_plugins.speculation import Speculation

Requests = Sequence[tuple[str, str]]
"""Each with the first words of its answer, which may be none."""

CHAT: Requests = (
    ("Give me three tips for learning a new language.", ""),
    ("Write a polite email asking for a day off.", ""),
    ("What is the capital of France, and what is it known for?", ""),
)
_CODE = '''def mean_of_column(rows, column):
    """Returns the mean of a column, leaving out empty cells."""
    values = []
    for row in rows:
        cell = row[column].strip()
        if cell:
            values.append(float(cell))
    if not values:
        raise ValueError(f"column {column} has no numbers")
    return sum(values) / len(values)
'''
REPEATING: Requests = (
    (
        f"Add type hints to this function, and write the whole function again.\n```python\n{_CODE}```",
        '```python\ndef mean_of_column(rows: list, column: str) -> float:\n    """Returns the mean of a column,',
    ),
    (f"Correct the spelling of this text and write it again: {TEXT}", "We came over the pass"),
)
"""Requests whose answers repeat them."""

ANSWER = 3
"""Answers are so many times longer than other decoded pieces."""

Run = Callable[[PreTrainedModel, Speculation | None], float]
"""Answers all requests and returns the seconds per token, prompts included."""


def answering(directory: Path, local: PreTrainedModel, requests: Requests, new_tokens: int) -> Run:
    """Returns a function that answers requests greedily; tokens other than the local model's are a SwarmError.

    Args:
        directory: The model.
        local: The model here, which answers all requests at once.
        requests: What is answered.
        new_tokens: Tokens of an answer, at most.
    """

    def answer(model: PreTrainedModel, prompt: Tensor, speculation: Speculation | None) -> list[int]:
        output: Tensor = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            custom_generate=speculation,
        )
        tokens: list[int] = output[0, prompt.shape[1] :].tolist()
        return tokens

    prompts = _prompts(directory, local, requests)
    expected = [answer(local, prompt, None) for prompt in prompts]

    def run(model: PreTrainedModel, speculation: Speculation | None) -> float:
        started = time.perf_counter()
        said = [answer(model, prompt, speculation) for prompt in prompts]
        seconds = time.perf_counter() - started
        if said != expected:
            raise SwarmError(f"decoded {said}, expected the local model's {expected}")
        return seconds / sum(map(len, said))

    return run


def _prompts(directory: Path, local: PreTrainedModel, texts: Requests) -> list[Tensor]:
    """Returns the tokens of requests and first words of answers."""
    if not (directory / "tokenizer_config.json").is_file() or local.config.vocab_size <= 1000:
        sizes = range(len(texts))
        return [prompt_tokens(directory, length=8, vocab_size=local.config.vocab_size, shift=one) for one in sizes]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found = []
    for request, answer in texts:
        turn = [{"role": "user", "content": request}]
        text = request
        if tokenizer.chat_template is not None:
            text = str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
        found.append(torch.tensor([tokenizer(text + answer, add_special_tokens=False)["input_ids"]]))
    return found

"""Speculation at a distance: several tokens a trip, against one token a trip that the client carries."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from swarm_plugins.bench.arms import TEXT, prompt_tokens
from swarm_plugins.bench.figures import Figure
from swarm_plugins.bench.measure import Arm, interleave
from swarm_plugins.errors import SwarmError
from swarm_plugins.speculation import Speculation
from swarm_plugins.speculation.speculation import LOOKUP

_CHAT_GOAL = 2.5
_LOOKUP_GOAL = 3.0
_CHAT = (
    "Give me three tips for learning a new language.",
    "Write a polite email asking for a day off.",
    "What is the capital of France, and what is it known for?",
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
# A request, and the first words of an answer that repeats it.
_REPEATING = (
    (
        f"Add type hints to this function, and write the whole function again.\n```python\n{_CODE}```",
        '```python\ndef mean_of_column(rows: list, column: str) -> float:\n    """Returns the mean of a column,',
    ),
    (f"Correct the spelling of this text and write it again: {TEXT}", "We came over the pass"),
)

Run = Callable[[PreTrainedModel, Speculation | None], float]


def drafting_figures(
    directory: Path,
    local: PreTrainedModel,
    star: PreTrainedModel,
    pushing: PreTrainedModel,
    *,
    draft: PreTrainedModel | str,
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> list[Figure]:
    """Compares speculation over pushing servers with plain decoding by the client.

    Args:
        directory: The model.
        local: The model here: its tokens are expected.
        star: The swarm's, whose client carries hidden states.
        pushing: The swarm's, whose servers push.
        draft: Drafts for the chat texts; texts that repeat their prompt are looked up.
        new_tokens: Tokens of each answer, at most.
        rounds: Rounds whose medians are shown.
        progress: Shows how far it is.

    Raises:
        SwarmError: If tokens differ from the local model's.
    """
    figures: list[Figure] = []
    texts = {"chat": (_prompts(directory, local, [(text, "") for text in _CHAT]), draft, _CHAT_GOAL)}
    texts["text that repeats its prompt"] = (_prompts(directory, local, _REPEATING), LOOKUP, _LOOKUP_GOAL)
    if draft == LOOKUP:
        del texts["chat"]
    for name, (prompts, drafter, goal) in texts.items():
        run = _answers(local, prompts, new_tokens)
        speculation = Speculation(drafter)
        arms = [Arm(partial(run, model, one), (os.getpid(),)) for model, one in ((star, None), (pushing, speculation))]
        bar = progress.add_task(name, total=rounds + 1)
        interleave(arms, rounds=rounds, on_round=partial(progress.advance, bar))
        plain_s, drafted_s = (arm.median_s for arm in arms)
        kind = "looked up" if drafter == LOOKUP else "drafted"
        trip = speculation.counts.tokens_per_round
        figures += [
            Figure(
                name=f"{name}: a token by the client / {kind}, pushed",
                unit="ms",
                local=plain_s * 1e3,
                swarm=drafted_s * 1e3,
                ratio=plain_s / drafted_s,
                goal=goal,
                rounds=rounds,
            ),
            Figure(
                name=f"{name}: {kind}, tokens a trip",
                unit="tokens",
                local=1.0,
                swarm=trip,
                ratio=trip,
                goal=None if drafter == LOOKUP else _CHAT_GOAL,
                rounds=rounds,
            ),
        ]
    return figures


def _prompts(directory: Path, local: PreTrainedModel, texts: Sequence[tuple[str, str]]) -> list[Tensor]:
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


def _answers(local: PreTrainedModel, prompts: Sequence[Tensor], new_tokens: int) -> Run:
    """Returns what answers all prompts and returns the seconds per token; other tokens are a SwarmError."""

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

    expected = [answer(local, prompt, None) for prompt in prompts]

    def run(model: PreTrainedModel, speculation: Speculation | None) -> float:
        started = time.perf_counter()
        said = [answer(model, prompt, speculation) for prompt in prompts]
        seconds = time.perf_counter() - started
        if said != expected:
            raise SwarmError(f"decoded {said}, expected the local model's {expected}")
        return seconds / sum(map(len, said))

    return run

"""Logits processors of one request. Its draws are its own: transformers samples from the generator of the process.

In their order: probabilities are recorded as the model and its generation config (``repetition_penalty``) give them;
penalties, bias and grammar change logits; then temperature, top-k, top-p and min-p (transformers' own), and a draw, so
that the greedy choice is a sample. All take logits ``[B, vocabulary]`` and the tokens before them, ``[B, T]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm_plugins.talk.sampling import Sampling
from swarm_plugins.web.engine.request import Generation


class Recorder(LogitsProcessor):
    """Keeps the log probabilities of the step that is under way, ``[B, vocabulary]``."""

    def __init__(self) -> None:
        self.logprobs: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logprobs = scores.log_softmax(dim=-1)
        return scores


class Bias(LogitsProcessor):
    """Adds numbers to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.tokens = torch.tensor(list(bias), dtype=torch.long)
        self.values = torch.tensor(list(bias.values()))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.tokens] += self.values.to(scores)
        return scores


class Penalties(LogitsProcessor):
    """Lowers the logits of tokens that the answer has already, as OpenAI defines it: ``- c * frequency - presence``."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        said = input_ids[:, self.prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, said, torch.ones_like(said, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Sampler(LogitsProcessor):
    """Makes a sample of the softmax the largest: one random number a row, where noise would need one a token.

    Args:
        seed: Makes the samples repeatable. None: others each time.
    """

    def __init__(self, seed: int | None) -> None:
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        cumulative = scores.float().softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        uniform = torch.rand(len(scores), 1, generator=self.generator, dtype=torch.float64).to(scores.device)
        # The first token at which the sum exceeds the draw: never one of probability 0.
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        return scores.scatter(1, drawn.clamp_max(scores.shape[1] - 1), float("inf"))


def processors_of(
    request: Generation, prompt_tokens: int, *, recorder: Recorder | None, grammar: LogitsProcessor | None
) -> LogitsProcessorList:
    """Returns the processors of a request, in order."""
    chosen: list[Any] = [recorder] if recorder is not None else []
    if request.presence_penalty or request.frequency_penalty:
        chosen.append(Penalties(prompt_tokens, request.presence_penalty, request.frequency_penalty))
    if request.logit_bias:
        chosen.append(Bias(request.logit_bias))
    if grammar is not None:
        chosen.append(grammar)
    if not request.sampling.is_greedy:
        chosen += _warpers(request.sampling)
        chosen.append(Sampler(request.seed))
    return LogitsProcessorList(chosen)


def _warpers(sampling: Sampling) -> list[Any]:
    warpers: list[Any] = []
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers

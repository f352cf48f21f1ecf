"""Cost of trained models at equal held-out loss: parameters, latency, throughput (paper sections 4.1.4, 4.2, 5.5)."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recipes.study.arms import Plan
from recipes.study.corpus import Corpus
from recipes.study.training import Place

DENSE = ("dense", "dense-1.25x", "dense-1.5x")
SPARSE = ("standard", "pr-moe", "student-staged")
_COSTS = ("parameters", "latency_s", "latency_cpu_s", "tokens_per_s", "tokens_per_cpu_s")
PROMPT_TOKENS = 64


@dataclass
class _Speed:
    """Samples of one model: seconds and CPU seconds."""

    single: list[tuple[float, float]] = field(default_factory=list)
    """A token of one sequence."""
    batched: list[tuple[float, float]] = field(default_factory=list)
    """A token of many sequences."""


def measure(
    plan: Plan, seed: int, corpus: Corpus, place: Place, *, rounds: int, tokens: int, rows: int
) -> dict[str, Any]:
    """Measures the models of one seed in turns, so that what else the machine does slows all of them.

    Args:
        plan: The study.
        seed: Whose models; the speed does not depend on it.
        corpus: The text that is continued.
        place: Where the models are, and the device.
        rounds: Medians are over so many, after one that does not count.
        tokens: Decoded tokens of a round.
        rows: Sequences decoded together for the throughput.

    Returns:
        By arm: parameters; seconds and CPU seconds of a token of one sequence; tokens a second of ``rows`` sequences.
    """
    runs = plan.runs(seed, corpus.facts.digest)
    models = {arm: place.model(runs[arm]) for arm in (*DENSE, *SPARSE) if place.has_model(runs[arm])}
    speeds = {arm: _Speed() for arm in models}
    prompts = corpus.batch(seed, 0, rows, PROMPT_TOKENS - 1).to(place.device)
    for index in range(rounds + 1):
        for arm in list(models)[:: 1 if index % 2 == 0 else -1]:
            single, batched = (decode(models[arm], some, tokens, place.device) for some in (prompts[:1], prompts))
            if index:
                speeds[arm].single.append(single)
                speeds[arm].batched.append(batched)
    return {arm: _summary(models[arm], speed, rows) for arm, speed in speeds.items()}


def dense_at_equal_loss(losses: Mapping[str, float], costs: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Returns for each sparse model the cost of a dense one of the same loss, between two sizes that were trained.

    Args:
        losses: Held-out loss by arm.
        costs: Costs by arm, as `measure` returns them.

    Returns:
        By sparse arm: its loss and the costs, each 0 if no two dense models enclose that loss.
    """
    dense = [(losses[arm], costs[arm]) for arm in DENSE if arm in costs and arm in losses]  # by size
    found = {}
    for arm in SPARSE:
        if arm in costs and arm in losses:
            target = losses[arm]
            found[arm] = {"loss": target} | {cost: _between(dense, target, cost) for cost in _COSTS}
    return found


def add_cost(figures: dict[str, Any], costs: Mapping[str, Mapping[str, float]], how: Mapping[str, Any]) -> None:
    """Adds measured costs, and the dense models of equal loss, of the arms that a study's figures have, if any."""
    costs = {arm: cost for arm, cost in costs.items() if arm in figures["arms"]}
    if not costs:
        return
    measured = [figures["arms"][arm]["losses"] for arm in costs]
    # Seeds differ more than arms: only those that all of the models have.
    seeds = sorted(set.intersection(*map(set, measured)))
    losses = {arm: statistics.fmean(figures["arms"][arm]["losses"][seed] for seed in seeds) for arm in costs if seeds}
    figures["cost"] = {
        "how": dict(how),
        "seeds": seeds,
        "arms": {arm: {"loss": losses[arm], **costs[arm]} for arm in losses},
        "dense_at_equal_loss": dense_at_equal_loss(losses, costs),
    }


def _between(points: Sequence[tuple[float, Mapping[str, float]]], loss: float, cost: str) -> float:
    # Loss falls about linearly in the logarithm of the size.
    for (high, smaller), (low, larger) in itertools.pairwise(points):
        if low <= loss <= high:
            share = (high - loss) / (high - low) if high > low else 0.0
            return math.exp(math.log(smaller[cost]) * (1 - share) + math.log(larger[cost]) * share)
    return 0.0


@torch.no_grad()
def decode(model: nn.Module, prompt: Tensor, tokens: int, device: str) -> tuple[float, float]:
    """Returns wall and CPU seconds of a decoding step, greedy, with a cache; the prompt does not count."""
    wait: Callable[[], object] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    output = model(input_ids=prompt, use_cache=True)
    chosen = output.logits[:, -1:].argmax(-1)
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(tokens):
        output = model(input_ids=chosen, past_key_values=output.past_key_values, use_cache=True)
        chosen = output.logits[:, -1:].argmax(-1)
    wait()
    return (time.perf_counter() - wall) / tokens, (time.process_time() - cpu) / tokens


def _summary(model: nn.Module, speed: _Speed, rows: int) -> dict[str, float]:
    single, single_cpu = (statistics.median(column) for column in zip(*speed.single, strict=True))
    batched, batched_cpu = (statistics.median(column) for column in zip(*speed.batched, strict=True))
    return {
        "parameters": sum(one.numel() for one in model.parameters()),
        "latency_s": single,
        "latency_cpu_s": single_cpu,
        "tokens_per_s": rows / batched,
        "tokens_per_cpu_s": rows / batched_cpu,
    }

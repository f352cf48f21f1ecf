"""A token of several sessions in one forward, and one after another: processor time, without clients and network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from rich.progress import Progress

from recipes.benchmarks.figures import SwarmReport
from recipes.benchmarks.measure import Arm
from recipes.benchmarks.swarm import compare
from swarm_plugins.blocks import KVCache, Span, StepInputs, load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.partition import num_blocks_of

GOAL = 1.5


def bench_packs(
    directory: Path, *, num_sessions: int, prefix: int, new_tokens: int, rounds: int, progress: Progress
) -> SwarmReport:
    """Compares a new token of each session one after another with all of them packed.

    Sessions have from half of ``prefix`` tokens to all of them in their caches.
    """
    checkpoint = Checkpoint.open(directory)
    with closing(load_span(checkpoint, range(num_blocks_of(checkpoint.config)), dtype=torch.float32)) as span:
        lengths = [max(1, prefix - index * prefix // (2 * num_sessions)) for index in range(num_sessions)]
        apart, packed = (Arm(_timed(span, lengths, new_tokens, size), (os.getpid(),)) for size in (1, num_sessions))
        name = f"a token of {num_sessions} sessions"
        report = SwarmReport(
            command="benchmark packs", model=directory.resolve().name, headings=("one by one", "packed")
        )
        report.figures.append(compare(name, "ms", apart, packed, goal=GOAL, rounds=rounds, progress=progress))
        report.notes.append(f"processor time; packing: {span.packing.value}")
    return report


def _timed(span: Span, lengths: list[int], new_tokens: int, size: int) -> Callable[[], float]:
    """Returns what runs steps of ``size`` sessions each, and returns the seconds of a token of all sessions."""
    generator = torch.Generator().manual_seed(0)

    def step(cache: KVCache, num_new: int) -> StepInputs:
        hidden = torch.randn(1, num_new, span.spec.hidden_size, generator=generator)
        return StepInputs(cache=cache, blocks=span.blocks, hidden=hidden)

    caches = [span.new_cache(1, span.blocks) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        span.step([step(cache, length)])

    def run() -> float:
        seconds = 0.0
        for _ in range(new_tokens):
            steps = [step(cache, 1) for cache in caches]
            started = time.process_time()
            for first in range(0, len(steps), size):
                span.step(steps[first : first + size])
            seconds += time.process_time() - started
            for cache, length in zip(caches, lengths, strict=True):
                cache.crop(length)
        return seconds / new_tokens

    return run

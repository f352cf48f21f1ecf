"""How fast a span is here, measured in a second or two before it is announced."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.blocks.types import SpanRunner, StepInputs

__all__ = ["Speed", "measure"]

_BUDGET_S = 1.0
_MAX_ROUNDS = 5
_FORWARD_TOKENS = 64


class Speed(NamedTuple):
    """Speed of a span, per block."""

    throughput: float
    """Tokens per second through one block in a batched forward."""
    decode_s: float
    """Seconds of one single-token step through one block."""


def measure(
    runner: SpanRunner, hidden_size: int, dtype: torch.dtype, device: torch.device, *, max_tokens: int
) -> Speed:
    """Runs the span on random hidden states; for calls on the compute thread, or before it starts."""
    blocks = range(runner.start, runner.end)
    generator = torch.Generator().manual_seed(0)
    num_tokens = max(1, min(_FORWARD_TOKENS, max_tokens))
    hidden = torch.randn(1, num_tokens, hidden_size, generator=generator).to(device, dtype)
    with torch.inference_mode():
        cache = runner.new_cache(1, blocks)
        try:
            step = StepInputs(cache=cache, blocks=blocks, hidden=hidden[:, :1])
            decode_s = _median_s(lambda: runner.step([step]), device)
        finally:
            cache.close()
        forward_s = _median_s(lambda: runner.forward(SpanInputs(blocks=blocks, hidden=hidden)), device)
    return Speed(throughput=num_tokens * len(blocks) / forward_s, decode_s=decode_s / len(blocks))


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    """Returns the median time of a few runs after one to warm up, within a time budget."""
    run()
    times: list[float] = []
    while len(times) < _MAX_ROUNDS and (not times or sum(times) < _BUDGET_S):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return max(statistics.median(times), 1e-9)

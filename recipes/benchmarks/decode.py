"""One sequence, one token at a time: the speed of a chat."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

from recipes.benchmarks.arms import decode, local_model, prompt_tokens
from recipes.benchmarks.figures import Figure, SwarmReport
from recipes.benchmarks.measure import Arm, private_bytes
from recipes.benchmarks.swarm import compare, swarm_model, weight_bytes
from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm

GOALS = {1: 1.0, 3: 0.95}
MEMORY_GOAL_GB = 0.6


def bench_decode(
    directory: Path, *, servers: Sequence[int], prefix_tokens: int, new_tokens: int, rounds: int, progress: Progress
) -> SwarmReport:
    """Compares greedy decoding of one sequence after a prefix.

    Raises:
        SwarmError: If the swarm's tokens differ from the local model's.
    """
    report = SwarmReport(command="benchmark decode", model=directory.resolve().name)
    local = local_model(directory)
    prompt = prompt_tokens(directory, length=prefix_tokens, vocab_size=local.config.vocab_size)
    expected = decode(local, prompt, new_tokens).tokens
    here = decoding_round(local, prompt, new_tokens, expected)
    for count in servers:
        name = f"decode, batch 1, {count} server{'s' if count > 1 else ''}"
        with LocalSwarm(directory, num_servers=count, dtype="float32", threads=1) as swarm:
            if count == 1:
                report.figures.append(_idle_memory(swarm, local))
            there = decoding_round(swarm_model(directory, swarm.initial_peers), prompt, new_tokens, expected)
            arms = Arm(here, (os.getpid(),)), Arm(there, (os.getpid(), *(server.pid for server in swarm.servers)))
            goal = GOALS.get(count)
            report.figures.append(compare(name, "ms/token", *arms, goal=goal, rounds=rounds, progress=progress))
    report.notes.append(f"prefix {prefix_tokens} tokens, {new_tokens} new ones; all tokens equal to the local model's")
    return report


def decoding_round(model: PreTrainedModel, prompt: Tensor, new_tokens: int, expected: list[int]) -> Callable[[], float]:
    """Returns a round that decodes and returns the seconds per token; other tokens are a SwarmError."""

    def run() -> float:
        decoded = decode(model, prompt, new_tokens)
        if decoded.tokens != expected:
            raise SwarmError(f"decoded {decoded.tokens}, expected the local model's {expected}")
        return decoded.seconds_per_token

    return run


def _idle_memory(swarm: LocalSwarm, local: PreTrainedModel) -> Figure:
    server = swarm.servers[0]
    used = (private_bytes([server.pid]) - weight_bytes(local, range(*server.span))) / 1e9
    return Figure(
        name="idle server, without its weights",
        unit="GB",
        local=None,
        swarm=used,
        ratio=used,
        goal=MEMORY_GOAL_GB,
        goal_is_upper_bound=True,
    )

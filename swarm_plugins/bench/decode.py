"""One sequence, one token at a time: what a person who chats with the model feels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

from swarm_plugins import LocalSwarm
from swarm_plugins.bench.arms import decode, local_model, prompt_tokens, swarm_model, weight_bytes
from swarm_plugins.bench.figures import Figure, Report
from swarm_plugins.bench.measure import Arm, interleave, private_bytes
from swarm_plugins.errors import SwarmError

__all__ = ["bench_decode"]

GOALS = {1: 0.95, 3: 0.90}
MEMORY_GOAL_GB = 0.6
PREFIX_TOKENS = 128


def bench_decode(
    report: Report, directory: Path, *, servers: Sequence[int], new_tokens: int, rounds: int, progress: Progress
) -> None:
    """Compares greedy decoding of one sequence, after a prefix of 128 tokens.

    Raises:
        SwarmError: If the swarm's tokens differ from the local model's.
    """
    local = local_model(directory)
    prompt = prompt_tokens(directory, length=PREFIX_TOKENS, vocab_size=local.config.vocab_size)
    expected = decode(local, prompt, new_tokens).tokens
    for num_servers in servers:
        bar = progress.add_task(f"decode, {num_servers} servers", total=rounds + 1)
        with LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1) as swarm:
            if num_servers == 1:
                report.figures.append(_idle_memory(swarm, local))
            remote = swarm_model(directory, swarm.initial_peers)
            here = Arm(_round(local, prompt, new_tokens, expected), (os.getpid(),))
            there = Arm(
                _round(remote, prompt, new_tokens, expected), (os.getpid(), *(server.pid for server in swarm.servers))
            )
            interleave([here, there], rounds=rounds, on_round=partial(progress.advance, bar))
        report.figures.append(
            Figure(
                name=f"decode, batch 1, {num_servers} server{'s' if num_servers > 1 else ''}",
                unit="ms/token",
                local=here.median_s * 1e3,
                swarm=there.median_s * 1e3,
                ratio=here.median_s / there.median_s,
                goal=GOALS.get(num_servers),
                cpu_ratio=there.cpu_ratio(here),
                rounds=rounds,
            )
        )
    report.notes.append(f"prefix {PREFIX_TOKENS} tokens, {new_tokens} new ones; all tokens equal to the local model's")


def _round(model: PreTrainedModel, prompt: Tensor, new_tokens: int, expected: list[int]) -> Callable[[], float]:
    def run() -> float:
        decoded = decode(model, prompt, new_tokens)
        if decoded.tokens != expected:
            raise SwarmError(f"decoded {decoded.tokens}, but the local model says {expected}")
        return decoded.seconds_per_token

    return run


def _idle_memory(swarm: LocalSwarm, local: PreTrainedModel) -> Figure:
    server = swarm.servers[0]
    weights = weight_bytes(local, range(*server.span))
    beside = (private_bytes([server.pid]) - weights) / 1e9
    return Figure(
        name="idle server beside its weights",
        unit="GB",
        local=None,
        swarm=beside,
        ratio=beside,
        goal=MEMORY_GOAL_GB,
        goal_is_upper_bound=True,
    )

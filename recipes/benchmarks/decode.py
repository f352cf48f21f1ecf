"""One sequence, one token at a time: the speed of a chat."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import Progress
from torch import Tensor, nn
from transformers import PreTrainedModel

from recipes.benchmarks.arms import decode, local_model, prompt_tokens
from recipes.benchmarks.figures import Figure, SwarmReport
from recipes.benchmarks.measure import Arm, private_bytes
from recipes.benchmarks.swarm import compare, swarm_model, weight_bytes
from swarm_plugins import insert_module
from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm

GOALS = {1: 1.0, 3: 0.95}
MEMORY_GOAL_GB = 0.6
PREFIX_TOKENS = 600
PREFIX_GOAL = 0.25
"""Of the time to the first token of a session that begins as an earlier one, over that one's."""


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
            remote = swarm_model(directory, swarm.initial_peers)
            if count == 1:
                report.figures.append(_second_session(directory, remote, rounds=rounds, progress=progress))
            there = decoding_round(remote, prompt, new_tokens, expected)
            everyone = (os.getpid(), *(server.pid for server in swarm.servers))
            arms = Arm(here, (os.getpid(),)), Arm(there, everyone)
            goal = GOALS.get(count)
            report.figures.append(compare(name, "ms/token", *arms, goal=goal, rounds=rounds, progress=progress))
            if count > 1:
                split = swarm_model(directory, swarm.initial_peers)
                insert_module(split, "between", nn.Identity(), before=split.config.num_hidden_layers // 2)
                arms = arms[1], Arm(decoding_round(split, prompt, new_tokens, expected), everyone)
                name += ", a module between blocks over none"
                report.figures.append(compare(name, "ms/token", *arms, rounds=rounds, progress=progress))
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


def _second_session(directory: Path, model: PreTrainedModel, *, rounds: int, progress: Progress) -> Figure:
    """Times the first token of two sessions with one prompt, a new one in each round."""
    times: tuple[list[float], list[float]] = [], []
    bar = progress.add_task("second session", total=rounds)
    for number in range(rounds):
        vocab_size = model.config.vocab_size
        prompt = prompt_tokens(directory, length=PREFIX_TOKENS, vocab_size=vocab_size, shift=1 + number)
        for seconds in times:
            started = time.monotonic()
            decode(model, prompt, 1)
            seconds.append(time.monotonic() - started)
        progress.advance(bar)
    first, second = (statistics.median(seconds) for seconds in times)
    return Figure(
        name=f"first token after {PREFIX_TOKENS} tokens, a second session over the first",
        unit="ms",
        local=first * 1e3,
        swarm=second * 1e3,
        ratio=second / first,
        goal=PREFIX_GOAL,
        goal_is_upper_bound=True,
        rounds=rounds,
    )


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

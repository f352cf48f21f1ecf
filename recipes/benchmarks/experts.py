"""Remote experts: what it costs that a model's experts are computed by other processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from recipes.benchmarks.arms import decode, frozen, local_model, prompt_tokens
from recipes.benchmarks.decode import decoding_round
from recipes.benchmarks.figures import SwarmReport
from recipes.benchmarks.measure import Arm
from recipes.benchmarks.swarm import compare
from recipes.benchmarks.train import training_figures
from swarm_plugins.errors import ConfigError
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.moe import is_fused_experts
from swarm_plugins.remote_experts.load import load_remote_experts

PREFIX_TOKENS = 64


def bench_experts(
    directory: Path,
    *,
    holders: Sequence[int],
    slices: Sequence[int],
    rows: int,
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> SwarmReport:
    """Compares a model whose experts are at holders on this machine with the same model alone.

    Args:
        directory: A mixture of experts.
        holders: Numbers of holders that share the experts evenly.
        slices: Numbers of holders that have an equal part of each expert.
        rows: Rows of the larger passes.
        new_tokens: Tokens decoded in each round.
        rounds: Rounds behind the medians.
        progress: Shows how far it is.

    Raises:
        SwarmError: If tokens, logits or gradients differ from the local model's.
    """
    report = SwarmReport(command="benchmark experts", model=directory.resolve().name)
    local = local_model(directory)
    num_experts = [int(one.num_experts) for one in local.modules() if is_fused_experts(one)]  # type: ignore[arg-type]
    if not num_experts or min(num_experts) != max(num_experts):
        raise ConfigError(
            f"{directory} has layers with {sorted(set(num_experts))} experts: give a model with one number"
        )
    num_layers, blocks = len(num_experts), (0, int(local.config.num_hidden_layers))
    for count in holders:
        if not 1 <= count <= num_experts[0]:
            raise ConfigError(f"{count} holders cannot share {num_experts[0]} experts: give 1 to {num_experts[0]}")
        cuts = [index * num_experts[0] // count for index in range(count + 1)]
        shares = [f"{first}:{last}" for first, last in pairwise(cuts)]
        label = f"{count} holder{'s' if count > 1 else ''}"
        with LocalSwarm(directory, spans=[blocks] * count, experts=shares, dtype="float32", threads=1) as swarm:
            _compare(report, directory, local, swarm, label, num_layers, rows, new_tokens, rounds, progress)
    for count in slices:
        parts = [f"{index}/{count}" for index in range(count)]
        everything = [f"0:{num_experts[0]}"] * count
        with LocalSwarm(
            directory, spans=[blocks] * count, experts=everything, slices=parts, dtype="float32", threads=1
        ) as swarm:
            _compare(report, directory, local, swarm, f"{count} slices", num_layers, rows, new_tokens, rounds, progress)
    report.notes.append(
        f"prefix {PREFIX_TOKENS} tokens, {new_tokens} new ones; all experts of {num_layers} layers at holders, "
        "everything else in the client; tokens equal to the local model's, logits and gradients within rounding"
    )
    return report


def _compare(
    report: SwarmReport,
    directory: Path,
    local: PreTrainedModel,
    swarm: LocalSwarm,
    label: str,
    num_layers: int,
    rows: int,
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> None:
    remote = frozen(load_remote_experts(directory, initial_peers=swarm.initial_peers, dtype=torch.float32))
    prompt = prompt_tokens(directory, length=PREFIX_TOKENS, vocab_size=local.config.vocab_size)
    expected = decode(local, prompt, new_tokens).tokens
    here, there = (decoding_round(model, prompt, new_tokens, expected) for model in (local, remote))
    pids = tuple(server.pid for server in swarm.servers)
    arms = Arm(here, (os.getpid(),)), Arm(there, (os.getpid(), *pids))
    report.figures.append(
        compare(f"decode, batch 1, {label}", "ms/token", *arms, goal=None, rounds=rounds, progress=progress)
    )
    hop_ms = (arms[1].median_s - arms[0].median_s) * 1e3 / num_layers
    passes = rounds * new_tokens * num_layers
    cpu_ms = (arms[1].cpu_s - arms[0].cpu_s) * 1e3 / passes
    report.notes.append(
        f"{label}: {hop_ms:.2f} ms more for each token and layer with experts, and {cpu_ms:.2f} ms more CPU time"
    )
    works = {("forward", 1): None, ("forward", rows): None, ("forward + backward", rows): None}
    report.figures += training_figures(
        directory, local, remote, pids, works, rounds=rounds, progress=progress, suffix=f", {label}"
    )

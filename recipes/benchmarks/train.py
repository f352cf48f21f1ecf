"""Forward and backward of a batch: what a training step costs, apart from the optimizer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor, nn
from transformers import PreTrainedModel

from recipes.benchmarks.arms import local_model, prompt_tokens
from recipes.benchmarks.figures import Figure, SwarmReport
from recipes.benchmarks.measure import Arm
from recipes.benchmarks.swarm import compare, swarm_model
from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.moe import is_fused_experts

GOALS = {("forward", 1): 0.85, ("forward", 8): 0.95, ("forward + backward", 1): 0.80, ("forward + backward", 8): 0.95}
EAGER_GOALS = {("forward", 8): 1.2, ("forward + backward", 8): 1.5}
"""Over transformers' eager experts."""
TOKENS = 64
PROMPT_TOKENS = 8
# Float32 gradients, summed in the same order on both sides; only the order inside kernels may differ.
TOLERANCE = 1e-5


def bench_train(directory: Path, *, num_servers: int, rounds: int, progress: Progress) -> SwarmReport:
    """Compares forward, and forward with backward of a soft prompt, for batches of 1 and 8 times 64 tokens.

    A mixture of experts is also compared with transformers' eager experts; its default are grouped ones.

    Raises:
        SwarmError: If logits or gradients differ from the local model's.
    """
    report = SwarmReport(command="benchmark train", model=directory.resolve().name)
    local = local_model(directory)
    with LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1) as swarm:
        remote = swarm_model(directory, swarm.initial_peers)
        pids = tuple(server.pid for server in swarm.servers)
        report.figures += training_figures(directory, local, remote, pids, GOALS, rounds=rounds, progress=progress)
        if any(is_fused_experts(module) for module in local.modules()):
            local.set_experts_implementation("eager")
            report.figures += training_figures(
                directory, local, remote, pids, EAGER_GOALS, rounds=rounds, progress=progress, suffix=", eager experts"
            )
    report.notes.append(
        f"{num_servers} server(s); backward of a soft prompt of {PROMPT_TOKENS} of the {TOKENS} tokens; "
        f"logits and gradients within {TOLERANCE:g} of the local model's"
    )
    return report


def training_figures(
    directory: Path,
    local: PreTrainedModel,
    remote: PreTrainedModel,
    pids: Sequence[int],
    works: Mapping[tuple[str, int], float | None],
    *,
    rounds: int,
    progress: Progress,
    suffix: str = "",
) -> list[Figure]:
    """Compares works, each ``forward`` or ``forward + backward`` with a number of rows, with its goal if it has one.

    Raises:
        SwarmError: If logits or gradients differ from the local model's.
    """
    figures = []
    for (what, batch), goal in works.items():
        work = _logits if what == "forward" else prompt_gradient
        tokens = batch_of_texts(directory, batch, local.config.vocab_size)
        ours, theirs = work(local, tokens), work(remote, tokens)
        check_equal(what, ours(), theirs())
        arms = Arm(timed_run(ours), (os.getpid(),)), Arm(timed_run(theirs), (os.getpid(), *pids))
        name = f"{what}, {batch} x {TOKENS} tokens{suffix}"
        figures.append(compare(name, "ms", *arms, goal=goal, rounds=rounds, progress=progress))
    return figures


def _logits(model: PreTrainedModel, tokens: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits

    return run


def prompt_gradient(model: PreTrainedModel, tokens: Tensor) -> Callable[[], Tensor]:
    """Returns a step that computes the gradient of a soft prompt before ``[B, S]`` tokens, ``[1, P, D]``."""
    embedded = model.get_input_embeddings()(tokens).detach()
    rest = embedded[:, PROMPT_TOKENS:]
    prompt = nn.Parameter(embedded[:1, :PROMPT_TOKENS].clone())

    def run() -> Tensor:
        inputs = torch.cat([prompt.expand(len(tokens), -1, -1), rest], dim=1)  # [B, S, D]
        loss = model(inputs_embeds=inputs, labels=tokens, use_cache=False).loss
        return torch.autograd.grad(loss, prompt)[0]

    return run


def batch_of_texts(directory: Path, batch: int, vocab_size: int) -> Tensor:
    """Returns ``[batch, TOKENS]`` tokens."""
    rows = [prompt_tokens(directory, length=TOKENS, vocab_size=vocab_size, shift=row) for row in range(batch)]
    return torch.cat(rows)  # [B, S]


def timed_run(run: Callable[[], Tensor]) -> Callable[[], float]:
    """Returns a function that runs this one and returns its seconds."""

    def timed() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return timed


def check_equal(what: str, ours: Tensor, theirs: Tensor) -> None:
    """Raises SwarmError if a result of the swarm is not the local model's, but for the order of sums."""
    error = float((ours - theirs).norm() / ours.norm())
    if not error <= TOLERANCE:
        raise SwarmError(
            f"{what}: the swarm's result differs by {error:.2e} from the local model's, over {TOLERANCE:g}"
        )

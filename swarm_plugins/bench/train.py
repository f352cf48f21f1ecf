"""Forward and backward of a batch: what a training step costs, apart from the optimizer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_plugins import LocalSwarm
from swarm_plugins.bench.arms import local_model, prompt_tokens, swarm_model
from swarm_plugins.bench.figures import Figure, Report
from swarm_plugins.bench.measure import Arm, interleave
from swarm_plugins.errors import SwarmError

__all__ = ["bench_train"]

GOALS = {("forward", 1): 0.85, ("forward", 8): 0.95, ("forward + backward", 1): 0.80, ("forward + backward", 8): 0.90}
TOKENS = 64
PROMPT_TOKENS = 8
# float32 gradients, summed in the same order on both sides; what the parts may differ by is the order of their kernels.
TOLERANCE = 1e-5


def bench_train(report: Report, directory: Path, *, num_servers: int, rounds: int, progress: Progress) -> None:
    """Compares forward, and forward with backward of a soft prompt, for batches of 1 and 8 times 64 tokens.

    Raises:
        SwarmError: If logits or gradients differ from the local model's.
    """
    local = local_model(directory)
    with LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1) as swarm:
        remote = swarm_model(directory, swarm.initial_peers)
        pids = (os.getpid(), *(server.pid for server in swarm.servers))
        for (what, batch), goal in GOALS.items():
            bar = progress.add_task(f"{what}, {batch} x {TOKENS}", total=rounds + 1)
            work = _Forward if what == "forward" else _ForwardBackward
            tokens = _batch(directory, batch, local.config.vocab_size)
            ours, theirs = work(local, tokens), work(remote, tokens)
            _check_equal(what, ours.result(), theirs.result())
            here, there = Arm(_timed(ours.result), (os.getpid(),)), Arm(_timed(theirs.result), pids)
            interleave([here, there], rounds=rounds, on_round=partial(progress.advance, bar))
            report.figures.append(
                Figure(
                    name=f"{what}, {batch} x {TOKENS} tokens",
                    unit="ms",
                    local=here.median_s * 1e3,
                    swarm=there.median_s * 1e3,
                    ratio=here.median_s / there.median_s,
                    goal=goal,
                    cpu_ratio=there.cpu_ratio(here),
                    rounds=rounds,
                )
            )
    report.notes.append(
        f"{num_servers} server(s); backward of a soft prompt of {PROMPT_TOKENS} of the {TOKENS} tokens; "
        f"logits and gradients within {TOLERANCE:g} of the local model's"
    )


class _Forward:
    """Logits of a batch, without a graph."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor) -> None:
        self.model = model
        self.tokens = tokens

    def result(self) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=self.tokens, use_cache=False).logits
        return logits


class _ForwardBackward:
    """Gradient of a soft prompt."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor) -> None:
        self.model = model
        self.tokens = tokens
        embedded = model.get_input_embeddings()(tokens).detach()
        self.rest = embedded[:, PROMPT_TOKENS:]
        self.prompt = nn.Parameter(embedded[:1, :PROMPT_TOKENS].clone())

    def result(self) -> Tensor:
        inputs = torch.cat([self.prompt.expand(len(self.tokens), -1, -1), self.rest], dim=1)  # [B, S, D]
        loss = self.model(inputs_embeds=inputs, labels=self.tokens, use_cache=False).loss
        return torch.autograd.grad(loss, self.prompt)[0]


def _batch(directory: Path, batch: int, vocab_size: int) -> Tensor:
    rows = [prompt_tokens(directory, length=TOKENS, vocab_size=vocab_size, shift=row) for row in range(batch)]
    return torch.cat(rows)  # [B, S]


def _timed(run: Callable[[], Tensor]) -> Callable[[], float]:
    def timed() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return timed


def _check_equal(what: str, ours: Tensor, theirs: Tensor) -> None:
    error = float((ours - theirs).norm() / ours.norm())
    if not error <= TOLERANCE:
        raise SwarmError(
            f"{what}: the swarm's result differs by {error:.2e} from the local model's, over {TOLERANCE:g}"
        )

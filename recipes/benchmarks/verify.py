"""The cost of spot checks at their floor: the same calls without and with receipts and checks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from swarm_plugins.backbone.auto import AutoSwarmModelForCausalLM
from swarm_plugins.backbone.stack import RemoteStack
from recipes.benchmarks.arms import check_directory, decode, frozen, prompt_tokens
from recipes.benchmarks.figures import SwarmReport
from recipes.benchmarks.measure import Arm
from recipes.benchmarks.swarm import compare
from swarm_plugins.client import SwarmConfig
from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.verification import Verifier
from swarm_plugins.book.rules import Rules
from swarm_plugins.book.judging import When
from swarm_plugins.verification.checker import Checker, Server

GOAL = 0.97
_TOKENS = 64
_NEW_TOKENS = 32
_EVERY = round(1 / Rules().least_checked)


class _AtTheFloor(Checker):
    """Checks every fiftieth call in the background: the share of long known servers, without chance."""

    _calls = 0

    def when(self, server: Server) -> When:
        self._calls += 1
        return "after" if self._calls % _EVERY == _EVERY // 2 else "never"


def bench_verify(directory: Path, *, num_servers: int, rounds: int, progress: Progress) -> SwarmReport:
    """Compares fifty forwards of 1 x 64 tokens, fifty with backward, and decoding, without and with checks.

    Raises:
        SwarmError: If a server fails, or a check finds an honest server wrong.
    """
    check_directory(directory)
    report = SwarmReport(
        command="benchmark verify", model=directory.resolve().name, headings=("without checks", "with checks")
    )
    with LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1) as swarm:
        models = [_model(directory, swarm, verify) for verify in ("off", "on")]
        verifier = models[1][1]
        pids = (os.getpid(), *(server.pid for server in swarm.servers))
        tokens = prompt_tokens(directory, length=_TOKENS, vocab_size=models[0][0].config.vocab_size)
        for name, work in (("forward", _forward), ("forward + backward", _gradient)):
            arms = [Arm(_timed(partial(work, model, tokens), verifier), pids) for model, _ in models]
            title = f"{_EVERY} x {name}, 1 x {_TOKENS} tokens"
            report.figures.append(compare(title, "ms", *arms, goal=GOAL, rounds=rounds, progress=progress))
        steps = [Arm(partial(_seconds_per_token, model, tokens), pids) for model, _ in models]
        report.figures.append(compare("a decoded token", "ms", *steps, goal=GOAL, rounds=rounds, progress=progress))
        checked = sum(verifier.checker.checked.values()) if verifier is not None else 0
    report.notes.append(f"{num_servers} server(s); one call in {_EVERY} is computed again here, {checked} in all")
    return report


def _model(directory: Path, swarm: LocalSwarm, verify: str) -> tuple[PreTrainedModel, Verifier | None]:
    config = SwarmConfig(verify="on" if verify == "on" else "off")
    peers = list(swarm.initial_peers)
    load = AutoSwarmModelForCausalLM.from_pretrained
    model = frozen(load(directory, initial_peers=peers, swarm=config, dtype=torch.float32))
    stacks = (getattr(module, "swarm_stack", None) for module in model.modules())
    stack = next(one for one in stacks if isinstance(one, RemoteStack))
    verifier = stack.remote.servers.guard
    if not isinstance(verifier, Verifier):
        return model, None
    # Before the first call: from here on, calls are counted instead of chosen by chance.
    verifier.checker.__class__ = _AtTheFloor
    return model, verifier


def _timed(run: Callable[[], object], verifier: Verifier | None) -> Callable[[], float]:
    def timed() -> float:
        started = time.perf_counter()
        for _ in range(_EVERY):
            run()
        # A check that outlives the calls is part of their cost.
        while verifier is not None and verifier.checker.is_busy:
            time.sleep(0.001)
        seconds = time.perf_counter() - started
        if verifier is not None and verifier.checker.quarantine.peers():
            raise SwarmError("a check has found an honest server wrong: its warning says by how much")
        return seconds

    return timed


def _forward(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)


def _seconds_per_token(model: PreTrainedModel, prompt: torch.Tensor) -> float:
    return decode(model, prompt, _NEW_TOKENS).seconds_per_token


def _gradient(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    model(inputs_embeds=embedded, labels=tokens, use_cache=False).loss.backward()

"""One sequence, one token at a time, through servers that keep their weights in several widths."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from recipes.benchmarks.arms import decode, frozen, local_model, prompt_tokens
from recipes.benchmarks.figures import Report, goal_cells, new_table
from recipes.benchmarks.llama_cpp import LlamaCpp, check_llama_cpp
from recipes.benchmarks.measure import Arm, take_turns
from recipes.benchmarks.train import batch_of_texts, prompt_gradient, timed_run
from swarm_plugins.backbone.auto import AutoSwarmModelForCausalLM
from swarm_plugins.client import SwarmConfig, connect
from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.local_swarm import LocalSwarm

GOALS = {"float32": 0.70, "bfloat16": 0.45, "int8": 0.40, "int4": 0.40}
"""Most milliseconds of a token over transformers' in float32, by width."""
_BATCH = 8
"""Rows of a training step."""
_STEPS = 32
"""Tokens whose logits are compared."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A server's figures for one width."""

    width: str
    ms_per_token: float
    over_local: float
    cpu_over_local: float | None
    prompt_over_local: float
    """Time of the first token, which includes the prompt."""
    training_over_local: float | None
    """Time of a forward and backward of a soft prompt, 8 x 64 tokens. None: not looked at."""
    divergence: float | None
    """Mean KL divergence of the next token's distribution from the local model's, in nats. None: not looked at."""
    is_equal: bool | None
    """Whether all decoded tokens are the local model's. None: not looked at."""


@dataclass(kw_only=True)
class WidthsReport(Report):
    """Figures by width."""

    local_ms: float
    figures: list[Measured] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields one table with a row per width."""
        headings = (
            "width",
            "ms/token",
            "over local",
            "goal",
            "",
            "CPU over local",
            "prompt over local",
            "training over local",
            "KL",
            "tokens",
        )
        table = new_table(f"{self.command}: {self.model}", headings, names=("width", "", "tokens"))
        table.add_row("transformers, float32", f"{self.local_ms:.1f}", "1.00", "", "", "1.00", "1.00", "1.00", "", "")
        for one in self.figures:
            goal = GOALS.get(one.width)
            reached = None if goal is None else one.over_local <= goal
            table.add_row(
                one.width,
                f"{one.ms_per_token:.1f}",
                f"{one.over_local:.2f}",
                *goal_cells(None if goal is None else f"{goal:.2f}", reached, is_upper_bound=True),
                "" if one.cpu_over_local is None else f"{one.cpu_over_local:.2f}",
                f"{one.prompt_over_local:.2f}",
                "" if one.training_over_local is None else f"{one.training_over_local:.2f}",
                "" if one.divergence is None else f"{one.divergence:.1e}",
                {True: "equal", False: "differ", None: ""}[one.is_equal],
            )
        yield table


class _Side:
    """A model that decodes; keeps what its rounds took."""

    def __init__(self, model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> None:
        self._run = partial(decode, model, prompt, new_tokens)
        self.model = model
        self.prompt_s: list[float] = []
        self.tokens: list[int] = []

    def round(self) -> float:
        """Decodes; returns the seconds per token."""
        start = time.monotonic()
        decoded = self._run()
        self.prompt_s.append(decoded.times[0] - start)
        self.tokens = decoded.tokens
        return decoded.seconds_per_token


class _OtherSide:
    """llama.cpp with a file; keeps what its prompts took."""

    def __init__(self, llama: LlamaCpp, prompt: Tensor, new_tokens: int) -> None:
        self._run = partial(llama.decode, prompt[0].tolist(), new_tokens)
        self.prompt_s: list[float] = []

    def round(self) -> float:
        """Decodes; returns the seconds per token."""
        decoded = self._run()
        self.prompt_s.append(decoded.prompt_s)
        return decoded.seconds_per_token


def bench_widths(
    directory: Path,
    *,
    widths: Sequence[str],
    gguf: Sequence[Path],
    prefix_tokens: int,
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> WidthsReport:
    """Compares greedy decoding of one sequence after a prefix, through one server for each width.

    ``gguf`` has files of the same model that llama.cpp decodes in turns with them.

    Raises:
        ConfigError: If a width is unknown, or a file does not exist.
        MissingExtraError: If llama.cpp is asked for and not installed.
        SwarmError: If a float32 server's tokens differ from the local model's.
    """
    check_llama_cpp(gguf)
    options = {width: _options(width) for width in widths}
    local = local_model(directory)
    prompt = prompt_tokens(directory, length=prefix_tokens, vocab_size=local.config.vocab_size)
    here = _Side(local, prompt, new_tokens)
    arms = [Arm(here.round, (os.getpid(),))]
    with ExitStack() as stack:
        sides = {}
        for width, chosen in options.items():
            swarm = stack.enter_context(LocalSwarm(directory, num_servers=1, threads=1, **chosen))
            dtype = getattr(torch, chosen["dtype"])
            connection = connect(swarm.initial_peers, SwarmConfig())
            model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=connection, dtype=dtype)
            sides[width] = _Side(frozen(model), prompt, new_tokens)
            arms.append(Arm(sides[width].round, (os.getpid(), *(server.pid for server in swarm.servers))))
        others = {}
        for file in gguf:
            llama = stack.enter_context(LlamaCpp(file))
            llama.open(prefix_tokens + new_tokens)
            others[file] = _OtherSide(llama, prompt, new_tokens)
            arms.append(Arm(others[file].round, (llama.pid,)))
        take_turns("widths", arms, rounds=rounds, progress=progress)
        report = WidthsReport(
            command="benchmark widths", model=directory.resolve().name, local_ms=arms[0].median_s * 1e3
        )
        tokens = batch_of_texts(directory, _BATCH, local.config.vocab_size)
        models = (local, *(side.model for side in sides.values()))
        steps = [
            Arm(timed_run(prompt_gradient(model, tokens)), arm.pids) for model, arm in zip(models, arms, strict=False)
        ]
        take_turns("training", steps, rounds=rounds, progress=progress)
        text = torch.cat([prompt, torch.tensor([here.tokens])], dim=1)
        expected = _log_probabilities(local, text)
        for (width, side), arm, step in zip(sides.items(), arms[1:], steps[1:], strict=False):
            if width == "float32" and side.tokens != here.tokens:
                raise SwarmError(f"decoded {side.tokens}, expected the local model's {here.tokens}")
            found = _log_probabilities(side.model, text)
            report.figures.append(
                replace(
                    _measured(width, arm, side.prompt_s, arms[0], here.prompt_s),
                    training_over_local=step.median_s / steps[0].median_s,
                    divergence=float((expected.exp() * (expected - found)).sum(-1).mean()),
                    is_equal=side.tokens == here.tokens,
                )
            )
        for (file, other), arm in zip(others.items(), arms[1 + len(sides) :], strict=True):
            report.figures.append(_measured(f"llama.cpp, {file.stem}", arm, other.prompt_s, arms[0], here.prompt_s))
    report.notes.append(f"prefix {prefix_tokens} tokens, {new_tokens} new ones; one thread a side")
    return report


def _measured(name: str, arm: Arm, prompt_s: list[float], base: Arm, base_prompt_s: list[float]) -> Measured:
    return Measured(
        width=name,
        ms_per_token=arm.median_s * 1e3,
        over_local=arm.median_s / base.median_s,
        cpu_over_local=arm.cpu_ratio(base),
        prompt_over_local=statistics.median(prompt_s[1:]) / statistics.median(base_prompt_s[1:]),
        training_over_local=None,
        divergence=None,
        is_equal=None,
    )


def _options(width: str) -> dict[str, Any]:
    if width in ("float32", "bfloat16", "float16"):
        return {"dtype": width}
    if width in ("int8", "int4", "nf4"):
        return {"dtype": "float32", "quantization": width}
    raise ConfigError(f"unknown width {width!r}; known: float32, bfloat16, float16, int8, int4, nf4")


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Returns the log-probabilities of the tokens that follow the last ones of a text, ``[tokens, vocabulary]``."""
    logits: Tensor = model(text, use_cache=False).logits[0, -_STEPS:]
    return logits.float().log_softmax(-1)

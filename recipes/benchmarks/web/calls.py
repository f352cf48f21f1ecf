"""Training by calls, ``swarm api --train`` asked by Tinker's SDK, against the same work done in this process."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tinker
import torch
from rich.progress import Progress
from tinker import types
from torch import Tensor
from torch.nn import functional

from recipes.benchmarks.web.chats import served
from recipes.benchmarks.arms import check_directory, prompt_tokens
from recipes.benchmarks.figures import Figure, SwarmReport
from recipes.benchmarks.measure import Arm, take_turns
from recipes.benchmarks.swarm import swarm_model
from recipes.benchmarks.train import TOKENS, batch_of_texts
from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.tuning.adapters import new_lora

GOAL_STEPS = 0.95
GOAL_SAMPLES = 0.9
GOAL_GROUP = 3.0
"""Of eight samples."""
_NAME = "benchmark/model"
_KEY = "tml-benchmark"
_RANK = 8
_ROWS = 8
_PROMPT_TOKENS = 128
_TOLERANCE = 1e-3


def bench_calls(
    directory: Path, *, num_servers: int, group: int, new_tokens: int, rounds: int, progress: Progress
) -> SwarmReport:
    """Compares training steps and samples by calls with the same loop and ``generate()`` on the same swarm.

    Raises:
        ConfigError: If the directory has no model.
        SwarmError: If the API does not start or fails, or computes another loss or other tokens than the loop here.
    """
    check_directory(directory)
    report = SwarmReport(command="benchmark calls", model=directory.resolve().name, headings=("here", "by calls"))
    with (
        LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1) as swarm,
        tempfile.TemporaryDirectory() as state_dir,
    ):
        options = ["--train", "--state-dir", state_dir, "--name", _NAME, "--api-key", _KEY]
        options += [word for peer in swarm.initial_peers for word in ("--initial-peers", peer)]
        torch.set_num_threads(1)
        base = swarm_model(directory, swarm.initial_peers)
        servers = tuple(server.pid for server in swarm.servers)
        with served(directory, *options, threads=1) as (pid, url), _client(url) as client:
            here, there = (os.getpid(), *servers), (os.getpid(), pid, *servers)
            work = _Work(directory, base, client, new_tokens, group)
            for name, arms, tokens, goal in (
                ("forward_backward and step", (work.step_here, work.step_there), _ROWS * TOKENS, GOAL_STEPS),
                ("one sample", (work.sample_here, work.sample_there), new_tokens, GOAL_SAMPLES),
                (
                    "a group of samples, over one after another",
                    (work.one_by_one, work.at_once),
                    group * new_tokens,
                    GOAL_GROUP,
                ),
            ):
                first, second = (Arm(run, pids) for run, pids in zip(arms, (here, there), strict=True))
                take_turns(name, [first, second], rounds=rounds, progress=progress)
                report.figures.append(
                    Figure(
                        name=name,
                        unit="tokens/s",
                        local=tokens / first.median_s,
                        swarm=tokens / second.median_s,
                        ratio=first.median_s / second.median_s,
                        goal=goal if goal != GOAL_GROUP or group == 8 else None,
                        cpu_ratio=second.cpu_ratio(first),
                        rounds=rounds,
                    )
                )
    report.notes.append(
        f"{num_servers} server(s); LoRA of rank {_RANK}; steps of {_ROWS} x {TOKENS} tokens; samples of {new_tokens} "
        f"tokens after {_PROMPT_TOKENS}; both sides of the last row by calls"
    )
    return report


@contextlib.contextmanager
def _client(url: str) -> Iterator[Any]:
    client = tinker.ServiceClient(base_url=url, api_key=_KEY)
    try:
        yield client
    except tinker.TinkerError as error:
        raise SwarmError(f"the API has failed: {error}") from error
    finally:
        client.holder.run_coroutine_threadsafe(client.holder.aclose()).result(60)


class _Work:
    """The same work done here and by calls, on adapters that begin alike."""

    def __init__(self, directory: Path, base: Any, client: Any, new_tokens: int, group: int) -> None:
        vocabulary = base.config.vocab_size
        self._rows = batch_of_texts(directory, _ROWS, vocabulary)
        self._prompt = prompt_tokens(directory, length=_PROMPT_TOKENS, vocab_size=vocabulary)
        self._new_tokens = new_tokens
        self._group = group
        self._base = base
        self._model = new_lora(base, rank=_RANK, seed=1, unembed=False)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
        self._training = client.create_lora_training_client(
            base_model=_NAME, rank=_RANK, seed=1, train_unembed=False
        ).result()
        self._sampler = client.create_sampling_client(base_model=_NAME).result()
        self._data = [_datum(row) for row in self._rows]
        self._losses: list[float] = []
        self._tokens: list[int] = []

    def step_here(self) -> float:
        """One step of the loop that people write."""
        started = time.perf_counter()
        logits = self._model(input_ids=self._rows[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), self._rows[:, 1:].flatten(), reduction="sum")
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._check_loss(float(loss.detach()))
        return time.perf_counter() - started

    def step_there(self) -> float:
        """The same by calls, which are on their way together."""
        started = time.perf_counter()
        computed = self._training.forward_backward(self._data, "cross_entropy")
        stepped = self._training.optim_step(types.AdamParams(learning_rate=1e-4))
        self._check_loss(computed.result().metrics["loss:sum"])
        stepped.result()
        return time.perf_counter() - started

    def _check_loss(self, loss: float) -> None:
        """Both sides take each step once, in turns."""
        if len(self._losses) == 1:
            first = self._losses.pop()
            if abs(first - loss) > _TOLERANCE * abs(first):
                raise SwarmError(f"one side has a loss of {first:.5f} and the other of {loss:.5f}")
        else:
            self._losses.append(loss)

    def sample_here(self) -> float:
        """`generate()` on the same swarm."""
        started = time.perf_counter()
        with torch.no_grad():
            found = self._base.generate(
                self._prompt, attention_mask=torch.ones_like(self._prompt), do_sample=False, eos_token_id=None,
                max_new_tokens=self._new_tokens, min_new_tokens=self._new_tokens, pad_token_id=0,
            )  # fmt: skip
        seconds = time.perf_counter() - started
        self._tokens = found[0, _PROMPT_TOKENS:].tolist()
        return seconds

    def sample_there(self) -> float:
        """The same by a call."""
        started = time.perf_counter()
        (found,) = self._ask(1, temperature=0.0).result().sequences
        seconds = time.perf_counter() - started
        if self._tokens and found.tokens != self._tokens:
            raise SwarmError("a sample by calls differs from generate()'s")
        return seconds

    def one_by_one(self) -> float:
        """A group of samples, each asked for after the one before it."""
        started = time.perf_counter()
        for _ in range(self._group):
            self._ask(1).result()
        return time.perf_counter() - started

    def at_once(self) -> float:
        """A group of samples, asked for as loops do: each by itself, all at once."""
        started = time.perf_counter()
        for call in [self._ask(1) for _ in range(self._group)]:
            call.result()
        return time.perf_counter() - started

    def _ask(self, count: int, temperature: float = 1.0) -> Any:
        params = types.SamplingParams(max_tokens=self._new_tokens, temperature=temperature, stop=[])
        return self._sampler.sample(types.ModelInput.from_ints(self._prompt[0].tolist()), count, params)


def _datum(row: Tensor) -> Any:
    targets = types.TensorData.from_torch(row[1:])
    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1].tolist()), loss_fn_inputs={"target_tokens": targets}
    )

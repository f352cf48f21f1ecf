"""Training and prompts at a distance, in chunks, so that all servers of a chain work at the same time.

Servers that compute at once need cores of their own; where there are fewer, servers that wait instead show what a chain
gains (`SimulatedCompute`): they are in this process, with links.

Letters: ``N`` servers of a chain, ``C`` chunks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch
from rich.progress import Progress
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from recipes.benchmarks.arms import local_model
from recipes.benchmarks.figures import Figure
from recipes.benchmarks.measure import Arm, take_turns
from recipes.benchmarks.swarm import model_on, swarm_model
from recipes.benchmarks.train import TOKENS, batch_of_texts, check_equal, prompt_gradient, timed_run
from swarm_plugins.client import SwarmConfig
from recipes.benchmarks.links import Link, Relay
from recipes.benchmarks.links.swarm import DistantSwarm
from swarm_plugins.local_swarm import LocalSwarm
from recipes.benchmarks.compute import SimulatedCompute
from swarm_plugins.testing.models import save_tiny

CHUNKS, REPLICA_CHUNKS, COMPUTING_CHUNKS = 8, 16, 4
GOAL_WAITING, GOAL_COMPUTING, GOAL_REPLICAS, GOAL_BOUND, GOAL_PROMPT = 2.0, 1.5, 1.7, 0.85, 0.5
_ROWS = 16
_CALL_S = 1e-4
"""Least time of a chunk at a server that waits."""
_BACKWARD = 2.0
"""Time of a backward, in forwards."""
_NEAR = Link(rtt_ms=20)
_TINY_BLOCKS = 6
_SPANS = ((0, 2), (2, 4), (4, 6))
_PROMPT = 1024
_STEP_S = 0.02
"""Fixed time that a waiting server adds to each chunk of a prompt: about what a single token takes."""
_MOST_ROUNDS = 3


class Pipeline:
    """Compares training steps and prompts in chunks with unsplit ones, and two replicas of each span with one.

    Args:
        directory: The model whose blocks are computed; others wait.
        link: Between the client and servers that compute.
        waiting_s: Seconds of a forward of the whole batch at a server that waits.
        rounds: Rounds whose medians are shown.
        progress: Shows how far it is.
    """

    def __init__(
        self,
        directory: Path,
        *,
        link: Link,
        waiting_s: float,
        rounds: int,
        progress: Progress,
    ) -> None:
        self._directory = directory
        self._link = link
        self._waiting_s = waiting_s
        self._rounds = rounds
        self._progress = progress

    def figures(self) -> list[Figure]:
        """Runs everything.

        Raises:
            SwarmError: If the gradients differ from the local model's.
        """
        with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
            tiny = save_tiny("llama", Path(folder) / "tiny", num_layers=_TINY_BLOCKS)
            AutoConfig.from_pretrained(tiny, max_position_embeddings=_PROMPT).save_pretrained(tiny)
            prompts = self._waiting_prompt(tiny)
            return [*prompts, *self._waiting_chain(tiny), self._waiting_replicas(tiny), *self._computing()]

    def _waiting_prompt(self, tiny: Path) -> list[Figure]:
        """Compares the first token after a prompt with the prompt's way through span after span, and with its bound."""
        name = f"first token after {_PROMPT} through 3 servers that wait, {_NEAR.rtt_ms:g} ms"
        local = local_model(tiny)
        prompt = torch.arange(_PROMPT)[None] % (local.config.vocab_size - 1) + 1
        config = SwarmConfig(push="on")
        with self._waiting(tiny, _SPANS, config, call_s=_STEP_S) as swarm:
            model = model_on(tiny, swarm.connection)
            check_equal("logits", *(one(prompt, use_cache=True).logits for one in (local, model)))
            # Without a cache, a row goes through the chain as a whole.
            works = [timed_run(partial(_run, model, prompt, use_cache=cached)) for cached in (False, True)]
            whole, cut = self._timed(name, works)
        trips_s = (len(_SPANS) + 1) * 0.5e-3 * _NEAR.rtt_ms
        bound_s = trips_s + min(
            (count + len(_SPANS) - 1) * (_STEP_S + self._waiting_s / count) for count in range(1, _PROMPT)
        )
        share = Figure(
            name=f"{name}, in chunks / span after span",
            unit="ms",
            local=whole.median_s * 1e3,
            swarm=cut.median_s * 1e3,
            ratio=cut.median_s / whole.median_s,
            goal=GOAL_PROMPT,
            goal_is_upper_bound=True,
            rounds=len(cut.samples),
        )
        return [share, _bounded(name, bound_s, cut)]

    def _waiting_chain(self, tiny: Path) -> list[Figure]:
        """Compares chunks with a whole batch through three servers, and with their bound."""
        name = f"training through 3 servers that wait, {_NEAR.rtt_ms:g} ms, {CHUNKS} chunks"
        configs = [SwarmConfig(micro_batches=count) for count in (1, CHUNKS)]
        with self._waiting(tiny, _SPANS, configs[0]) as whole, self._waiting(tiny, _SPANS, configs[1]) as cut:
            arms = self._compared(
                f"{name} / 1", tiny, CHUNKS, (model_on(tiny, whole.connection), model_on(tiny, cut.connection))
            )
        spans_s = (part * self._waiting_s * CHUNKS / _ROWS for part in (1.0, _BACKWARD))
        bound_s = sum(pipelined_s(3, CHUNKS, span_s, _NEAR.rtt_ms * 1e-3) for span_s in spans_s)
        return [_tokens_per_s(f"{name} / 1", CHUNKS, arms, GOAL_WAITING), _bounded(name, bound_s, arms[1])]

    def _waiting_replicas(self, tiny: Path) -> Figure:
        """Compares two servers for each span with one."""
        name = f"training through servers that wait, 2 for each span / 1, {REPLICA_CHUNKS} chunks"
        spans = [(0, 3), (3, 6)]
        config = SwarmConfig(micro_batches=REPLICA_CHUNKS)
        with self._waiting(tiny, spans, config) as one, self._waiting(tiny, spans * 2, config) as two:
            arms = self._compared(name, tiny, _ROWS, (model_on(tiny, one.connection), model_on(tiny, two.connection)))
        return _tokens_per_s(name, _ROWS, arms, GOAL_REPLICAS)

    def _computing(self) -> list[Figure]:
        """Compares pushed chunks with whole batches through two servers of the given model, each with its own core."""
        name = f"training through 2 servers with a core each, {self._link.rtt_ms:g} ms"
        configs = (
            SwarmConfig(push="off", micro_batches=1),
            SwarmConfig(push="on", micro_batches=1),
            SwarmConfig(push="on", micro_batches=COMPUTING_CHUNKS),
        )
        with LocalSwarm(self._directory, num_servers=2, dtype="float32", threads=1, link=Relay(self._link)) as swarm:
            pids = [server.pid for server in swarm.servers]
            cores = sorted(os.sched_getaffinity(0))
            for index, pid in enumerate(pids):
                _pin(pid, cores[index % len(cores)])
            models = [swarm_model(self._directory, swarm.initial_peers, config) for config in configs]
            carried, pushed, cut = self._compared(name, self._directory, CHUNKS, models, pids)
        name = f"{name}, {COMPUTING_CHUNKS} pushed chunks / whole batch"
        return [
            _tokens_per_s(f"{name} by the client", CHUNKS, (carried, cut), GOAL_COMPUTING),
            _tokens_per_s(f"{name} pushed", CHUNKS, (pushed, cut), None),
        ]

    def _waiting(
        self, tiny: Path, spans: Sequence[tuple[int, int]], config: SwarmConfig, *, call_s: float = _CALL_S
    ) -> DistantSwarm:
        length = spans[0][1] - spans[0][0]
        token_s = self._waiting_s / (length * _ROWS * TOKENS)
        compute = SimulatedCompute(token_s=token_s, call_s=call_s / length, backward=_BACKWARD)
        return DistantSwarm(tiny, spans=spans, compute=[compute] * len(spans), link=_NEAR, config=config)

    def _compared(
        self,
        name: str,
        directory: Path,
        rows: int,
        models: Sequence[PreTrainedModel],
        pids: Sequence[int] = (),
    ) -> list[Arm]:
        """Times training steps of models in turns, after a look at their gradients."""
        local = local_model(directory)
        texts = batch_of_texts(directory, rows, local.config.vocab_size)
        expected = prompt_gradient(local, texts)()
        steps = [prompt_gradient(model, texts) for model in models]
        for step in steps:
            check_equal("gradient", expected, step())
        return self._timed(name, [timed_run(step) for step in steps], pids)

    def _timed(self, name: str, works: Sequence[Callable[[], float]], pids: Sequence[int] = ()) -> list[Arm]:
        """Times works in turns; ``pids`` are of servers that compute, which takes more rounds than waiting."""
        arms = [Arm(work, (os.getpid(), *pids)) for work in works]
        rounds = self._rounds if pids else min(self._rounds, _MOST_ROUNDS)
        take_turns(name, arms, rounds=rounds, progress=self._progress)
        return arms


def pipelined_s(num_servers: int, chunks: int, span_s: float, trip_s: float) -> float:
    """Returns the least seconds of a pass through a chain of servers that take ``span_s`` each for the whole batch.

    The first chunk fills the chain, the others follow one after another: ``N + C - 1`` steps, each of a C-th part
    (Huang et al. 2019, "GPipe", section 2.3), and a trip to each server.
    """
    return num_servers * trip_s + (num_servers + chunks - 1) * span_s / chunks


def _run(model: PreTrainedModel, prompt: Tensor, *, use_cache: bool) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(prompt, use_cache=use_cache, logits_to_keep=1).logits
    return logits


def _bounded(name: str, bound_s: float, arm: Arm) -> Figure:
    return Figure(
        name=name,
        unit="ms",
        local=bound_s * 1e3,
        swarm=arm.median_s * 1e3,
        ratio=bound_s / arm.median_s,
        goal=GOAL_BOUND,
        rounds=len(arm.samples),
    )


def _tokens_per_s(name: str, rows: int, arms: Sequence[Arm], goal: float | None) -> Figure:
    base, other = arms
    return Figure(
        name=name,
        unit="tokens/s",
        local=rows * TOKENS / base.median_s,
        swarm=rows * TOKENS / other.median_s,
        ratio=base.median_s / other.median_s,
        goal=goal,
        cpu_ratio=other.cpu_ratio(base),
        rounds=len(other.samples),
    )


def _pin(pid: int, core: int) -> None:
    """Restricts a process, whose threads have been started, to a core."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, {core})

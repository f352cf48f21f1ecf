"""A swarm at a distance, against what the link's arithmetic allows."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

from swarm_plugins.bench.arms import decode, local_model, prompt_tokens
from swarm_plugins.bench.decode import decoding_round
from swarm_plugins.bench.figures import Figure, SwarmReport
from swarm_plugins.bench.measure import Arm, interleave
from swarm_plugins.bench.swarm import swarm_model
from swarm_plugins.bench.train import TOKENS, batch_of_texts, check_equal, prompt_gradient, timed_run
from swarm_plugins.links import Link
from swarm_plugins.local_swarm import LocalSwarm

GOAL = 0.85
BATCH = 8


def bench_network(
    directory: Path,
    *,
    link: Link,
    server_link: Link,
    num_servers: int,
    prefix_tokens: int,
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> SwarmReport:
    """Compares decoding, the first token and a training step with their bounds.

    A bound is the local model's time, measured in turns with the swarm, and for each trip along the chain the link's
    round-trip time and the time in which its rate carries the hidden states there and back.

    Args:
        directory: The model.
        link: Between the client and the servers.
        server_link: Between servers.
        num_servers: Servers in the chain.
        prefix_tokens: Tokens before the first one that is decoded.
        new_tokens: Tokens decoded in each round.
        rounds: Rounds whose medians are shown.
        progress: Shows how far it is.

    Raises:
        SwarmError: If the swarm's tokens or gradients differ from the local model's.
    """
    report = SwarmReport(command="swarm bench network", model=directory.resolve().name, headings=("bound", "swarm"))
    local = local_model(directory)
    prompt = prompt_tokens(directory, length=prefix_tokens, vocab_size=local.config.vocab_size)
    expected = decode(local, prompt, new_tokens).tokens
    texts = batch_of_texts(directory, BATCH, local.config.vocab_size)
    with LocalSwarm(
        directory, num_servers=num_servers, dtype="float32", threads=1, link=link, server_link=server_link
    ) as swarm:
        remote = swarm_model(directory, swarm.initial_peers)
        pids = (os.getpid(), *(server.pid for server in swarm.servers))
        bench = _Bench(local, remote, pids, link, num_servers, rounds, progress)

        before = swarm.traffic()
        decode(remote, prompt, new_tokens)
        after = swarm.traffic()
        sent = after.to_servers - before.to_servers + after.from_servers - before.from_servers
        check_equal("gradient", prompt_gradient(local, texts)(), prompt_gradient(remote, texts)())

        report.figures += [
            bench.compare(
                "a decoded token", lambda model: decoding_round(model, prompt, new_tokens, expected), tokens=1
            ),
            bench.compare(f"first token after {prefix_tokens}", partial(_first_token, prompt), tokens=prefix_tokens),
            bench.compare(
                f"forward + backward, {BATCH} x {TOKENS} tokens",
                lambda model: timed_run(prompt_gradient(model, texts)),
                tokens=BATCH * TOKENS,
                trips=2,
            ),
            bench.bytes_per_token(sent / (prefix_tokens + new_tokens - 1)),
        ]
    report.notes += [
        f"{num_servers} servers; to the client {_described(link)}, to each other {_described(server_link)}",
        "bound: the local model's time and, for each trip, round-trip times and the hidden states at the link's rate",
        f"training: {BATCH * TOKENS * 1e3 / report.figures[2].swarm:.0f} tokens/s; results are the local model's",
    ]
    return report


class _Bench:
    """Times a local model and a swarm in turns."""

    def __init__(
        self,
        local: PreTrainedModel,
        remote: PreTrainedModel,
        pids: tuple[int, ...],
        link: Link,
        num_servers: int,
        rounds: int,
        progress: Progress,
    ) -> None:
        self._sides = (local, pids[:1]), (remote, pids)
        self._link = link
        self._num_servers = num_servers
        self._rounds = rounds
        self._progress = progress
        self._token_bytes = local.config.get_text_config(decoder=True).hidden_size * 4

    def compare(
        self, name: str, work: Callable[[PreTrainedModel], Callable[[], float]], *, tokens: int, trips: int = 1
    ) -> Figure:
        """Runs a work by both models in turns; its hidden states take ``trips`` trips along the chain."""
        here, there = (Arm(work(model), pids) for model, pids in self._sides)
        bar = self._progress.add_task(name, total=self._rounds + 1)
        interleave([here, there], rounds=self._rounds, on_round=lambda: self._progress.advance(bar))
        bound_s = here.median_s + trips * self._num_servers * self._trip_s(tokens)
        return Figure(
            name=name,
            unit="ms",
            local=bound_s * 1e3,
            swarm=there.median_s * 1e3,
            ratio=bound_s / there.median_s,
            goal=GOAL,
            cpu_ratio=there.cpu_ratio(here),
            rounds=self._rounds,
        )

    def bytes_per_token(self, sent: float) -> Figure:
        """Compares the bytes on the links with those of the hidden states."""
        payload = 2 * self._num_servers * self._token_bytes
        return Figure(name="sent for a token", unit="kB", local=payload / 1e3, swarm=sent / 1e3, ratio=payload / sent)

    def _trip_s(self, tokens: int) -> float:
        """Returns the seconds of some hidden states to a server and back."""
        seconds = self._link.rtt_ms * 1e-3
        for way in self._link.ways():
            seconds += 8e-6 * self._token_bytes * tokens / way.mbit if way.mbit else 0.0
        return seconds


def _first_token(prompt: Tensor, model: PreTrainedModel) -> Callable[[], float]:
    def generate() -> Tensor:
        output: Tensor = model.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)  # type: ignore[operator]
        return output

    return timed_run(generate)


def _described(link: Link) -> str:
    return f"{link.rtt_ms:g} ms" + (f" and {link.mbit:g} Mbit/s" if link.mbit else "")

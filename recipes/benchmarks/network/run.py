"""A swarm at a distance, against what the link's arithmetic allows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

from recipes.benchmarks.arms import decode, prompt_tokens
from recipes.benchmarks.decode import decoding_round
from recipes.benchmarks.figures import Figure, SwarmReport
from recipes.benchmarks.measure import Arm, take_turns
from recipes.benchmarks.network.chat import ANSWER
from recipes.benchmarks.network.drafting import drafting_figures
from recipes.benchmarks.network.models import load_models, swarm_models
from recipes.benchmarks.train import TOKENS, batch_of_texts, check_equal, prompt_gradient, timed_run
from recipes.benchmarks.links import Link, Relay, Way
from swarm_plugins.local_swarm import LocalSwarm

GOAL = 0.85
_SLACK = 1.05
"""Of the goal for the network's part, over the bound."""
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
    draft: str | None = None,
) -> SwarmReport:
    """Compares decoding, the first token and a training step with their bounds.

    A bound is the local model's time, measured in turns with the swarm, and the time in which the links carry the
    hidden states: from the client to each server and back, or from server to server where those push.

    Args:
        directory: The model.
        link: Between the client and the servers.
        server_link: Between servers.
        num_servers: Servers in the chain.
        prefix_tokens: Tokens before the first one that is decoded.
        new_tokens: Tokens decoded in each round.
        rounds: Rounds whose medians are shown.
        progress: Shows how far it is.
        draft: Directory of a small model that drafts for it, or ``lookup``; None: no speculation is measured.

    Raises:
        ConfigError: If a directory does not hold a model, or the draft has another vocabulary.
        SwarmError: If the swarm's tokens or gradients differ from the local model's.
    """
    report = SwarmReport(command="benchmark network", model=directory.resolve().name, headings=("bound", "swarm"))
    relay = Relay(link, server_link)
    swarm = LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1, link=relay)
    local, drafter = load_models(directory, draft)
    prompt = prompt_tokens(directory, length=prefix_tokens, vocab_size=local.config.vocab_size)
    expected = decode(local, prompt, new_tokens).tokens
    texts = batch_of_texts(directory, BATCH, local.config.vocab_size)
    with swarm, swarm_models(directory, swarm.initial_peers) as (star, pushing):
        pids = (os.getpid(), *(server.pid for server in swarm.servers))
        routes = Routes(link, server_link, num_servers, 4 * local.config.get_text_config(decoder=True).hidden_size)
        bench = _Bench({"local": local, "star": star, "pushed": pushing}, pids, routes, rounds, progress)
        gradient = prompt_gradient(local, texts)()
        for model in (star, pushing):
            check_equal("gradient", gradient, prompt_gradient(model, texts)())
        sent = _sent_per_token(relay, star, prompt, new_tokens)
        tokens = bench.compare(
            "a decoded token", lambda model: decoding_round(model, prompt, new_tokens, expected), tokens=1
        )
        first = bench.compare(f"first token after {prefix_tokens}", partial(_first_token, prompt), tokens=prefix_tokens)
        name = f"forward + backward, {BATCH} x {TOKENS} tokens"
        step = bench.compare(
            name, lambda model: timed_run(prompt_gradient(model, texts)), tokens=BATCH * TOKENS, trips=2
        )
        report.figures += [*tokens, *first, *step, _bytes_per_token(routes, sent)]
        if drafter is not None:
            report.figures += drafting_figures(
                directory,
                local,
                star,
                pushing,
                draft=drafter,
                new_tokens=ANSWER * new_tokens,
                rounds=rounds,
                progress=progress,
            )
    report.notes += [
        f"{num_servers} servers; to the client {_described(link)}, to each other {_described(server_link)}",
        "bound: the local model's time plus that of hidden states on the links; results equal the local model's",
        f"training: {BATCH * TOKENS * 1e3 / step[0].swarm:.0f} tokens/s",
    ]
    return report


class Routes(NamedTuple):
    """The ways that hidden states take through a chain."""

    link: Link
    server_link: Link
    num_servers: int
    token_bytes: int
    """Of one hidden state."""

    def star_s(self, tokens: int) -> float:
        """Returns the seconds of hidden states that go from the client to each server and back."""
        return self.num_servers * sum(_seconds(way, tokens * self.token_bytes) for way in self.link.ways())

    def pushed_s(self, tokens: int) -> float:
        """Returns the seconds of hidden states that go from server to server."""
        num_bytes = tokens * self.token_bytes
        between = (self.num_servers - 1) * _seconds(self.server_link.ways()[0], num_bytes)
        return between + sum(_seconds(way, num_bytes) for way in self.link.ways())


def _seconds(way: Way, num_bytes: int) -> float:
    return way.delay_ms * 1e-3 + (8e-6 * num_bytes / way.mbit if way.mbit else 0.0)


class _Bench:
    """Times a local model and a swarm, with and without pushing, in turns."""

    def __init__(
        self,
        models: Mapping[str, PreTrainedModel],
        pids: tuple[int, ...],
        routes: Routes,
        rounds: int,
        progress: Progress,
    ) -> None:
        self._models = models
        self._pids = pids
        self._routes = routes
        self._rounds = rounds
        self._progress = progress

    def compare(
        self,
        name: str,
        work: Callable[[PreTrainedModel], Callable[[], float]],
        *,
        tokens: int,
        trips: int = 1,
    ) -> list[Figure]:
        """Runs a work by the models in turns; ``tokens`` hidden states take ``trips`` trips along the chain."""
        sides = ("local", "star", "pushed")
        arms = [Arm(work(self._models[side]), self._pids[: 1 if side == "local" else None]) for side in sides]
        take_turns(name, arms, rounds=self._rounds, progress=self._progress)
        local, star, pushed = arms
        star_s, pushed_s = trips * self._routes.star_s(tokens), trips * self._routes.pushed_s(tokens)
        waits = [(arm.median_s - local.median_s) * 1e3 for arm in (star, pushed)]
        figures = [self._figure(name, local, star, star_s), self._figure(f"{name}, pushed", local, pushed, pushed_s)]
        # Over short ways, servers that compute at once can make up for the network.
        if min(waits) > 0:
            share = Figure(
                name="network's part of it, pushed / star",
                unit="ms",
                local=waits[0],
                swarm=waits[1],
                ratio=waits[1] / waits[0],
                goal=_SLACK * pushed_s / star_s,
                goal_is_upper_bound=True,
                rounds=self._rounds,
            )
            figures.append(share)
        return figures

    def _figure(self, name: str, local: Arm, there: Arm, links_s: float) -> Figure:
        bound_s = local.median_s + links_s
        return Figure(
            name=name,
            unit="ms",
            local=bound_s * 1e3,
            swarm=there.median_s * 1e3,
            ratio=bound_s / there.median_s,
            goal=GOAL,
            cpu_ratio=there.cpu_ratio(local),
            rounds=self._rounds,
        )


def _sent_per_token(relay: Relay, model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> float:
    before = relay.traffic()
    decode(model, prompt, new_tokens)
    after = relay.traffic()
    sent = after.to_servers - before.to_servers + after.from_servers - before.from_servers
    return sent / (prompt.shape[1] + new_tokens - 1)


def _bytes_per_token(routes: Routes, sent: float) -> Figure:
    payload = 2 * routes.num_servers * routes.token_bytes
    return Figure(
        name="sent for a token, by the client", unit="kB", local=payload / 1e3, swarm=sent / 1e3, ratio=payload / sent
    )


def _first_token(prompt: Tensor, model: PreTrainedModel) -> Callable[[], float]:
    def generate() -> Tensor:
        output: Tensor = model.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)  # type: ignore[operator]
        return output

    return timed_run(generate)


def _described(link: Link) -> str:
    return f"{link.rtt_ms:g} ms" + (f" and {link.mbit:g} Mbit/s" if link.mbit else "")

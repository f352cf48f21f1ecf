"""A swarm against offloading (Petals, Borzunov et al. 2022, section 3.3): tokens a second over model size over memory.

The paper computes the best that offloading can do: every weight goes through the slow way once a token. Here, weights
that fit the memory may stay there, which favors offloading. Accelerate and our own offloading are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from recipes.benchmarks.arms import decode, prompt_tokens
from recipes.benchmarks.links import NETWORKS, Relay
from recipes.benchmarks.network.models import load_models
from recipes.benchmarks.offload.figures import ArmName
from recipes.benchmarks.offload.run import PROMPT_TOKENS, bench_offload
from recipes.benchmarks.papers.shown import Figures, Rows, Shown, ShownReport, finished
from recipes.study.verdicts import plus_minus, verdict
from recipes.benchmarks.swarm import swarm_model
from recipes.study.drawing import GOOD, INK, MARK, MUTED, WARM, tidy
from recipes.study.intervals import t_interval, welch_interval
from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm

SHARES = (75, 50, 25)
"""Experts in memory, in %."""
_ARMS = {"ours": ArmName.FULL, "accelerate": ArmName.ACCELERATE}
_STYLES = {"ours": ("o", MARK), "accelerate": ("s", WARM)}
_COLORS = (INK, GOOD, MUTED)


def bench_crossing(
    directory: Path, *, num_servers: int, new_tokens: int, rounds: int, plot: Path | None, progress: Progress
) -> ShownReport:
    """Decodes through a swarm on three networks, and offloaded with three sizes of memory.

    Args:
        directory: A mixture of experts.
        num_servers: Servers of the chain.
        new_tokens: Tokens of a round.
        rounds: Rounds of each.
        plot: File of the picture.
        progress: Shows how far it is.

    Raises:
        ConfigError: If the directory does not hold a mixture.
        SwarmError: If tokens differ.
    """
    local, _ = load_models(directory, None)
    # Same texts as the offloading rounds; the first round is a warm-up.
    prompts = [
        prompt_tokens(directory, length=PROMPT_TOKENS, vocab_size=local.config.vocab_size, shift=shift)
        for shift in range(rounds + 1)
    ]
    expected = [decode(local, prompt, new_tokens).tokens for prompt in prompts]
    swarm: dict[str, list[float]] = {}
    for name, link in NETWORKS.items():
        with LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1, link=Relay(link)) as servers:
            model = swarm_model(directory, servers.initial_peers)
            found = [decode(model, prompt, new_tokens) for prompt in prompts]
        if [one.tokens for one in found] != expected:
            raise SwarmError(f"the swarm on {name} decodes other tokens than the model here")
        swarm[name] = [round(1 / one.seconds_per_token, 4) for one in found[1:]]
    del local
    offloaded: dict[str, Any] = {}
    for share in SHARES:
        report = bench_offload(
            directory,
            random_scale=None,
            fast=f"{share}%",
            policy="counting",
            without=["resident", "no-guesses", "bare"],
            new_tokens=new_tokens,
            rounds=rounds,
            plot=None,
            progress=progress,
        )
        size = report.expert_bytes + report.budget_bytes - report.fast_bytes
        rates = {name: [*one.rates] for name, arm in _ARMS.items() if (one := report.find(arm)) is not None}
        disk = 0.0 if report.speeds is None else report.speeds.disk_bytes_per_s
        offloaded[str(share)] = {"size": size, "memory": report.budget_bytes, "disk": disk, "rates": rates}
    figures = {"servers": num_servers, "swarm": swarm, "offloaded": offloaded}
    shown = ShownReport(command="benchmark crossing", model=directory.resolve().name, shown=CROSSING, figures=figures)
    shown.notes.append(
        f"{num_servers} servers in float32; {rounds} rounds of {new_tokens} tokens; the swarm decodes the same "
        "tokens as the local model, and the offloaded models the same as each other"
    )
    return finished(shown, plot)


def bound(size: float, memory: float, disk: float) -> float:
    """Returns the most tokens a second of a dense model whose weights beyond the memory are read for each token."""
    return disk / (size - memory) if size > memory else float("inf")


def crossing(size: float, disk: float, tokens_per_s: float) -> float | None:
    """Returns the model's size over the memory from which on a swarm beats the bound of offloading; None: never."""
    share = disk / (tokens_per_s * size)
    return None if share >= 1 else 1 / (1 - share)


def _tables(figures: Figures) -> list[Rows]:
    rows = []
    for one in figures["offloaded"].values():
        ratio = f"{one['size'] / one['memory']:.2f}"
        rows.append((ratio, "bound, all weights read", f"{one['disk'] / one['size']:.2f}", ""))
        rows.append((ratio, "bound, some weights stay", f"{_bound(one):.2f}", ""))
        rows += [(ratio, name, plus_minus(rates, digits=2), "") for name, rates in one["rates"].items()]
    disk, size = _disk(figures), _size(figures)
    for name, rates in figures["swarm"].items():
        found = crossing(size, disk, t_interval(rates).mean)
        shown = "never" if found is None else f"{found:.2f}"
        rows.append(("any", f"swarm, {name}", plus_minus(rates, digits=2), shown))
    return [Rows(("size over memory", "way", "tokens/s", "beats the bound from"), rows)]


def _verdicts(figures: Figures) -> list[str]:
    largest = max(figures["offloaded"].values(), key=lambda one: one["size"] / one["memory"])
    ratio = largest["size"] / largest["memory"]
    return [
        verdict(
            f"a swarm on {network} is faster than {name} with {ratio:.1f} times the memory's size",
            welch_interval(swarm, rates),  # measured one after the other, so not paired
            unit=" tokens/s",
            digits=2,
        )
        for network, swarm in figures["swarm"].items()
        for name, rates in largest["rates"].items()
    ]


def _draw(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    size, disk = _size(figures), _disk(figures)
    ratios = [1.05 * 1.08**step for step in range(24)]
    axes.plot(ratios, [bound(size, size / one, disk) for one in ratios], color=MUTED, label="bound, some weights stay")
    axes.axhline(disk / size, color=MUTED, linewidth=1, label="bound, all weights read")
    for name, (marker, color) in _STYLES.items():
        points = [one for one in figures["offloaded"].values() if name in one["rates"]]
        means = [t_interval(one["rates"][name]) for one in points]
        places = [one["size"] / one["memory"] for one in points]
        axes.plot(places, [one.mean for one in means], marker, color=color, label=f"offloaded: {name}")
        axes.vlines(places, [max(1e-3, one.low) for one in means], [one.high for one in means], color=color)
    for (name, rates), color in zip(figures["swarm"].items(), _COLORS, strict=False):
        axes.axhline(t_interval(rates).mean, color=color, linestyle="--", linewidth=1, label=f"swarm, {name}")
    axes.set_xlabel("size of the model over memory")
    axes.set_ylabel("tokens a second")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)


def _bound(one: Mapping[str, float]) -> float:
    return bound(one["size"], one["memory"], one["disk"])


def _size(figures: Figures) -> float:
    return float(next(iter(figures["offloaded"].values()))["size"])


def _disk(figures: Figures) -> float:
    rates: Sequence[float] = [one["disk"] for one in figures["offloaded"].values()]
    return sum(rates) / len(rates)


CROSSING = Shown(name="crossing", page="results.md", tables=_tables, verdicts=_verdicts, draw=_draw, size=(7.5, 3.8))

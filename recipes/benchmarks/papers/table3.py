"""Table 3 of Petals (Borzunov et al. 2022): steps and tokens a second on three networks, through 3 and 12 servers.

Servers are in this process. Their blocks compute a small random model, and then wait as long as a large one would take,
whatever the context: what is measured is real hidden states, packed in 8 bits, on real clocks, over lines with a delay
and a rate.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from recipes.benchmarks.arms import Decoded, decode, local_model
from recipes.benchmarks.compute import SimulatedCompute
from recipes.benchmarks.links.link import NETWORKS, Link
from recipes.benchmarks.links.swarm import DistantSwarm
from recipes.benchmarks.papers.shown import Figures, Rows, Shown, ShownReport, finished
from recipes.study.verdicts import plus_minus, verdict
from recipes.benchmarks.swarm import model_on
from recipes.study.drawing import GOOD, INK, MARK, MUTED, tidy
from recipes.study.intervals import Interval, ratio_interval, t_interval
from swarm_plugins.client import SwarmConfig
from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.transport.codec import packed_bytes

BLOCKS, WIDTH, VOCABULARY = 12, 256, 128
STEP_S, TOKEN_S = 0.06, 0.0003
"""What all blocks together wait for a call, and for each token of it."""
LENGTH = 128
"""Tokens of a row in forward passes."""
WAYS = {"carried by the client": "off", "pushed by servers": "on"}
_COLORS = (INK, MARK, GOOD, MUTED)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What is measured of each chain."""

    contexts: Sequence[int] = (128, 2048)
    """Tokens in the cache before the first one that counts."""
    batches: Sequence[int] = (1, 64)
    """Rows of a forward pass."""
    clients: int = 8
    """Clients at once, against one."""
    new_tokens: int = 12
    rounds: int = 3


def bench_table3(
    *, chains: Sequence[int], networks: Sequence[str], scale: Scale, plot: Path | None, progress: Progress
) -> ShownReport:
    """Measures each chain on each network.

    Args:
        chains: Numbers of servers; each divides the 12 blocks.
        networks: Names of `NETWORKS`.
        scale: What is measured of each.
        plot: File of the picture.
        progress: Shows how far it is.

    Raises:
        SwarmError: If a chain decodes other tokens than the model here.
    """
    rows = []
    bar = progress.add_task("chains", total=len(networks) * len(chains) * len(WAYS))
    with tempfile.TemporaryDirectory(prefix="swarm-table3-") as folder:
        directory = _made(Path(folder) / "model")
        local = local_model(directory)
        for name in networks:
            for num_servers in chains:
                for way, push in WAYS.items():
                    chain = _Chain(directory, local, NETWORKS[name], num_servers, push)
                    rows.append({"network": name, "servers": num_servers, "way": way, **chain.figures(scale)})
                    progress.advance(bar)
    report = ShownReport(command="benchmark table3", model="simulated", shown=TABLE3, figures={"rows": rows})
    report.notes.append(
        f"{BLOCKS} blocks of width {WIDTH}, hidden states in 8 bits; all blocks together wait {STEP_S * 1e3:g} ms a "
        f"call and {TOKEN_S * 1e3:g} ms a token; tokens equal the local model's"
    )
    return finished(report, plot)


def check_chains(servers: Sequence[int], networks: Sequence[str] | None) -> Sequence[str]:
    """Returns the names of networks, all unless some are given.

    Raises:
        ConfigError: If there is no such network, or servers do not divide the blocks.
    """
    odd = [one for one in servers if BLOCKS % one]
    if odd:
        raise ConfigError(f"{odd[0]} servers do not divide {BLOCKS} blocks: use 1, 2, 3, 4, 6 or 12")
    unknown = [one for one in networks or () if one not in NETWORKS]
    if unknown:
        raise ConfigError(f"unknown --preset {unknown[0]!r}; known: {', '.join(NETWORKS)}")
    return list(networks or NETWORKS)


class _Chain:
    """One chain on one network."""

    def __init__(self, directory: Path, local: PreTrainedModel, link: Link, num_servers: int, push: str) -> None:
        self._directory = directory
        self._local = local
        self._link = link
        self._num_servers = num_servers
        self._push = push

    def figures(self, scale: Scale) -> dict[str, Any]:
        """Returns steps and tokens a second, by context and by batch, and the steps of each of many clients."""
        found: dict[str, Any] = {"steps": {}, "bounds": {}, "forward": {}}
        with self._swarm() as swarm:
            model = model_on(self._directory, swarm.connection)
            for context in scale.contexts:
                step = partial(_decoded, context=context, new_tokens=scale.new_tokens)
                rounds = [step(model, seed=seed) for seed in range(scale.rounds)]
                if rounds[0].tokens != step(self._local, seed=0).tokens:
                    raise SwarmError(f"{self._num_servers} servers decode other tokens than the model here")
                found["steps"][str(context)] = [_rate(one) for one in rounds]
            found["bounds"] = {"step": round(1 / self._step_bound_s(), 4)}
            for batch in scale.batches:
                ids = _tokens(batch, LENGTH, seed=batch)
                seconds = [_timed(partial(_forward, model, ids)) for _ in range(scale.rounds)]
                found["forward"][str(batch)] = [round(batch * LENGTH / one, 2) for one in seconds]
            models = [model_on(self._directory, swarm.connection) for _ in range(scale.clients)]
            with ThreadPoolExecutor(scale.clients) as pool:
                found["together"] = []
                for seed in range(scale.rounds):
                    step = partial(_decoded, context=scale.contexts[0], new_tokens=scale.new_tokens, seed=seed)
                    found["together"].append(round(statistics.fmean(map(_rate, pool.map(step, models))), 4))
        return found

    def _swarm(self) -> DistantSwarm:
        length = BLOCKS // self._num_servers
        spans = [(start, start + length) for start in range(0, BLOCKS, length)]
        compute = SimulatedCompute(token_s=TOKEN_S / BLOCKS, call_s=STEP_S / BLOCKS)
        config = SwarmConfig(push=self._push, codec="rotated8", micro_batches=1)  # type: ignore[arg-type]
        return DistantSwarm(
            self._directory, spans=spans, compute=[compute] * len(spans), link=self._link, config=config
        )

    def _step_bound_s(self) -> float:
        """Returns the least seconds of a step: waits, trips, and one hidden state on each line."""
        trips = self._num_servers if self._push == "off" else (self._num_servers + 1) / 2
        sent = 8e-6 * packed_bytes("rotated8", torch.float32, WIDTH) / (self._link.mbit or float("inf"))
        return STEP_S + TOKEN_S + trips * (1e-3 * self._link.rtt_ms + 2 * sent)


def _made(directory: Path) -> Path:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def _decoded(model: PreTrainedModel, *, context: int, new_tokens: int, seed: int) -> Decoded:
    return decode(model, _tokens(1, context, seed=seed), new_tokens)


def _rate(done: Decoded) -> float:
    return round(1 / done.seconds_per_token, 4)


def _tokens(rows: int, length: int, *, seed: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def _forward(model: PreTrainedModel, ids: Tensor) -> None:
    with torch.no_grad():
        model(input_ids=ids, use_cache=False, logits_to_keep=1)


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _tables(figures: Figures) -> list[Rows]:
    first = figures["rows"][0]
    contexts, batches = [*first["steps"]], [*first["forward"]]
    heads = (
        *("network", "servers", "hidden states", *(f"steps/s, context {one}" for one in contexts), "bound"),
        *(f"forward, batch {one}, tokens/s" for one in batches),
        "steps/s of each of several clients",
    )
    rows = []
    for one in figures["rows"]:
        steps = [plus_minus(one["steps"][context], digits=2) for context in contexts]
        forward = [f"{t_interval(one['forward'][batch]).mean:,.0f}" for batch in batches]
        together = plus_minus(one["together"], digits=2)
        names = one["network"], str(one["servers"]), one["way"]
        rows.append((*names, *steps, f"{one['bounds']['step']:.2f}", *forward, together))
    return [Rows(heads, rows)]


def _verdicts(figures: Figures) -> list[str]:
    carried, pushed = (
        {(one["network"], one["servers"]): one for one in figures["rows"] if one["way"] == way} for way in WAYS
    )
    found = list[str]()
    for (network, servers), one in carried.items():
        place = f"{network}, {servers} servers"
        short, *longer = one["steps"].values()
        claim = "a longer context costs at most 10 % of the steps"
        found.extend(_kept(claim, place, short, long, 0.9) for long in longer)
        slower = carried.get(("100mbit-5ms", servers))
        if network == "1gbit-5ms" and slower is not None:
            found.append(
                _kept("a tenth of the rate costs at most 10 % of the steps", place, short, _first(slower), 0.9)
            )
        claim = "servers that push states make more steps than the client"
        found.append(_kept(claim, place, short, _first(pushed[network, servers]), 1))
        for row in (one, pushed[network, servers]):
            claim = f"several clients at once are at most 20 % slower each, {row['way']}"
            found.append(_kept(claim, place, _first(row), row["together"], 0.8))
    return found


def _first(row: Mapping[str, Any]) -> Sequence[float]:
    """Returns the steps at the shortest context."""
    steps: Sequence[float] = next(iter(row["steps"].values()))
    return steps


def _kept(claim: str, place: str, before: Sequence[float], after: Sequence[float], least: float) -> str:
    """Says whether ``after`` exceeds ``least`` times ``before``; rounds of the two are no pairs."""
    ratio = ratio_interval(after, before)
    above = Interval(ratio.mean - least, ratio.low - least, ratio.high - least, ratio.count)
    return verdict(f"{claim}, {place}", above, unit=f" above {least:g}", digits=2)


def _draw(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    for way, marker in zip(WAYS, ("o-", "s--"), strict=True):
        for network, color in zip(dict.fromkeys(one["network"] for one in figures["rows"]), _COLORS, strict=False):
            mine = [one for one in figures["rows"] if (one["network"], one["way"]) == (network, way)]
            steps = [t_interval(next(iter(one["steps"].values()))) for one in mine]
            servers = [one["servers"] for one in mine]
            axes.plot(servers, [one.mean for one in steps], marker, color=color, label=f"{network}, {way}")
            axes.vlines(servers, [one.low for one in steps], [one.high for one in steps], color=color)
    axes.set_xlabel("servers in the chain")
    axes.set_ylabel("steps a second, batch 1")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({one["servers"] for one in figures["rows"]}))
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)


TABLE3 = Shown(name="table3", page="results.md", tables=_tables, verdicts=_verdicts, draw=_draw, size=(8.5, 3.6))

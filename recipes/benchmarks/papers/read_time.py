"""What MoE, PR-MoE and its student save in time, where weights exceed the caches: DeepSpeed-MoE, figures 12 to 15.

The shapes are the paper's 350M family with fewer layers and experts, beside a dense model of five times the computing,
which the paper's standard MoE equals in quality. Weights are random: bytes and time are measured, quality is not.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from recipes.benchmarks.offload.plot import recorded_use
from recipes.benchmarks.papers.shown import Figures, Rows, Shown, ShownReport, finished
from recipes.study.verdicts import paired, plus_minus, verdict
from recipes.benchmarks.papers.sizes import count
from recipes.study.drawing import GOOD, INK, MARK, WARM, tidy
from recipes.study.training import EXPERTS_IMPLEMENTATION
from swarm_plugins.errors import ConfigError
from swarm_plugins.models import PRMoEConfig, PRMoEForCausalLM

DENSE, STANDARD, PYRAMID, STUDENT = "dense, 5 x the computing", "MoE-32", "PR-MoE-8/16", "PR-MoE-8/16+L10"
_COLORS = {DENSE: WARM, STANDARD: INK, PYRAMID: MARK, STUDENT: GOOD}
_POOLS = {STANDARD: [32] * 6, PYRAMID: [8] * 5 + [16], STUDENT: [8] * 4 + [16], DENSE: None}
"""Experts of every second layer, as the paper's pyramid: 10 layers of a quarter of them to 2 of half of them."""
_LAYERS, _STUDENT_LAYERS = 12, 10
_WIDER = 2.25
"""Width of the dense model over the others', whose square is its computing."""
_BYTES = 4
_VOCAB, _PROMPT_TOKENS = 8192, 8


def bench_read_time(
    *, width: int, batches: tuple[int, ...], new_tokens: int, rounds: int, plot: Path | None, progress: Progress
) -> ShownReport:
    """Decodes with each model in turns, one thread, with batches of different sequences.

    Args:
        width: Hidden size of the sparse models, a multiple of 64.
        batches: Sequences at once.
        new_tokens: Steps of a round.
        rounds: Pairs, after one round that does not count.
        plot: File of the picture.
        progress: Shows how far it is.

    Raises:
        ConfigError: If the width cannot be divided into heads.
        MissingExtraError: If matplotlib is not installed.
    """
    if width % 64:
        raise ConfigError(f"--width must be a multiple of 64, got {width}")
    torch.set_num_threads(1)
    bar = progress.add_task("random weights", total=len(_POOLS) * (1 + (rounds + 1) * len(batches)))
    models = {}
    for name in _POOLS:
        models[name] = random_model(name, width)
        progress.advance(bar)
    seconds: dict[str, dict[str, list[float]]] = {name: {str(batch): [] for batch in batches} for name in models}
    taken: dict[str, dict[str, float]] = {name: {} for name in models}
    progress.update(bar, description="decoding")
    for index in range(rounds + 1):
        draw = torch.Generator().manual_seed(index)
        for batch in batches:
            text = torch.randint(_VOCAB, (batch, _PROMPT_TOKENS + new_tokens), generator=draw)
            # Reversed every other round, so that no model always follows the same one.
            for name in list(models)[:: 1 if index % 2 == 0 else -1]:
                if index:
                    seconds[name][str(batch)].append(seconds_a_step(models[name], text))
                else:
                    taken[name][str(batch)] = experts_taken(models[name], text)
                progress.advance(bar)
    counted = {name: count(model.config) for name, model in models.items()}
    figures = {"models": counted, "batches": list(batches), "seconds": seconds, "taken": taken}
    report = ShownReport(command="benchmark read-time", model=f"width {width}", shown=READ_TIME, figures=figures)
    report.notes.append(
        "random weights in float32, one thread; bytes by the experts that the first round's tokens took"
    )
    return finished(report, plot)


def random_model(name: str, width: int) -> PRMoEForCausalLM:
    """Returns one of the four models, whose routers spread tokens over experts about evenly."""
    model = PRMoEForCausalLM(config_of(name, width))
    model.train(False)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    with torch.no_grad():
        # As usual, they would be small next to what layers add, which is alike for all tokens.
        model.get_parameter("model.embed_tokens.weight").normal_()
    return model


@torch.no_grad()
def seconds_a_step(model: PRMoEForCausalLM, text: Tensor) -> float:
    """Returns seconds of a step that reads the next token of each sequence, with a cache; the prompt does not count.

    Args:
        model: The model.
        text: (batch, prompt and steps), given: models decode other tokens than each other, and random ones the same
            again and again.
    """
    cache = model(input_ids=text[:, :_PROMPT_TOKENS], use_cache=True).past_key_values
    before = time.perf_counter()
    for place in range(_PROMPT_TOKENS, text.shape[1]):
        model(input_ids=text[:, place : place + 1], past_key_values=cache, use_cache=True)
    return (time.perf_counter() - before) / (text.shape[1] - _PROMPT_TOKENS)


def experts_taken(model: PRMoEForCausalLM, text: Tensor) -> float:
    """Decodes, and returns how many experts of all layers together a step's tokens take, on average."""
    with recorded_use(model) as use:
        seconds_a_step(model, text)
    # The first pass reads the prompt.
    found = [len(step.unique()) for steps in use.values() for step in steps[1:]]
    return sum(found) / (text.shape[1] - _PROMPT_TOKENS)


def config_of(name: str, width: int) -> PRMoEConfig:
    """Returns the configuration of one of the four models."""
    pools = _POOLS[name]
    wide = width if pools is not None else int(width * _WIDER)
    num_layers = _STUDENT_LAYERS if name == STUDENT else _LAYERS
    return PRMoEConfig.preset(
        "350M",
        vocab_size=_VOCAB,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=wide,
        intermediate_size=4 * wide,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        experts_per_layer=[0] * num_layers if pools is None else pools,
        moe_layers=None if pools is None else list(range(1, num_layers, 2)),
        residual="sum" if name in (PYRAMID, STUDENT) else None,
    )


def _tables(figures: Figures) -> list[Rows]:
    heads = ("model", "batch", "memory", "GB read a step", "ms a step", "tokens/s", "GB/s")
    rows = []
    for name, one in figures["models"].items():
        for batch in figures["batches"]:
            seconds = figures["seconds"][name][str(batch)]
            mean, gigabytes = sum(seconds) / len(seconds), _read(figures, name, batch)
            first = batch == figures["batches"][0]
            rows.append(
                (
                    name if first else "",
                    str(batch),
                    f"{one['total'] * _BYTES / 1e9:.2f} GB" if first else "",
                    f"{gigabytes:.2f}",
                    plus_minus([1e3 * one for one in seconds], digits=0),
                    f"{batch / mean:.1f}",
                    f"{gigabytes / mean:.1f}",
                )
            )
    return [Rows(heads, rows)]


def _read(figures: Figures, name: str, batch: int) -> float:
    one = figures["models"][name]
    return float(_BYTES * (one["others"] + figures["taken"][name][str(batch)] * one["expert"]) / 1e9)


def _verdicts(figures: Figures) -> list[str]:
    found = []
    for better, other in ((STANDARD, DENSE), (STUDENT, DENSE), (PYRAMID, STANDARD), (STUDENT, STANDARD)):
        for batch in figures["batches"]:
            ours, theirs = ([1e3 * one for one in figures["seconds"][name][str(batch)]] for name in (better, other))
            claim = f"{better} takes less time a step than {other}, batch {batch}"
            found.append(verdict(claim, paired(ours, theirs), unit=" ms", digits=0))
    return found


def _draw(figures: Figures, figure: Any) -> None:
    axes = figure.subplots()
    for name in figures["models"]:
        read = [_read(figures, name, batch) for batch in figures["batches"]]
        times = [1e3 * sum(each) / len(each) for each in figures["seconds"][name].values()]
        axes.plot(read, times, "o-", color=_COLORS[name], label=name)
        for batch, left, top in zip(figures["batches"], read, times, strict=True):
            axes.annotate(str(batch), (left, top), (5, -4), textcoords="offset points", fontsize=7, color=_COLORS[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("GB of weights that a step reads; labels: tokens of a step")
    axes.set_title("ms a step", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)


READ_TIME = Shown(name="read-time", page="results.md", tables=_tables, verdicts=_verdicts, draw=_draw, size=(6.5, 3.8))

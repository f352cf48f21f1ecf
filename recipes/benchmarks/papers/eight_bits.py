"""Tables 1 and 2 of Petals (Borzunov et al. 2022): weights in 8 bits against 16, by loss and by tokens a second.

Both sides compute in bfloat16, so that they differ in their weights alone. Losses are through servers in this process,
tokens a second through a server process for each width.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

from recipes.benchmarks.arms import check_directory, decode
from recipes.benchmarks.measure import Arm, take_turns
from recipes.benchmarks.papers.shown import Figures, Rows, Shown, ShownReport, finished
from recipes.study.verdicts import plus_minus, verdict
from recipes.benchmarks.swarm import model_on, served_model
from recipes.benchmarks.texts import text_pieces
from recipes.study.drawing import INK, MARK, MUTED, WARM, tidy
from recipes.study.intervals import t_interval
from swarm_plugins.demo.evaluation import losses_of
from swarm_plugins.talk.turns import load_tokenizer
from swarm_plugins.testing.in_process import InProcessSwarm

WIDE, EIGHT = "16 bits", "8 bits"
QUANTIZATION = {WIDE: "none", EIGHT: "int8"}
TEXTS = ("addresses", "python")
LITTLE = 0.01
"""Nats a token that count as little. The paper names no scale; this is ours."""
KEPT = 0.9
"""Share of the throughput that counts as kept: likewise ours."""
_COLORS = (INK, MARK, WARM, MUTED)


def bench_eight_bits(
    directories: Sequence[Path],
    *,
    num_pieces: int,
    length: int,
    batches: Sequence[int],
    prefix_tokens: int,
    new_tokens: int,
    rounds: int,
    plot: Path | None,
    progress: Progress,
) -> ShownReport:
    """Predicts two texts by each model with weights in 16 and in 8 bits, and decodes batches in turns.

    Args:
        directories: The models.
        num_pieces: Most pieces of each text.
        length: Tokens of a piece.
        batches: Sequences decoded together. Empty: no throughput.
        prefix_tokens: Tokens of the prompts.
        new_tokens: Tokens of a round.
        rounds: Rounds of each batch, after one to warm up.
        plot: File of the picture.
        progress: Shows how far it is.

    Raises:
        ConfigError: If the model, its tokenizer or a text is missing.
        MissingExtraError: If the texts are not installed.
    """
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for directory in directories:
        losses = _losses(check_directory(directory), num_pieces, length)
        speed = _speed(directory, batches, prefix_tokens, new_tokens, rounds, progress) if batches else {}
        models[directory.resolve().name] = {"losses": losses, "speed": speed}
    figures = {"length": length, "prefix": prefix_tokens, "new_tokens": new_tokens, "models": models}
    report = ShownReport(command="benchmark eight-bits", model=", ".join(models), shown=EIGHT_BITS, figures=figures)
    report.notes.append(
        "servers compute in bfloat16; for losses the client does in float32; intervals over pairs of pieces, of rounds"
    )
    return finished(report, plot)


def _losses(directory: Path, num_pieces: int, length: int) -> dict[str, Any]:
    """Returns for each text and width the losses of its pieces."""
    tokenizer = load_tokenizer(str(directory), None)
    pieces = {text: text_pieces(tokenizer, text, num_pieces, length)[0] for text in TEXTS}
    found = {width: _losses_in(directory, width, pieces) for width in QUANTIZATION}
    return {text: {width: losses[text] for width, losses in found.items()} for text in TEXTS}


def _losses_in(directory: Path, width: str, texts: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Returns the losses of the pieces by text; what it loads is freed before the next width."""
    found = {}
    with InProcessSwarm(directory, dtype=torch.bfloat16, quantization=QUANTIZATION[width]) as swarm:
        model = model_on(directory, swarm.connection)
        for text, pieces in texts.items():
            losses = losses_of(model, pieces, f"{directory.name}, {width}, {text}")
            found[text] = [round(one, 6) for one in losses.tolist()]
        del model
    gc.collect()  # models contain reference cycles
    return found


def _speed(
    directory: Path,
    batches: Sequence[int],
    prefix_tokens: int,
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> dict[str, Any]:
    """Returns for each batch and width the tokens a second of all its sequences together, by round."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        models: dict[str, tuple[PreTrainedModel, tuple[int, ...]]] = {}
        for width, quantization in QUANTIZATION.items():
            models[width] = served_model(stack, directory, dtype="bfloat16", quantization=quantization)
        for batch in batches:
            prompts = _prompts(models[WIDE][0].config.vocab_size, batch, prefix_tokens, rounds)
            arms = {width: Arm(_decoding(model, prompts, new_tokens), pids) for width, (model, pids) in models.items()}
            take_turns(f"{directory.name}, batch {batch}", arms.values(), rounds=rounds, progress=progress)
            found[str(batch)] = {
                width: [round(batch / one.seconds, 3) for one in arm.samples] for width, arm in arms.items()
            }
    return found


def _prompts(vocab_size: int, batch: int, prefix_tokens: int, rounds: int) -> Sequence[Tensor]:
    """Returns other random tokens for each round, ``[batch, S]``, since servers know beginnings again."""
    generator = torch.Generator().manual_seed(batch)
    return [torch.randint(3, vocab_size, (batch, prefix_tokens), generator=generator) for _ in range(rounds + 1)]


def _decoding(model: PreTrainedModel, prompts: Sequence[Tensor], new_tokens: int) -> Callable[[], float]:
    waiting = iter(prompts)
    return lambda: decode(model, next(waiting), new_tokens).seconds_per_token


def _each(figures: Figures, what: str) -> Iterator[tuple[str, str, Mapping[str, Sequence[float]]]]:
    """Yields model, text or batch, and the values by width."""
    for model, found in figures["models"].items():
        for name, values in found[what].items():
            yield model, name, values


def _changes(losses: Mapping[str, Sequence[float]]) -> list[float]:
    return [after - before for before, after in zip(losses[WIDE], losses[EIGHT], strict=True)]


def _shares(rates: Mapping[str, Sequence[float]]) -> list[float]:
    return [eight / wide for wide, eight in zip(rates[WIDE], rates[EIGHT], strict=True)]


def _tables(figures: Figures) -> list[Rows]:
    heads = ("model, text", *(f"loss, {width}" for width in QUANTIZATION), "change")
    rows = [
        (
            f"{model}, {text}",
            *(f"{t_interval(losses[width]).mean:.4f}" for width in QUANTIZATION),
            plus_minus(_changes(losses), sign="+"),
        )
        for model, text, losses in _each(figures, "losses")
    ]
    tables = [Rows(heads, rows)]
    heads = ("model", "batch", *(f"tokens/s, {width}" for width in QUANTIZATION), "8 bits over 16")
    rows = [
        (
            model,
            batch,
            *(plus_minus(rates[width], digits=1) for width in QUANTIZATION),
            plus_minus(_shares(rates), digits=2),
        )
        for model, batch, rates in _each(figures, "speed")
    ]
    return [*tables, Rows(heads, rows)] if rows else tables


def _verdicts(figures: Figures) -> list[str]:
    found = []
    for model, text, losses in _each(figures, "losses"):
        claim = f"weights in 8 bits cost less than {LITTLE} nats a token of {text}, {model}"
        found.append(verdict(claim, t_interval([LITTLE - one for one in _changes(losses)]), unit=" nats below"))
    for model, batch, rates in _each(figures, "speed"):
        claim = f"weights in 8 bits keep {KEPT:.0%} of the tokens a second at batch {batch}, {model}"
        found.append(verdict(claim, t_interval([one - KEPT for one in _shares(rates)]), unit=" above", digits=2))
    return found


def _draw(figures: Figures, figure: Any) -> None:
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.2, 1)})
    losses = list(_each(figures, "losses"))
    for row, (_, _, values) in enumerate(losses):
        interval = t_interval(_changes(values))
        left.plot([interval.low, interval.high], [row, row], color=MARK, linewidth=2)
        left.plot(interval.mean, row, "o", color=MARK, markersize=4)
    left.set_yticks(range(len(losses)), [f"{model}\n{text}" for model, text, _ in losses], fontsize=8)
    left.invert_yaxis()
    left.axvline(0, color=MUTED, linewidth=0.8)
    left.axvline(LITTLE, color=MUTED, linewidth=0.8, linestyle="--")
    left.locator_params(axis="x", nbins=5)
    left.set_xlabel("8 bits against 16: nats a token")
    for model, color in zip(figures["models"], _COLORS, strict=False):
        speed = figures["models"][model]["speed"]
        shares = [t_interval(_shares(rates)) for rates in speed.values()]
        places = range(len(speed))
        right.set_xticks(places, speed)
        right.plot(places, [one.mean for one in shares], "o-", color=color, label=model, markersize=4)
        right.vlines(places, [one.low for one in shares], [one.high for one in shares], color=color)
    right.axhline(1, color=MUTED, linewidth=0.8)
    right.set_xlabel("batch")
    right.set_ylabel("tokens a second, 8 bits over 16")
    if any(one["speed"] for one in figures["models"].values()):
        right.legend(frameon=False, fontsize=8)
    else:
        right.set_visible(False)
    for axes in (left, right):
        tidy(axes)


EIGHT_BITS = Shown(
    name="eight-bits", page="results.md", tables=_tables, verdicts=_verdicts, draw=_draw, size=(8.5, 3.2)
)

"""8 bits a number on the wire: `rotated8` against the dynamic blockwise code of Petals (Borzunov et al. 2022, 3.1).

That code (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", section 2) keeps, for each block, the
largest absolute value in float32, and for each number one of 256 fractions of it, spaced by powers of ten. Petals sends
blocks of 4,096, as hivemind does, with the table of the fractions in each message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from recipes.benchmarks.arms import local_model
from recipes.benchmarks.papers.shown import Figures, Rows, Shown, ShownReport, finished
from recipes.study.verdicts import paired, plus_minus, verdict
from recipes.benchmarks.texts import text_pieces
from recipes.study.drawing import GOOD, INK, MARK, MUTED, tidy
from recipes.study.intervals import t_interval
from swarm_plugins.talk.turns import load_tokenizer
from swarm_plugins.transport.codec import pack, packed_bytes, unpack
from swarm_plugins.transport.messages import Codec

Code = Callable[[Tensor], Tensor]
"""Rounds a flat float32 tensor as packing and unpacking it would."""

EXACT, PETALS = "none", "dynamic, blocks of 4096"
OURS: Codec = "rotated8"
TEXTS = ("addresses", "python")
_BLOCKS = (4096, 256, 128)
_ROUNDS = 9


def codes() -> dict[str, Code]:
    """Returns the codes by name."""
    found: dict[str, Code] = {EXACT: lambda flat: flat, OURS: _rotated}
    return found | {f"dynamic, blocks of {block}": _dynamic(block) for block in _BLOCKS}


def bytes_per_number(name: str) -> float:
    """Returns the bytes of a number in a long tensor; the dynamic code's table, 1 KiB a message, not included."""
    if name in (EXACT, OURS):
        return packed_bytes(name, torch.float32, 1 << 20) / (1 << 20)  # type: ignore[arg-type]
    return 1 + 4 / int(name.rpartition(" ")[2])


def bench_codes(
    directories: Sequence[Path],
    *,
    num_spans: int,
    num_pieces: int,
    length: int,
    plot: Path | None,
    progress: Progress,
) -> ShownReport:
    """Predicts two texts by each model, with the hidden states between spans of blocks rounded by each code.

    Args:
        directories: The models.
        num_spans: Servers of the chain that is computed in one process.
        num_pieces: Most pieces of each text.
        length: Tokens of a piece.
        plot: File of the picture.
        progress: Shows how far it is.

    Raises:
        ConfigError: If the model, its tokenizer or a text is missing.
        MissingExtraError: If the texts are not installed.
    """
    models: dict[str, Any] = {}
    for directory in directories:
        model, tokenizer = local_model(directory), load_tokenizer(str(directory), None)
        texts: dict[str, Any] = {}
        for text in TEXTS:
            pieces, _ = text_pieces(tokenizer, text, num_pieces, length)
            bar = progress.add_task(f"{directory.name}, {text}", total=len(pieces) * len(codes()))
            texts[text] = _predicted(model, pieces, num_spans, lambda bar=bar: progress.advance(bar))  # type: ignore[misc]
        models[directory.resolve().name] = texts
    figures = {
        "spans": num_spans,
        "length": length,
        "models": models,
        "bytes": {name: bytes_per_number(name) for name in codes()},
        "ms_per_mib": {name: _cpu_ms(code) for name, code in codes().items() if name != EXACT},
    }
    report = ShownReport(command="benchmark codes", model=", ".join(models), shown=CODES, figures=figures)
    report.notes.append("changes and their Student-t intervals (95 %) are over pairs of pieces of different documents")
    report.notes.append("dynamic: bitsandbytes quantize_blockwise; its table, 1 KiB a message, is not counted")
    return finished(report, plot)


@contextmanager
def rounded(model: PreTrainedModel, num_spans: int, code: Code, errors: list[float]) -> Iterator[None]:
    """Rounds what enters each span of blocks, and what leaves the last, as client and servers would.

    Args:
        model: Its decoder has ``layers``.
        num_spans: As many spans of equal lengths.
        code: How.
        errors: Gets the relative error of each rounding: the norm of the change over that of the hidden states.
    """
    layers: nn.ModuleList = model.get_decoder().layers

    def change(hidden: Tensor) -> Tensor:
        found = code(hidden.reshape(-1).contiguous()).view_as(hidden)
        errors.append(float((found - hidden).norm() / hidden.norm()))
        return found

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return change(inputs[0]), *inputs[1:]

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])

    starts = [len(layers) * index // num_spans for index in range(num_spans)]
    handles = [layers[start].register_forward_pre_hook(before) for start in starts]
    handles.append(layers[-1].register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _predicted(model: PreTrainedModel, pieces: Tensor, num_spans: int, on_piece: Callable[[], None]) -> dict[str, Any]:
    """Returns by code, for each piece: its loss, the share of tokens that stay the same, the relative error."""
    found: dict[str, Any] = {name: {"loss": [], "same": [], "error": []} for name in codes()}
    for piece in pieces:
        exact: Tensor | None = None
        for name, code in codes().items():
            errors: list[float] = []
            with torch.no_grad(), rounded(model, num_spans, code, errors):
                logits = model(input_ids=piece[None], use_cache=False).logits[0].float()  # [S, V]
            tokens = logits.argmax(dim=-1)
            exact = tokens if exact is None else exact
            one = found[name]
            one["loss"].append(round(float(functional.cross_entropy(logits[:-1], piece[1:])), 6))
            one["same"].append(round(float((tokens == exact).float().mean()), 6))
            one["error"].append(round(sum(errors) / len(errors), 7))
            on_piece()
    return found


def _rotated(flat: Tensor) -> Tensor:
    packed = cast(Tensor, pack(flat, OURS))  # float32 always packs
    return unpack(packed.view(torch.uint8), OURS, flat.dtype, flat.numel())


def _dynamic(block: int) -> Code:
    def code(flat: Tensor) -> Tensor:
        from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

        return dequantize_blockwise(*quantize_blockwise(flat, blocksize=block, nested=False))

    return code


def _cpu_ms(code: Code) -> float:
    """Returns the processor time of packing and unpacking 1 MiB of float32, the median of some rounds."""
    numbers = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(_ROUNDS + 1):
        started = time.thread_time()
        code(numbers)
        times.append(1e3 * (time.thread_time() - started))
    return round(median(times[1:]), 3)


def _tables(figures: Figures) -> list[Rows]:
    heads = ("model, text", "code", "bytes a number", "loss", "change of the loss", "same token", "error", "ms/MiB")
    rows = []
    for model, text, found in _each(figures):
        for name, one in found.items():
            is_exact, exact = name == EXACT, found[EXACT]
            changes = [after - before for before, after in zip(exact["loss"], one["loss"], strict=True)]
            rows.append(
                (
                    f"{model}, {text}" if is_exact else "",
                    f"`{name}`" if name in (EXACT, OURS) else name,
                    f"{figures['bytes'][name]:.3f}",
                    f"{t_interval(one['loss']).mean:.4f}",
                    "" if is_exact else plus_minus(changes, sign="+"),
                    "" if is_exact else f"{plus_minus([100 * each for each in one['same']], digits=2)} %",
                    "" if is_exact else f"{100 * t_interval(one['error']).mean:.2f} %",
                    "" if is_exact else f"{figures['ms_per_mib'][name]:.1f}",
                )
            )
    return [Rows(heads, rows)]


def _verdicts(figures: Figures) -> list[str]:
    found = []
    for model, text, one in _each(figures):
        kept = t_interval(
            [100 * (ours - theirs) for ours, theirs in zip(one[OURS]["same"], one[PETALS]["same"], strict=True)]
        )
        claim = f"`rotated8` changes fewer tokens of {text} than the dynamic code of Petals does, {model}"
        found.append(verdict(claim, kept, unit=" points", digits=2))
        loss = paired(*([abs(each - base) for each, base in _with_exact(one, name)] for name in (OURS, PETALS)))
        found.append(verdict(f"it moves the loss of {text} by less, {model}", loss, unit=" nats"))
    return found


def _with_exact(found: Mapping[str, Any], name: str) -> Iterator[tuple[float, float]]:
    return zip(found[name]["loss"], found[EXACT]["loss"], strict=True)


def _draw(figures: Figures, figure: Any) -> None:
    names = [name for name in figures["bytes"] if name != EXACT]
    panels = figure.subplots(1, 2, sharey=True)
    each = list(_each(figures))
    for place, (model, text, found) in enumerate(each):
        color = (INK, MARK, GOOD, MUTED)[place % 4]
        for row, name in enumerate(names):
            height = row + 0.6 * (place / max(1, len(each) - 1) - 0.5)
            changes = [after - before for after, before in _with_exact(found, name)]
            for axes, values in zip(panels, ([100 * one for one in found[name]["same"]], changes), strict=True):
                interval = t_interval(values)
                label = f"{model}, {text}" if row == 0 and axes is panels[0] else None
                axes.plot([interval.low, interval.high], [height] * 2, color=color, linewidth=2)
                axes.plot(interval.mean, height, "o", color=color, markersize=4, label=label)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    panels[0].set_xlabel("same most likely token, %")
    panels[1].set_xlabel("change of the loss, nats a token")
    panels[1].axvline(0, color=MUTED, linewidth=0.8)
    for axes in panels:
        tidy(axes)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)


def _each(figures: Figures) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for model, texts in figures["models"].items():
        for text, found in texts.items():
            yield model, text, found


CODES = Shown(name="codes", page="results.md", tables=_tables, verdicts=_verdicts, draw=_draw, size=(8.5, 3.8))

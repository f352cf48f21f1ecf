"""Table 1 of Eliseev and Mazur (2023): few bits of experts and of attention; a loss, and multiple choice as in MMLU.

Attention means all linear layers but experts and the output head. All figures are over the same pieces and questions,
so that arms are pairs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from recipes.benchmarks.papers.questions import CHANCE, ask, share_right
from recipes.benchmarks.papers.shown import Figures, Rows, Shown, ShownReport, finished
from recipes.study.verdicts import paired, plus_minus, verdict
from recipes.benchmarks.papers.traces import prmoe_checkpoint
from recipes.benchmarks.quality import Widths, with_each
from recipes.benchmarks.texts import document_pieces
from recipes.study.drawing import INK, MARK, MUTED, WARM, tidy
from recipes.study.intervals import t_interval
from swarm_plugins.demo.evaluation import losses_of
from swarm_plugins.sizes import format_bytes
from swarm_plugins.talk.turns import load_tokenizer
from swarm_plugins.weights.widths import Width, width_text

TEXTS = ("addresses", "python")
START, ENDING = 48, 16
"""Tokens of a question before its endings, and of each ending."""
FEW: Sequence[Width] = (4, "4dq", "3dq", "2dq")
"""Our 4 bits, and the paper's scheme: groups of 16 to 64 whose scales are quantized as well."""
WIDE = Widths(16, 16)
ASKED = (WIDE, Widths(4, 4), Widths("4dq", "4dq"), Widths("4dq", "3dq"), Widths("4dq", "2dq"))
"""Also answer questions; the others are compared by their losses alone."""


def bench_few_bits(
    directories: Sequence[Path],
    *,
    prmoe: Path | None = None,
    few: Sequence[Width] = FEW,
    num_pieces: int,
    length: int,
    per_document: int,
    plot: Path | None,
    progress: Progress,
) -> ShownReport:
    """Predicts two texts, and chooses endings, with experts or attention or both in few bits.

    Args:
        directories: Mixtures of experts.
        prmoe: Folder in which a small PR-MoE is trained, or was; None: without.
        few: Widths to try for experts alone and for attention alone; those in `FEW` also in the pairs of `ASKED`.
        num_pieces: Most pieces of each text.
        length: Tokens of a piece.
        per_document: Most questions of a document.
        plot: File of the picture.
        progress: Shows how far it is.

    Raises:
        ConfigError: If a model, its tokenizer or a text is missing.
        MissingExtraError: If the texts are not installed.
    """
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for directory in directories:
        models[directory.resolve().name] = _measured(directory, few, num_pieces, length, per_document, progress)
    if prmoe is not None:
        directory = prmoe_checkpoint(prmoe)
        models["PR-MoE"] = _measured(directory, few, num_pieces, length, per_document, progress)
    figures = {"length": length, "models": models}
    report = ShownReport(command="benchmark few-bits", model=", ".join(models), shown=FEW_BITS, figures=figures)
    for name, one in models.items():
        asked_of = " and ".join(f"{count} of {text}" for text, count in one["questions"].items())
        report.notes.append(f"questions for {name}: {asked_of}, {START} tokens with four endings of {ENDING}")
    report.notes.append("intervals over pieces of different documents, and over documents; without calibration data")
    return finished(report, plot)


def _measured(
    directory: Path, few: Sequence[Width], num_pieces: int, length: int, per_document: int, progress: Progress
) -> dict[str, Any]:
    """Returns the losses and the shares of right answers of one model."""
    tokenizer = load_tokenizer(str(directory), None)
    pieces = {text: torch.cat(document_pieces(tokenizer, text, length, 1))[:num_pieces] for text in TEXTS}
    questions = {text: ask(document_pieces(tokenizer, text, START + ENDING, per_document), ENDING) for text in TEXTS}
    asked = [one for one in ASKED if one == WIDE or one.experts in few]
    pairs = list(dict.fromkeys([*asked, *(pair for one in few for pair in (Widths(16, one), Widths(one, 16)))]))
    arms: dict[str, Any] = {}
    bar = progress.add_task("widths", total=len(pairs))

    def use(widths: Widths, model: PreTrainedModel, num_bytes: int, _: float) -> None:
        found: dict[str, Any] = {"bytes": num_bytes, "losses": {}, "right": {}}
        for text in TEXTS:
            losses = losses_of(model, pieces[text], f"{_name(widths)}, {text}")
            found["losses"][text] = [round(one, 6) for one in losses.tolist()]
            if widths in asked:
                mine = progress.add_task(f"{_name(widths)}, {text}", total=len(questions[text]))
                found["right"][text] = share_right(model, questions[text], partial(progress.advance, mine))
                progress.remove_task(mine)
        arms[_name(widths)] = found
        progress.advance(bar)

    with tempfile.TemporaryDirectory(prefix="swarm-few-bits-") as work:
        with_each(str(directory), Path(work), pairs, use)
    return {
        "few": list(few),
        "asked": [_name(one) for one in asked],
        "questions": {text: sum(map(len, questions[text])) for text in TEXTS},
        "arms": {_name(one): arms[_name(one)] for one in pairs},
    }


def _name(widths: Widths) -> str:
    return f"{widths.attention}/{widths.experts}"


def _told(name: str) -> tuple[str, str]:
    """Returns the widths of attention and of experts, in words."""
    attention, experts = (width_text(int(one) if one.isdigit() else one) for one in name.split("/"))  # type: ignore[arg-type]
    return attention, experts


def _changes(figures: Figures, name: str, text: str) -> list[float]:
    """Returns by piece what an arm adds to the loss of the wide one."""
    wide, mine = (figures["arms"][one]["losses"][text] for one in (figures["asked"][0], name))
    return [after - before for before, after in zip(wide, mine, strict=True)]


def _tables(figures: Figures) -> list[Rows]:
    return [_table(model, one) for model, one in figures["models"].items()]


def _table(model: str, figures: Figures) -> Rows:
    heads = [f"{model}: attention", "experts", "size"]
    for text in TEXTS:
        heads += [f"change of the loss, {text}", f"right answers, {text}"]
    rows = []
    for name, one in figures["arms"].items():
        cells = []
        for text in TEXTS:
            is_wide = name == figures["asked"][0]
            cells.append("" if is_wide else plus_minus(_changes(figures, name, text), sign="+"))
            right = one["right"].get(text)
            cells.append("" if right is None else f"{plus_minus([100 * each for each in right], digits=1)} %")
        rows.append((*_told(name), format_bytes(one["bytes"]), *cells))
    return Rows(heads, rows)


def _verdicts(figures: Figures) -> list[str]:
    return [
        sentence
        for model, one in figures["models"].items()
        for sentence in (*_of_experts(one, model), *_of_answers(one, model))
    ]


def _of_experts(figures: Figures, model: str) -> list[str]:
    """Returns whether experts bear few bits better than attention does: by what it costs, and by what it saves."""
    arms, wide = figures["arms"], figures["asked"][0]
    found = []
    for width in figures["few"]:
        names = f"16/{width}", f"{width}/16"
        saved = [(arms[wide]["bytes"] - arms[name]["bytes"]) / 1e9 for name in names]
        for text in TEXTS:
            experts, attention = (_changes(figures, name, text) for name in names)
            claim = f"{_width(width)} cost experts less than attention, {text}, {model}"
            found.append(verdict(claim, paired(experts, attention), unit=" nats"))
            each = [[one / size for one in changes] for changes, size in zip((experts, attention), saved, strict=True)]
            claim = f"for each GB that they save, {_width(width)} cost experts less than attention, {text}, {model}"
            found.append(verdict(claim, paired(*each), unit=" nats/GB", digits=2))
    return found


def _of_answers(figures: Figures, model: str) -> list[str]:
    """Returns whether few bits cost right answers, and whether they leave more than chance; over all documents."""
    right = {
        name: [100 * one for text in TEXTS for one in figures["arms"][name]["right"][text]] for name in figures["asked"]
    }
    wide, *others = figures["asked"]
    found = []
    for name in others:
        attention, experts = _told(name)
        told = f"attention in {attention} and experts in {experts}"
        claim = f"{told} cost right answers, {model}"
        found.append(verdict(claim, paired(right[name], right[wide]), unit=" points", digits=1))
        above = t_interval([one - 100 * CHANCE for one in right[name]])
        claim = f"{told} still choose better than by chance, {model}"
        found.append(verdict(claim, above, unit=" points", digits=1))
    return found


def _width(width: Width) -> str:
    return width_text(width)


def _draw(figures: Figures, figure: Any) -> None:
    rows = figure.subplots(len(figures["models"]), 2, squeeze=False)
    for (model, one), axes in zip(figures["models"].items(), rows, strict=True):
        _draw_model(one, *axes)
        axes[0].set_ylabel(model, fontsize=9)
    rows[0][0].set_title("change of the loss, nats a token", fontsize=9)
    rows[0][1].set_title("right answers, %: attention / experts", fontsize=9)
    for axes in rows.flat:
        tidy(axes)
        axes.legend(frameon=False, fontsize=8)


def _draw_model(figures: Figures, left: Any, right: Any) -> None:
    for text, shift in zip(TEXTS, (-0.15, 0.15), strict=True):
        for color, form, label in ((MARK, "16/{}", "experts"), (WARM, "{}/16", "attention")):
            marker = "o" if text == TEXTS[0] else "s"
            for place, width in enumerate(figures["few"]):
                interval = t_interval(_changes(figures, form.format(width), text))
                where = place + shift
                left.plot([where] * 2, [max(1e-3, interval.low), interval.high], color=color, linewidth=1.5)
                name = f"{label}, {text}" if place == 0 else None
                left.plot(where, interval.mean, marker, color=color, markersize=4, label=name)
        _draw_right(figures, text, shift, right)
    left.set_xticks(range(len(figures["few"])), [_width(one) for one in figures["few"]])
    left.set_yscale("log")
    names = [f"{attention} /\n{experts}" for attention, experts in map(_told, figures["asked"])]
    right.set_xticks(range(len(names)), names, fontsize=8)
    right.axhline(100 * CHANCE, color=MUTED, linewidth=0.8, label="chance")


def _draw_right(figures: Mapping[str, Any], text: str, shift: float, axes: Any) -> None:
    marker, color = ("o", INK) if text == TEXTS[0] else ("s", MUTED)
    for place, name in enumerate(figures["asked"]):
        interval = t_interval([100 * one for one in figures["arms"][name]["right"][text]])
        axes.plot([place + shift] * 2, [interval.low, interval.high], color=color, linewidth=1.5)
        axes.plot(place + shift, interval.mean, marker, color=color, markersize=4, label=text if place == 0 else None)


FEW_BITS = Shown(name="few-bits", page="results.md", tables=_tables, verdicts=_verdicts, draw=_draw, size=(8.5, 6.4))

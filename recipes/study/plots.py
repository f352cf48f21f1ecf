"""Pictures of a study: intervals of the claims, losses during training, cost at equal loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.study.cost import DENSE, SPARSE
from recipes.study.drawing import GOOD, INK, MARK, MUTED, WARM, new_figure, save_svg, settings, tidy
from recipes.study.report import SHOWN, outcomes

_CURVES = {"dense": MUTED, "first-half": WARM, "second-half": MARK, "standard": INK, "pr-moe": GOOD}
_COST_AXES = (
    ("parameters", "parameters, millions", 1e-6),
    ("latency_s", "decode latency, ms per token", 1e3),
    ("tokens_per_s", "throughput, tokens per second", 1.0),
)


def draw(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws all pictures that the figures have data for, as SVG for light and dark pages.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    drawings = {"prmoe-claims.svg": _draw_claims} if figures["arms"] else {}
    if figures["arms"].keys() & _CURVES.keys():
        drawings["prmoe-curves.svg"] = _draw_curves
    if "cost" in figures:
        drawings["prmoe-cost.svg"] = _draw_cost
    files = []
    with settings("prmoe-study"):
        for name, drawing in drawings.items():
            figure = new_figure()
            drawing(figures, figure)
            save_svg(figure, folder / name)
            files.append(folder / name)
    return files


def _draw_claims(figures: Mapping[str, Any], figure: Any) -> None:
    found = [(one, one.evidence) for one in outcomes(figures) if one.evidence is not None and one.evidence.count > 1]
    figure.set_size_inches(8.5, 0.8 + 0.36 * len(found))
    axes = figure.subplots()
    for row, (one, interval) in enumerate(found):
        color = GOOD if one.verdict == SHOWN else MUTED
        axes.plot([interval.low, interval.high], [row, row], color=color, linewidth=3, solid_capstyle="butt")
        axes.plot(interval.mean, row, "o", color=color)
    axes.set_yticks(range(len(found)), [f"{one.claim.name}: {one.verdict.partition(';')[0]}" for one, _ in found])
    axes.invert_yaxis()
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("mean over paired seeds and 95 % interval, nats per byte")
    tidy(axes)


def _draw_curves(figures: Mapping[str, Any], figure: Any) -> None:
    figure.set_size_inches(8.5, 3.6)
    axes = figure.subplots()
    for arm, color in _CURVES.items():
        curves = list(figures["arms"].get(arm, {}).get("curves", {}).values())
        if curves:
            steps = [step for step, _ in curves[0]]
            means = [sum(curve[index][1] for curve in curves) / len(curves) for index in range(len(steps))]
            axes.plot(steps, means, "o-", label=arm, color=color, linewidth=1.2, markersize=3)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.legend(frameon=False)
    tidy(axes)


def _draw_cost(figures: Mapping[str, Any], figure: Any) -> None:
    figure.set_size_inches(10, 3.4)
    costs = figures["cost"]["arms"]
    losses = {arm: one["loss"] for arm, one in costs.items()}
    dense, sparse = ([arm for arm in arms if arm in costs] for arms in (DENSE, SPARSE))
    for axes, (name, title, unit) in zip(figure.subplots(1, 3, sharey=True), _COST_AXES, strict=True):
        values = {arm: costs[arm][name] * unit for arm in costs}
        axes.plot([values[arm] for arm in dense], [losses[arm] for arm in dense], "s-", color=MUTED)
        axes.plot([values[arm] for arm in sparse], [losses[arm] for arm in sparse], "o", color=MARK)
        for arm, value in values.items():
            place = (4, -9) if arm == "pr-moe" else (4, 4)  # its loss is close to standard MoE's
            axes.annotate(arm, (value, losses[arm]), xytext=place, textcoords="offset points", fontsize=7)
        axes.margins(x=0.3, y=0.12)
        axes.set_xlabel(title)
        tidy(axes)
    figure.axes[0].set_ylabel("held-out loss, nats per byte")

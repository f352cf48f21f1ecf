"""Pictures of a study: intervals of the claims, losses during training, cost at equal loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm_plugins.errors import MissingExtraError
from swarm_plugins.study.cost import DENSE, SPARSE
from swarm_plugins.study.intervals import t_interval
from swarm_plugins.study.report import SHOWN, outcomes

_GREEN, _GREY, _BLUE = "#1a7f37", "#8c959f", "#0969da"
_COST_AXES = (
    ("parameters", "parameters", 1.0),
    ("latency_s", "decode latency, ms per token", 1e3),
    ("tokens_per_s", "throughput, tokens per second", 1.0),
)


def draw(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws all pictures that the figures have data for, as SVG.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise MissingExtraError("the pictures need matplotlib: pip install 'swarm_plugins[plot]'") from exc
    drawings = {"prmoe-claims.svg": _draw_claims, "prmoe-curves.svg": _draw_curves}
    if "cost" in figures:
        drawings["prmoe-cost.svg"] = _draw_cost
    files = []
    # Without these two, the same figures would give another file every time.
    with matplotlib.rc_context({"svg.hashsalt": "prmoe-study", "font.size": 9}):
        for name, drawing in drawings.items():
            figure = Figure(layout="constrained")
            drawing(figures, figure)
            figure.savefig(folder / name, metadata={"Date": None})
            files.append(folder / name)
    return files


def _draw_claims(figures: Mapping[str, Any], figure: Any) -> None:
    found = [(one, one.evidence) for one in outcomes(figures) if one.evidence is not None and one.evidence.count > 1]
    figure.set_size_inches(8.5, 0.8 + 0.36 * len(found))
    axes = figure.subplots()
    for row, (one, interval) in enumerate(found):
        color = _GREEN if one.verdict == SHOWN else _GREY
        axes.plot([interval.low, interval.high], [row, row], color=color, linewidth=3, solid_capstyle="butt")
        axes.plot(interval.mean, row, "o", color=color)
    axes.set_yticks(range(len(found)), [f"{one.claim.name}: {one.verdict.partition(';')[0]}" for one, _ in found])
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("mean over paired seeds and 95 % interval, nats per byte; a claim needs all of it right of zero")
    _tidy(axes)


def _draw_curves(figures: Mapping[str, Any], figure: Any) -> None:
    figure.set_size_inches(8, 4)
    axes = figure.subplots()
    for arm, entry in figures["arms"].items():
        curves = list(entry["curves"].values())
        steps = [step for step, _ in curves[0]]
        means = [sum(curve[index][1] for curve in curves) / len(curves) for index in range(len(steps))]
        axes.plot(steps, means, label=arm, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.legend(fontsize=7, ncols=2, frameon=False)
    _tidy(axes)


def _draw_cost(figures: Mapping[str, Any], figure: Any) -> None:
    figure.set_size_inches(10, 3.4)
    costs = figures["cost"]["arms"]
    losses = {arm: t_interval(list(figures["arms"][arm]["losses"].values())).mean for arm in costs}
    dense, sparse = ([arm for arm in arms if arm in costs] for arms in (DENSE, SPARSE))
    for axes, (name, title, unit) in zip(figure.subplots(1, 3, sharey=True), _COST_AXES, strict=True):
        values = {arm: costs[arm][name] * unit for arm in costs}
        axes.plot([values[arm] for arm in dense], [losses[arm] for arm in dense], "s-", color=_GREY)
        axes.plot([values[arm] for arm in sparse], [losses[arm] for arm in sparse], "o", color=_BLUE)
        for arm, value in values.items():
            axes.annotate(arm, (value, losses[arm]), xytext=(4, 4), textcoords="offset points", fontsize=7)
        axes.set_xscale("log")
        axes.margins(x=0.25, y=0.12)
        axes.set_xlabel(title)
        _tidy(axes)
    figure.axes[0].set_ylabel("held-out loss, nats per byte")


def _tidy(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

"""Draws metrics over the versions of an adapter."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from swarm_plugins.errors import naming_extras
from swarm_plugins.hub.results import BASE_TAG, EvalRecord, Series, in_order, series_of

_COLUMNS = 2
_MAX_PANELS = 12
_MAX_TICKS = 12
_PANEL = (4.2, 2.6)
"""Inches."""
_INK, _MUTED, _LINE = "#1f2328", "#656d76", "#0969da"


def check_plot() -> None:
    """Checks, before the work, that results can be drawn.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    with naming_extras():
        import matplotlib.figure  # noqa: F401


def draw_results(records: Sequence[EvalRecord]) -> bytes:
    """Returns a PNG with a panel for each metric of each task: its value and standard error over the versions.

    Of more than twelve metrics, the last twelve are drawn.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    with naming_extras():
        import matplotlib
        from matplotlib.figure import Figure
    series = series_of(records)[-_MAX_PANELS:]
    tags = in_order({record.tag for one in series for record in one.records} - {BASE_TAG})
    columns = min(_COLUMNS, max(1, len(series)))
    rows = max(1, math.ceil(len(series) / columns))
    with matplotlib.rc_context({"font.size": 9, "text.parse_math": False}):
        figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows), layout="constrained", facecolor="white")
        for place, one in enumerate(series, start=1):
            _draw_one(figure.add_subplot(rows, columns, place), one, tags)
        written = io.BytesIO()
        figure.savefig(written, format="png", dpi=144, metadata={"Software": None})
    return written.getvalue()


def _draw_one(axes: Any, series: Series, tags: Sequence[str]) -> None:
    records = [record for record in series.records if record.tag != BASE_TAG]
    places = [tags.index(record.tag) for record in records]
    values = [record.value for record in records]
    errors = [record.stderr or 0.0 for record in records]
    axes.errorbar(places, values, yerr=errors, color=_LINE, marker="o", markersize=4, capsize=3, linewidth=1.2)
    for base in (record for record in series.records if record.tag == BASE_TAG):
        axes.axhline(base.value, color=_MUTED, linestyle="--", linewidth=1)
        axes.annotate(
            "base", (1, base.value), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=_MUTED
        )
    axes.set_title(series.label, loc="left", color=_INK)
    step = max(1, math.ceil(len(tags) / _MAX_TICKS))
    axes.set_xticks(range(0, len(tags), step), tags[::step])
    axes.set_xlim(-0.5, max(1, len(tags)) - 0.5)
    better = {True: "higher is better", False: "lower is better", None: ""}[series.records[-1].higher_is_better]
    axes.set_ylabel(better, color=_INK)
    axes.grid(axis="y", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

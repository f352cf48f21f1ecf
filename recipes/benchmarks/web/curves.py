"""Curves of `examples/train_by_calls.py` against ``swarm api --train`` on local servers: loss, and reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from recipes.benchmarks.web.chats import served
from recipes.benchmarks.arms import check_directory
from recipes.benchmarks.papers.shown import ROOT, Figures, Rows, Shown, ShownReport, finished
from recipes.study.drawing import GOOD, INK, MARK, tidy
from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm

_PROGRAM = ROOT / "examples" / "train_by_calls.py"
_KEY = "tml-benchmark"
_LONGEST_S = 6 * 3600
_WINDOW = 5
"""Steps whose mean is drawn: the reward of a step is of some dozens of answers."""


def bench_curves(
    directory: Path, *, num_servers: int, options: Sequence[str], plot: Path | None, progress: Progress
) -> ShownReport:
    """Runs the example, with options of its own.

    Raises:
        ConfigError: If the directory has no model.
        SwarmError: If the API does not start, or the example fails or does not end.
    """
    name = check_directory(directory).resolve().name
    progress.add_task("training", total=None)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalSwarm(directory, num_servers=num_servers, dtype="float32") as swarm,
    ):
        curves = Path(folder) / "curves.json"
        words = ["--train", "--state-dir", folder, "--name", name, "--api-key", _KEY]
        words += [word for peer in swarm.initial_peers for word in ("--initial-peers", peer)]
        with served(directory, *words, threads=1) as (_, url):
            command = [sys.executable, str(_PROGRAM), name, "--json", str(curves), *options]
            environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": _KEY, "TINKER_TELEMETRY": "0"}
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False, timeout=_LONGEST_S
                )
            except subprocess.TimeoutExpired as exc:
                raise SwarmError(f"{_PROGRAM} has not ended after {_LONGEST_S} s: give it fewer --steps") from exc
        if done.returncode:
            raise SwarmError(f"{_PROGRAM} has failed:\n{done.stderr[-2000:]}")
        figures = json.loads(curves.read_text())
    report = ShownReport(command="benchmark curves", model=name, shown=CURVES, figures=figures)
    report.notes.append(f"{num_servers} server(s), float32, one thread each; one run of each loop")
    return finished(report, plot)


def _tables(figures: Figures) -> list[Rows]:
    rows = []
    for name, key, curve in (("texts", "loss", "supervised"), ("rewards", "reward", "rewarded")):
        one = figures[curve]
        (_, before), *_, (steps, after) = one["held_out"]
        first, last = (sum(part) / len(part) for part in (one[key][:_WINDOW], one[key][-_WINDOW:]))
        rows.append((f"{name}: {key}", str(steps), *(f"{value:.3f}" for value in (first, last, before, after))))
    return [
        Rows(("loop", "steps", f"first {_WINDOW} steps", f"last {_WINDOW} steps", "held out, before", "after"), rows)
    ]


def _verdicts(figures: Figures) -> list[str]:
    return []


def _draw(figures: Figures, figure: Any) -> None:
    panels = zip(figure.subplots(1, 2), ("supervised", "rewarded"), ("loss", "reward"), (MARK, GOOD), strict=True)
    for axes, curve, key, color in panels:
        values = figures[curve][key]
        means = [
            sum(part) / len(part) for part in (values[max(0, end - _WINDOW) : end] for end in range(1, len(values) + 1))
        ]
        axes.plot(range(1, len(values) + 1), values, color=color, alpha=0.35, linewidth=0.8)
        axes.plot(range(1, len(values) + 1), means, color=color, label=f"mean of {_WINDOW} steps")
        axes.plot(*zip(*figures[curve]["held_out"], strict=True), "o", color=INK, markersize=4, label="held out")
        axes.set_title(f"{key} by step", fontsize=9)
        axes.legend(frameon=False, fontsize=8)
        tidy(axes)


CURVES = Shown(
    name="curves", page="how-to/train-by-calls.md", tables=_tables, verdicts=_verdicts, draw=_draw, size=(8.5, 3.2)
)

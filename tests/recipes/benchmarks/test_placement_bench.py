"""The bench of placement: its optimum is one, and its report and picture come out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from recipes.benchmarks.places import run as placement
from recipes.benchmarks.places.run import bench_placement, upper_bound
from swarm_plugins.errors import ConfigError
from swarm_plugins.routing.placement import Placed


def placed(length: int, rate: float) -> Placed:
    return Placed(peer=f"{length} {rate}", start=0, end=length, rate=rate)


@pytest.mark.parametrize(
    ("servers", "optimum"),
    [
        pytest.param([placed(4, 1.0), placed(4, 3.0)], 1.0, id="the-slower-half"),
        pytest.param([placed(4, 1.0), placed(4, 1.5), placed(8, 2.0)], 3.0, id="two-halves-and-a-whole"),
        pytest.param([placed(3, 5.0), placed(3, 5.0)], 0.0, id="two-blocks-are-left"),
        pytest.param([placed(8, 1.0)] * 20, 20.0, id="many-are-bounded-by-the-mean"),
    ],
)
def test_the_optimum_of_few_servers_is_exact(servers: list[Placed], optimum: float) -> None:
    assert upper_bound(8)(tuple(servers)) == pytest.approx(optimum, abs=1e-6)


def test_optima_that_are_not_proven_in_time_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_SOLVE_S", 0.0)
    placement._optimum.cache_clear()
    with Progress(disable=True) as progress:
        report = bench_placement(sizes=[6], churn_h=0.1, seed=2, plot=None, progress=progress)
    placement._optimum.cache_clear()
    assert "optima were not proven within 0 s each" in report.notes[-1]


def test_what_the_solver_prints_is_not_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def solve(*args: object, **settings: object) -> object:
        os.write(1, b"HighsMipSolverData::noise")
        return milp(*args, **settings)

    milp = placement.milp
    monkeypatch.setattr(placement, "milp", solve)
    assert upper_bound(8)((placed(5, 1.0), placed(5, 2.0))) == pytest.approx(1.0, abs=1e-6)
    sys.stdout.write("shown\n")
    assert capfd.readouterr().out == "shown\n"


def test_a_small_swarm_is_reported_and_drawn(tmp_path: Path) -> None:
    with Progress(disable=True) as progress:
        picture = tmp_path / "placement.svg"
        report = bench_placement(sizes=[5], churn_h=0.2, seed=1, plot=picture, progress=progress)
        [figure] = report.figures
        assert 0 < figure.share <= 1 + 1e-6
        assert figure.num_uncovered == 0
        report.print_tables(Console(quiet=True))
        assert "<svg" in picture.read_text()
        assert picture.stat().st_size < 30_000
        with pytest.raises(ConfigError, match=r"name a file that ends in \.svg"):
            bench_placement(sizes=[1], churn_h=0.0, seed=1, plot=tmp_path / "a.docx", progress=progress)

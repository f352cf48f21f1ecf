"""The bench of dispatch: its arms agree, its loads are what they are called, its goals are read off the right cells."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from recipes.benchmarks import dispatch
from recipes.benchmarks.dispatch import OURS, PADDED, PASSES, Cell, DispatchReport, Setting


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTH": 16, "INNER": 8, "_SHORTEST_S": 0.0}.items():
        monkeypatch.setattr(dispatch, name, value)
    monkeypatch.setattr(dispatch, "_made", {})


@pytest.mark.parametrize("is_skewed", [False, True])
def test_loads_are_balanced_or_skewed(is_skewed: bool) -> None:
    index, weights = dispatch.choices(Setting("layer", PASSES[0], 8, 64, is_skewed))
    loads = torch.bincount(index.flatten(), minlength=8)
    assert weights.shape == index.shape
    assert loads.sum() == 128
    assert (loads[0] > 2 * loads[7]) if is_skewed else bool((loads == 16).all())


@pytest.mark.parametrize("what", PASSES)
@pytest.mark.parametrize("is_skewed", [False, True])
def test_all_arms_agree_and_are_timed(what: str, is_skewed: bool) -> None:
    cell = dispatch._measured(Setting("layer", what, 4, 12, is_skewed), rounds=1)
    assert list(cell.times_ms) == [PADDED, "eager", "grouped_mm", "batched_mm", OURS]
    assert None not in cell.times_ms.values()


@pytest.mark.parametrize("what", PASSES[:2])
def test_routing_alone_agrees(what: str) -> None:
    cell = dispatch._measured(Setting("routing", what, 4, 12, True), rounds=1)
    assert list(cell.times_ms) == [PADDED, OURS]


def test_arms_that_would_not_fit_are_skipped_and_shown_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MOST_BYTES", 0)
    cell = dispatch._measured(Setting("layer", PASSES[2], 4, 12, False), rounds=1)
    assert [name for name, time in cell.times_ms.items() if time is None] == [PADDED, "eager", "batched_mm"]
    assert cell.over("eager") is None
    console = Console(width=200, record=True, file=io.StringIO())
    DispatchReport(command="c", model="m", cells=[cell]).print_tables(console)
    assert " - " in console.export_text()


def test_goals_are_read_off_their_cells(tmp_path: Path) -> None:
    def cell(part: str, what: str, experts: int, tokens: int, is_skewed: bool, **times: float | None) -> Cell:
        return Cell(setting=Setting(part, what, experts, tokens, is_skewed), times_ms=dict(times))

    report = DispatchReport(
        command="c",
        model="m",
        cells=[
            cell("routing", PASSES[0], 8, 1024, False, padded=42.0, swarm_table=2.0),
            cell("routing", PASSES[0], 8, 1024, True, padded=42.0, swarm_table=2.0),
            cell("routing", PASSES[0], 64, 1024, True, padded=42.0, swarm_table=4.0),
            cell("layer", PASSES[0], 64, 1, False, padded=9.0, eager=2.0, grouped_mm=1.0, swarm_table=1.0),
            cell("layer", PASSES[0], 64, 8, False, padded=9.0, eager=2.0, grouped_mm=None, swarm_table=3.0),
        ],
    )
    assert [(one.value, one.reached) for one in report.goals()] == [
        (21.0, True),
        (9.0, False),
        (1.5, False),
        (2.0, False),
    ]
    file = tmp_path / "figures.json"
    report.write_json(file)
    found = json.loads(file.read_text())
    assert found["cells"][0]["experts"] == 8
    assert found["goals"][0]["reached"] is True


def test_a_full_run_has_more_cells_of_every_table() -> None:
    few, all_cells = dispatch.settings(is_full=False), dispatch.settings(is_full=True)
    assert {one[:2] for one in few} == {one[:2] for one in all_cells}
    assert len(few) < len(all_cells) / 2

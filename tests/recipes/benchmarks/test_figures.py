from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from recipes.benchmarks.figures import Figure, SwarmReport, check_writable
from swarm_plugins.errors import ConfigError
from tests.unit.table_kit import columns_of


def figure(ratio: float, goal: float | None, *, upper: bool = False) -> Figure:
    return Figure(
        name="decode", unit="ms", local=50.0, swarm=50.0 / ratio, ratio=ratio, goal=goal, goal_is_upper_bound=upper
    )


@pytest.mark.parametrize(
    ("ratio", "goal", "upper", "reached"),
    [
        pytest.param(0.96, 0.95, False, True, id="above"),
        pytest.param(0.94, 0.95, False, False, id="below"),
        pytest.param(0.5, 0.6, True, True, id="under-the-bound"),
        pytest.param(0.7, 0.6, True, False, id="over-the-bound"),
        pytest.param(0.7, None, False, None, id="no-goal"),
    ],
)
def test_a_figure_knows_whether_its_goal_is_reached(
    ratio: float, goal: float | None, upper: bool, reached: bool | None
) -> None:
    assert figure(ratio, goal, upper=upper).reached is reached


def test_the_table_shows_figure_goal_and_machine() -> None:
    report = SwarmReport(command="benchmark decode", model="toy", figures=[figure(0.94, 0.95)], notes=["a note"])
    output = io.StringIO()
    report.print_tables(Console(file=output, width=200))
    text = output.getvalue()
    for word in ("benchmark decode: toy", "0.94", ">= 0.95", "missed", "a note", "torch 2."):
        assert word in text


@pytest.mark.parametrize("width", [140, 80, 40])
def test_no_character_of_a_table_is_lost(width: int) -> None:
    name = "training through 2 servers with a core each, 100 ms, 4 pushed chunks / the whole batch by the client"
    one = Figure(name=name, unit="tokens/s", local=12345.6, swarm=23456.7, ratio=1.9, goal=1.5, cpu_ratio=1.23)
    report = SwarmReport(command="benchmark network", model="a[b]", figures=[one], notes=["of [c]"])
    output = io.StringIO()
    report.print_tables(Console(file=output, width=width))
    text = output.getvalue()
    cells = ["12345.6", "23456.7", "tokens/s", "1.90", ">=1.50", "reached", "1.23"]
    headings = ["local", "swarm", "unit", "ratio", "goal", "", "CPUratio"]
    assert columns_of(text) == [
        "figure" + name.replace(" ", ""),
        *(heading + cell for heading, cell in zip(headings, cells, strict=True)),
    ]
    assert "benchmark network: a[b]" in text
    assert "of [c]" in text
    if width == 140:
        # Names are folded before numbers.
        assert all(f" {cell} " in text for cell in ("12345.6", "23456.7", "tokens/s", "1.90", ">= 1.50", "reached"))


def test_files_are_tried_before_anything_is_measured(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    check_writable(kept, "the figures")
    check_writable(tmp_path / "new.json", "the figures")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert kept.read_text() == "before"
    with pytest.raises(ConfigError, match=r"cannot write the picture to .*missing/a\.svg: No such file or directory"):
        check_writable(tmp_path / "missing" / "a.svg", "the picture")


def test_json_carries_every_figure(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    SwarmReport(command="benchmark decode", model="toy", figures=[figure(0.96, 0.95)]).write_json(path)
    content = json.loads(path.read_text())
    assert content["figures"][0]["ratio"] == 0.96
    assert content["figures"][0]["reached"] is True
    assert content["machine"]["cores"]


def test_an_unwritable_json_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "figures.json"
    with pytest.raises(ConfigError, match=r"cannot write the figures to .*missing/figures\.json"):
        SwarmReport(command="benchmark decode", model="toy").write_json(path)

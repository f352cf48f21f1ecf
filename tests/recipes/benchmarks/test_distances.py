"""Tokens a second over the distance: the table, the file that holds the points, and the picture."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from recipes.benchmarks.links import Link
from recipes.benchmarks.network.distances import DistanceReport, Distances, Point, draw_distances
from swarm_plugins.errors import ConfigError

POINTS = [
    Point(rtt_ms=5, server_rtt_ms=20, local=15.2, star=10.5, pushed=8.25, drafted=16.5, tokens_per_trip=3.125),
    Point(rtt_ms=150, server_rtt_ms=20, local=15.4, star=1.9, pushed=3.75, drafted=9.5, tokens_per_trip=3.25),
]


def test_the_picture_can_be_drawn_again_from_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra")
    report = DistanceReport(command="benchmark network", model="toy", points=POINTS)
    report.write_json(tmp_path / "figures.json")
    points = [Point(**one) for one in json.loads((tmp_path / "figures.json").read_text())["points"]]
    assert points == POINTS
    pictures = [tmp_path / name / "distances.svg" for name in ("one", "other")]
    for file, drawn in zip(pictures, (POINTS, points), strict=True):
        file.parent.mkdir()
        draw_distances(drawn, file)
    svg = pictures[0].read_text()
    assert svg == pictures[1].read_text()
    for word in ("tokens/s", "round-trip time", "the model here", "carried by the client", "pushed, with a draft"):
        assert word in svg


def test_without_a_draft_its_column_and_line_are_empty(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra")
    point = Point(rtt_ms=50, server_rtt_ms=50, local=15.2, star=10.5, pushed=12.5)
    output = io.StringIO()
    DistanceReport(command="benchmark network", model="toy", points=[point]).print_tables(Console(file=output))
    [row] = [line for line in output.getvalue().splitlines() if "12.50" in line]
    assert [cell.strip() for cell in row.split("\u2502")] == ["", "50", "15.20", "", "12.50", "10.50", "", ""]
    draw_distances([point], tmp_path / "a.svg")
    assert "with a draft" not in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("name", "num_servers", "message"),
    [
        pytest.param("a.docx", 2, r"name a file that ends in \.svg", id="kind"),
        pytest.param("missing/a.svg", 2, r"cannot write the picture to .*missing/a\.svg: No such file", id="folder"),
        pytest.param("a.svg", 17, "17 servers are too many for links: at most 16", id="servers"),
        pytest.param("a.svg", 2, "there is no model in", id="model"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(
    tmp_path: Path, name: str, num_servers: int, message: str
) -> None:
    pytest.importorskip("matplotlib", reason="an extra")
    link = Link(rtt_ms=5)
    distances = Distances(
        directory=tmp_path, links=[(link, link)], num_servers=num_servers, draft=None, new_tokens=4, rounds=1
    )
    with Progress(disable=True) as progress, pytest.raises(ConfigError, match=message):
        distances.report(tmp_path / name, progress)
    assert list(tmp_path.iterdir()) == []

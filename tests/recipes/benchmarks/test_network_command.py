"""The benchmark `network`: one sentence for settings that are wrong, before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipes.benchmarks.__main__ import app
from recipes.benchmarks.network.command import parse_links

PLOT = ["--plot", "FOLDER/a.svg"]


def test_servers_are_no_farther_from_each_other_than_from_the_client() -> None:
    links = parse_links("50,5,50,20", mbit=100.0, server_rtt=20.0)
    assert [(link.rtt_ms, between.rtt_ms) for link, between in links] == [(5, 5), (20, 20), (50, 20)]
    assert {one.mbit for pair in links for one in pair} == {100.0}
    assert [between.rtt_ms for _, between in parse_links("5,50", mbit=100.0, server_rtt=None)] == [5, 50]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--preset", "dsl"], "unknown --preset 'dsl': choose from 1gbit-5ms, 100mbit-5ms, 100mbit-100ms"),
        (["--mbit", "0"], "invalid mbit 0.0: give a rate above 0, in Mbit/s"),
        (
            ["--preset", "1gbit-5ms", "--mbit", "20"],
            "--preset 1gbit-5ms sets the round-trip time and the rate: leave out --rtt and --mbit",
        ),
        (
            ["--draft", "FOLDER/small"],
            "there is no directory 'FOLDER/small': give that of a small model with --draft, or lookup",
        ),
        (
            [*PLOT, "--draft", "look"],
            "there is no directory 'look': give that of a small model with --draft, or lookup",
        ),
        (
            ["--json", "FOLDER/b/c.json"],
            "cannot write the figures to FOLDER/b/c.json: No such file or directory; give another file",
        ),
        ([*PLOT, "--rtts", "5,x"], "invalid --rtts '5,x': expected round-trip times in ms, such as 5,20,50"),
        ([*PLOT, "--rtts", "5,,20"], "invalid --rtts '5,,20': expected round-trip times in ms, such as 5,20,50"),
        ([*PLOT, "--rtts", "nan"], "invalid rtt_ms nan: give milliseconds, 0 or more"),
        ([*PLOT, "--rtts", "5,-1"], "invalid rtt_ms -1.0: give milliseconds, 0 or more"),
        ([*PLOT, "--rtt", "5"], "--plot measures answers at --rtts: leave out --rtt, --preset and --waiting"),
        (
            ["--plot", "FOLDER/a.docx"],
            "cannot draw to FOLDER/a.docx: the picture is an SVG, so name a file that ends in .svg",
        ),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[str], sentence: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it
    arguments = [one.replace("FOLDER", str(tmp_path)) for one in wrong]
    result = CliRunner().invoke(app, ["network", "--model", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert result.stderr.strip() == f"python -m recipes.benchmarks network: {sentence.replace('FOLDER', str(tmp_path))}"

"""Benchmarks run from end to end on a toy; their figures mean nothing there, their equalities do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import Programs
from rich.progress import Progress

from recipes.benchmarks.links import Link
from recipes.benchmarks.network.distances import Distances
from swarm_plugins.testing.models import save_tiny

ROOT = Path(__file__).parents[3]
QUICK = ["--rounds", "1"]
Bench = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bench(programs: Programs) -> Bench:
    def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
        return programs.run([sys.executable, "-m", "recipes.benchmarks", *arguments], cwd=ROOT, timeout=200)

    return bench


@pytest.mark.swarm
@pytest.mark.parametrize(
    ("arguments", "figures"),
    [
        pytest.param(
            ["decode", "--servers", "2", "--new-tokens", "4"],
            ["decode, batch 1, 2 servers", "decode, batch 1, 2 servers, a module between blocks over none"],
            id="decode",
        ),
        pytest.param(
            ["packs", "--sessions", "3", "--prefix", "8", "--new-tokens", "4"], ["a token of 3 sessions"], id="packs"
        ),
        pytest.param(
            ["train"],
            [f"{what}, {batch} x 64 tokens" for what in ("forward", "forward + backward") for batch in (1, 8)],
            id="train",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["network", "--rtt", "4", "--servers", "2", "--prefix", "8", "--new-tokens", "4", "--draft", "lookup"],
            [
                "text that repeats its prompt: a token by the client / looked up, pushed",
                "text that repeats its prompt: looked up, tokens a trip",
                *("a decoded token", "a decoded token, pushed"),
                *("first token after 8", "first token after 8, pushed"),
                *("forward + backward, 8 x 64 tokens", "forward + backward, 8 x 64 tokens, pushed"),
                "sent for a token, by the client",
            ],
            id="network",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["sessions", "--sessions", "2", "--new-tokens", "200"],
            ["1 session together", "2 sessions together"],
            id="sessions",
            marks=pytest.mark.slow,
        ),
        # Three times as long as in float32; all but the width is the same.
        pytest.param(
            ["sessions", "--sessions", "2", "--new-tokens", "200", "--width", "int8"],
            ["a step of 2 sessions, int8, over one of float32"],
            id="sessions-in-int8",
            marks=pytest.mark.hours,
        ),
    ],
)
def test_bench_shows_a_ratio_for_each_figure(
    tiny_llama: Path, tmp_path: Path, arguments: list[str], figures: list[str], bench: Bench
) -> None:
    path = tmp_path / "figures.json"
    result = bench(*arguments, *QUICK, "--model", str(tiny_llama), "--json", str(path))
    assert result.returncode == 0, result.stderr
    content = json.loads(path.read_text())
    # The network's part is shown only where it can be told from noise.
    names = [one["name"] for one in content["figures"] if not one["name"].startswith("network's part")]
    assert sorted(names) == sorted(figures)
    assert all(one["ratio"] > 0 and one["local"] > 0 and one["swarm"] > 0 for one in content["figures"])
    assert all(name in result.stdout for name in figures)


@pytest.mark.slow
@pytest.mark.swarm
def test_bench_of_training_in_chunks(tiny_llama: Path, tmp_path: Path, bench: Bench) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--rtt", "4", "--servers", "2", "--prefix", "8", "--new-tokens", "4", "--waiting", "0.1"]
    result = bench("network", *arguments, *QUICK, "--model", str(tiny_llama), "--json", str(path))
    assert result.returncode == 0, result.stderr
    names = [one["name"] for one in json.loads(path.read_text())["figures"]]
    assert [name for name in names if name.startswith("training")] == [
        "training through 3 servers that wait, 20 ms, 8 chunks / 1",
        "training through 3 servers that wait, 20 ms, 8 chunks",
        "training through servers that wait, 2 for each span / 1, 16 chunks",
        "training through 2 servers with a core each, 4 ms, 4 pushed chunks / whole batch by the client",
        "training through 2 servers with a core each, 4 ms, 4 pushed chunks / whole batch pushed",
    ]


@pytest.mark.slow
@pytest.mark.swarm
def test_bench_of_distances(tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra")
    link = Link(rtt_ms=2)
    distances = Distances(
        directory=tiny_llama, links=[(link, link)], num_servers=2, draft="lookup", new_tokens=4, rounds=1
    )
    with Progress(disable=True) as progress:
        report = distances.report(tmp_path / "distances.svg", progress)
    [point] = report.points
    assert (point.rtt_ms, point.server_rtt_ms) == (2, 2)
    assert point.drafted is not None
    assert min(point.local, point.star, point.pushed, point.drafted) > 0
    assert point.tokens_per_trip is not None
    assert point.tokens_per_trip >= 1
    assert "carried by the client" in (tmp_path / "distances.svg").read_text()


@pytest.mark.slow
@pytest.mark.swarm
def test_bench_of_remote_experts(tmp_path: Path, bench: Bench) -> None:
    path = tmp_path / "figures.json"
    model = save_tiny("mixtral", tmp_path / "model", num_layers=2)
    result = bench("experts", "--slices", "2", "--new-tokens", "4", *QUICK, "--model", str(model), "--json", str(path))
    assert result.returncode == 0, result.stderr
    names = [one["name"] for one in json.loads(path.read_text())["figures"]]
    assert names == [
        "decode, batch 1, 2 slices",
        "forward, 1 x 64 tokens, 2 slices",
        "forward, 8 x 64 tokens, 2 slices",
        "forward + backward, 8 x 64 tokens, 2 slices",
    ]
    assert "ms more for each token and layer with experts" in result.stdout


@pytest.mark.slow
@pytest.mark.swarm
def test_bench_of_codecs(tiny_llama: Path, tmp_path: Path, bench: Bench) -> None:
    path, text = tmp_path / "figures.json", tmp_path / "text.txt"
    text.write_text("we came over the pass in the late afternoon when the wind had dropped " * 8)
    words = ["--text", str(text), "--pieces", "2", "--length", "40", "--servers", "1"]
    result = bench("codec", *words, "--model", str(tiny_llama), "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = {row["codec"]: row for row in json.loads(path.read_text())["rows"]}
    assert [*rows] == ["none", "float16", "bfloat16", "rotated8"]
    assert rows["none"]["loss_change"]["mean"] == 0.0
    assert rows["none"]["same_tokens"] == 1.0
    assert rows["rotated8"]["bytes_per_number"] == 133 / 128
    assert rows["rotated8"]["loss_change"]["mean"] != 0.0
    assert all(row["same_tokens"] > 0.5 for row in rows.values())
    assert "80 tokens of text.txt in 2 pieces" in result.stdout


@pytest.mark.slow
@pytest.mark.swarm
def test_bench_of_training_together(tiny_llama: Path, tmp_path: Path, bench: Bench) -> None:
    path, plot = tmp_path / "figures.json", tmp_path / "together.svg"
    words = ["--peers", "2", "--seconds", "3", "--seeds", "1", "--steps-per-round", "2", "--documents", "16"]
    result = bench("together", *words, "--plot", str(plot), "--model", str(tiny_llama), "--json", str(path))
    assert result.returncode == 0, result.stderr
    [seed] = json.loads(path.read_text())["seeds"]
    trained = (seed["together"], *seed["alone"])
    assert [len(one["losses"]) == len(one["seconds"]) >= 3 for one in trained] == [True] * 3
    assert len({one["losses"][0] for one in trained}) == 1, "all begin with the same adapter"
    assert seed["together"]["rounds"] >= 1
    assert "2 together" in plot.read_text()


def test_bench_without_a_model_is_one_sentence(tmp_path: Path, bench: Bench) -> None:
    result = bench("decode", "--model", str(tmp_path))
    assert result.returncode == 2
    assert result.stderr.strip() == (
        f"python -m recipes.benchmarks decode: there is no model in {tmp_path}: "
        "it needs a config.json and safetensors files"
    )

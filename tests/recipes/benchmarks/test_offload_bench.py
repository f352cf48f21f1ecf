"""The benchmark of offloading: arms that compute the same, figures that are held against their goals."""

from __future__ import annotations

import io
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from recipes.benchmarks.offload import run
from recipes.benchmarks.offload.budgets import parse_share
from recipes.benchmarks.offload.figures import ArmFigures, ArmName, OffloadReport, add_goals, order_verdicts
from recipes.benchmarks.offload.plot import draw_expert_use, recorded_use, shown_layers
from recipes.benchmarks.offload.run import bench_offload
from recipes.benchmarks.offload.worker import Job, MemoryExceededError, load_arm
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.plan.forecast import Forecast, Speeds
from swarm_plugins.testing.models import save_tiny, tiny_model

IDS = torch.arange(3, 13).reshape(1, 10)
JOB = Job(arm=ArmName.FULL, directory="model", fast_bytes=1, smallest_bytes=1, policy="lru", limit_bytes=1)


@pytest.mark.parametrize("arm", list(ArmName), ids=lambda arm: arm.name.lower())
def test_every_arm_computes_what_the_plain_model_does(arm: ArmName, tmp_path: Path) -> None:
    directory = save_tiny("mixtral", tmp_path / "model", num_layers=2)
    with torch.no_grad():
        expected = tiny_model("mixtral", num_layers=2)(input_ids=IDS).logits
        sizes = {"fast_bytes": 200_000, "smallest_bytes": 100_000}
        with load_arm(arm, directory, **sizes, policy="lru", has_bounded_cache=False) as loaded:
            loaded.before_token()
            found = loaded.model(input_ids=IDS).logits
            if arm is ArmName.NAIVE:
                stats = loaded.model.offload_stats()
                assert stats.hits + stats.misses == 2 * 4, "all experts of both layers"
    # Two kernels of float32 that add up in different orders.
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("text", "share"), [("25%", 0.25), ("100%", 1.0), ("12.5%", 0.125)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["25", "0%", "101%", "half", "%", "-5%", "nan%"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid --fast .*: expected more than 0% and at most 100%"):
        parse_share(text)


def figures(arm: ArmName, tokens_per_s: float, **changes: Any) -> ArmFigures:
    values: dict[str, Any] = {
        "spread": (tokens_per_s, tokens_per_s),
        "rates": (tokens_per_s,) * 3,
        "read_bytes": 100e6,
        "cpu_s": 0.1,
        "hit_ratio": None,
        "recall": None,
        "stall_s": None,
        "peak_bytes": 100,
        "load_s": 1.0,
        "written_bytes": 0,
    }
    return ArmFigures(arm=arm, tokens_per_s=tokens_per_s, **{**values, **changes})


def report(share: float = 0.5, hits: float = 0.6) -> OffloadReport:
    found = OffloadReport(command="benchmark offload", model="toy", share=share, budget_bytes=100)
    found.speeds = Speeds(disk_bytes_per_s=1e9, expert_bytes_per_s=1e9, step_s=0.1)
    found.forecast = Forecast(
        fast_share=share,
        ram_share=0.0,
        hit_ratio=0.6,
        hit_ratio_even=0.5,
        read_bytes=1.0,
        copy_bytes=0.0,
        resident_tokens_per_s=10.0,
        tokens_per_s=5.0,
        tokens_per_s_even=4.0,
    )
    found.arms = [
        figures(ArmName.RESIDENT, 10.0, read_bytes=0.0),
        figures(ArmName.FULL, 5.0, hit_ratio=hits),
        figures(ArmName.NO_GUESSES, 4.0, hit_ratio=hits),
        figures(ArmName.BARE, 2.0, hit_ratio=0.0),
        figures(ArmName.ACCELERATE, 0.5),
        figures(ArmName.NAIVE, 1.0),
    ]
    add_goals(found)
    return found


def test_goals_are_ratios_of_the_arms() -> None:
    goals = {goal.name: goal for goal in report().goals}
    assert goals["over all resident"].value == 0.5
    assert goals["over all resident"].goal == 0.45
    # The disk allows 10 tokens of 100 MB a second, as many as memory.
    assert goals["over what disk and memory allow"].value == 0.5
    assert goals["over accelerate"].value == 10.0
    assert goals["over no speculation"].value == 1.25
    assert goals["over no speculation"].goal == 0.98
    assert goals["peak memory over budget"].value == 1.0
    assert goals["forecast is off by"].value == pytest.approx(0.0)
    assert [name for name, goal in goals.items() if not goal.reached] == ["over what disk and memory allow"]


def test_few_hits_ask_more_of_speculation_and_other_shares_of_nothing_else() -> None:
    goals = {goal.name: goal for goal in report(share=0.25, hits=0.3).goals}
    assert goals["over no speculation"].goal == 1.2
    assert "over accelerate" not in goals
    assert "over all resident" not in goals


def test_the_order_of_the_arms_is_judged_over_the_rounds() -> None:
    found = report()
    assert order_verdicts(found) == [
        "Shown: 'offloaded' is faster than 'without speculative loading' (+1.00 (+1.00 to +1.00) tokens/s, n = 3).",
        "Shown: 'without speculative loading' is faster than 'without cache and speculation' "
        "(+2.00 (+2.00 to +2.00) tokens/s, n = 3).",
        "Shown: 'without cache and speculation' is faster than 'every expert of a layer for each token' "
        "(+1.00 (+1.00 to +1.00) tokens/s, n = 3).",
    ]
    found.arms[1] = figures(ArmName.FULL, 5.0, rates=(3.0, 5.0, 4.0))
    assert order_verdicts(found)[0].startswith("Not shown: 'offloaded'")


def test_table_and_file_have_every_arm_and_goal(tmp_path: Path) -> None:
    output = io.StringIO()
    found = report()
    found.print_tables(Console(file=output, width=200))
    assert all(arm.value in output.getvalue() for arm in ArmName)
    assert "missed" in output.getvalue()
    found.write_json(tmp_path / "figures.json")
    content = json.loads((tmp_path / "figures.json").read_text())
    assert [one["arm"] for one in content["arms"]] == [arm.value for arm in ArmName]
    assert all("reached" in goal for goal in content["goals"])


def test_the_figure_shows_each_token_s_experts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra")
    model = tiny_model("mixtral", num_layers=2)
    with recorded_use(model) as use, torch.no_grad():
        model(input_ids=IDS)
    assert {layer: [tuple(one.shape) for one in passes] for layer, passes in use.items()} == {
        0: [(10, 2)],
        1: [(10, 2)],
    }
    draw_expert_use(use, 4, tmp_path / "use.svg")
    assert "layer 1" in (tmp_path / "use.svg").read_text()
    with pytest.raises(ConfigError, match="name a file that ends in"):
        draw_expert_use(use, 4, tmp_path / "use.docx")
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_expert_use({}, 4, tmp_path / "use.svg")


def test_of_many_layers_a_few_are_shown() -> None:
    assert shown_layers([1, 2, 3]) == [1, 2, 3]
    assert shown_layers(list(range(31))) == [0, 6, 12, 18, 24, 30]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({}, "give either --model DIR or --random-model", id="no-model"),
        pytest.param({"model": Path("absent")}, "there is no model in absent", id="absent"),
        pytest.param(
            {"without": ["cache"]},
            "invalid --without 'cache': expected one of resident, no-guesses, bare, accelerate",
            id="arm",
        ),
        pytest.param({"fast": "much"}, "invalid --fast 'much'", id="share"),
        pytest.param({"policy": "fifo"}, "policy is 'fifo'; expected counting or lru", id="policy"),
    ],
)
def test_wrong_arguments_are_told_at_once(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "random_scale": None,
        "fast": "50%",
        "policy": "counting",
        "without": [],
        "new_tokens": 4,
        "rounds": 1,
        "plot": None,
        "progress": Progress(disable=True),
    }
    with pytest.raises(ConfigError, match=message):
        bench_offload(changes.pop("model", None), **{**arguments, **changes})


class Flaky:
    """Stands in for an arm's process: killed while it loads, as often as told."""

    def __init__(self, kills: int) -> None:
        self.kills = kills
        self.open = 0

    def __call__(self, job: object) -> Flaky:
        return self

    def __enter__(self) -> Flaky:
        self.open += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self.open -= 1

    def wait_until_ready(self) -> None:
        self.kills -= 1
        if self.kills >= 0:
            raise MemoryExceededError("killed")


def test_an_arm_killed_while_it_loads_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Flaky(kills=2)
    monkeypatch.setattr(run, "ArmProcess", process)
    with ExitStack() as stack:
        run._loaded(JOB, stack)
        assert process.open == 1
    assert process.open == 0


def test_an_arm_that_is_always_killed_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Flaky(kills=100)
    monkeypatch.setattr(run, "ArmProcess", process)
    with ExitStack() as stack, pytest.raises(MemoryExceededError):
        run._loaded(JOB, stack)
    assert process.open == 0
    assert process.kills == 100 - 3

"""Commands that repeat the papers' tables run from end to end in toy size, and their formulas hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM

from recipes.benchmarks.links.link import Link
from recipes.benchmarks.papers.codes import OURS, bytes_per_number, codes, rounded
from recipes.benchmarks.papers.crossing import CROSSING, bound, crossing
from recipes.benchmarks.papers.ranks import RANKS, bench_ranks, expected_bytes, formula
from recipes.benchmarks.papers.read_time import READ_TIME, bench_read_time, config_of, experts_taken, random_model
from recipes.benchmarks.papers.sizes import SIZES, count, layout, read_bytes
from recipes.benchmarks.papers.table3 import TABLE3, Scale, _Chain, _made, check_chains
from recipes.study.intervals import t_interval
from recipes.study.verdicts import plus_minus, verdict
from swarm_plugins.errors import ConfigError
from swarm_plugins.models import PRMoEConfig


@pytest.mark.parametrize(
    ("values", "says"),
    [
        pytest.param([1.0, 1.1, 0.9], "Shown: it", id="shown"),
        pytest.param([1.0, -1.1, 0.9], "Not shown: it", id="not"),
        pytest.param([-1.0, -1.1, -0.9], "The opposite: it", id="opposite"),
        pytest.param([1.0, 1.0], "Not shown, too few pairs: it", id="few"),
    ],
)
def test_a_verdict_needs_a_whole_interval(values: list[float], says: str) -> None:
    assert verdict("it holds", t_interval(values)).startswith(says)


def test_codes_round_what_passes_between_spans(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        exact = model(ids).logits
        errors: dict[str, float] = {}
        for name, code in codes().items():
            found: list[float] = []
            with rounded(model, 2, code, found):
                changed = model(ids).logits
            assert len(found) == 3  # into each span, and out of the last
            errors[name] = max(found)
            assert torch.equal(changed, exact) == (name == "none")
        assert torch.equal(model(ids).logits, exact)
    assert errors[OURS] < errors["dynamic, blocks of 4096"] < 0.1
    assert bytes_per_number("dynamic, blocks of 256") == 1 + 4 / 256


@pytest.mark.parametrize("way", ["flat", "hierarchical", "coordinated"])
def test_formulas_of_exchanges(way: str) -> None:
    messages, share = formula(way, 8, 2)
    # (G - 1) + (P / G - 1) messages; all but an eighth of the rows, or both hops, or all rows to both of a node.
    assert (messages, share) == {
        "flat": (7, 7 / 8),
        "hierarchical": (4, 1 / 2 + 3 / 4),
        "coordinated": (4, 3 / 4 + 1),
    }[way]


@pytest.mark.parametrize(
    ("ranks", "node"), [pytest.param(3, 2, id="neither nodes nor experts"), pytest.param(4, 3, id="half a node")]
)
def test_ranks_without_a_layer_are_refused(ranks: int, node: int) -> None:
    with (
        Progress(disable=True) as progress,
        pytest.raises(ConfigError, match=f"--ranks {ranks} with nodes of {node}: expected a divisor of 32 experts"),
    ):
        bench_ranks(ranks=[1, ranks], node=node, tokens=64, seeds=3, plot=None, progress=progress)


@pytest.mark.slow
def test_exchanges_send_what_the_formulas_say(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra")
    with Progress(disable=True) as progress:
        report = bench_ranks(ranks=[4], node=2, tokens=1024, seeds=3, plot=None, progress=progress, message_ms=(0.0,))
    assert [one["way"] for one in report.figures["passes"]] == ["flat", "hierarchical", "coordinated"]
    for one in report.figures["passes"]:
        for sent in one["counted"]["bytes"]:
            assert sent == pytest.approx(expected_bytes(one), rel=0.1)
    assert [one["counted"]["far_messages"] for one in report.figures["passes"]] == [6, 3, 3]
    assert RANKS.tables(report.figures)[0].rows
    # Without a single rank there is nothing that 4 could be faster than.
    assert len(RANKS.verdicts(report.figures)) == 2


def test_sizes_of_a_small_mixture() -> None:
    config = PRMoEConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, experts_per_layer=[0, 4],
    )  # fmt: skip
    one = count(config)
    assert one["pools"] == [4]
    assert one["expert"] == 3 * 16 * 32
    assert one["total"] == one["others"] + 4 * one["expert"]
    # A token reads one expert, many tokens all of them.
    assert read_bytes(one, 1) == 2 * (one["others"] + one["expert"])
    assert read_bytes(one, 1000) == pytest.approx(2 * one["total"])
    # Two copies on 8 ranks: each gradient is sent and received once.
    found = layout(one, "auto", 8)
    assert found["messages"] == 3
    assert found["averaged"] == found["held"] == 2 * one["expert"]
    assert SIZES.name == "sizes"


def test_time_of_reading_small_weights() -> None:
    with Progress(disable=True) as progress:
        report = bench_read_time(
            width=64, batches=(1, 8), new_tokens=2, rounds=3, plot=None, progress=progress
        )  # fmt: skip
    models = {name: config_of(name, 64) for name in report.figures["models"]}
    # The dense model computes about five times as much: the square of its width.
    widths = sorted(one.hidden_size for one in models.values())
    assert widths == [64, 64, 64, 144]
    (rows,) = READ_TIME.tables(report.figures)
    assert [row[1] for row in rows.rows] == ["1", "8"] * 4
    assert len(READ_TIME.verdicts(report.figures)) == 8
    # A token takes one expert of each of six layers; eight take more, but no more than there are.
    taken = report.figures["taken"]["MoE-32"]
    assert taken["1"] == 6
    assert 6 < taken["8"] <= 48


def test_random_routers_spread_tokens_over_the_experts() -> None:
    torch.manual_seed(0)
    model = random_model("MoE-32", 64)
    taken = experts_taken(model, torch.randint(model.config.vocab_size, (64, 10)))
    # Of 192 experts in six layers, 64 tokens take 167 if all are equally likely: 32 x (1 - (31 / 32)^64) in each.
    assert 150 < taken < 180


def test_a_width_without_whole_heads_is_refused() -> None:
    with (
        Progress(disable=True) as progress,
        pytest.raises(ConfigError, match="--width must be a multiple of 64, got 100"),
    ):
        bench_read_time(width=100, batches=(1,), new_tokens=1, rounds=1, plot=None, progress=progress)


def test_a_single_value_has_no_interval() -> None:
    assert plus_minus([1.5], digits=1) == "1.5"
    assert plus_minus([1.0, 1.0, 1.0], digits=1) == "1.0 ± 0.0"
    assert verdict("it", t_interval([1.0])) == "Not shown, too few pairs: it (+1.0000 (unbounded), n = 1)."


@pytest.mark.slow
def test_a_chain_of_servers_that_wait(tmp_path: Path) -> None:
    directory = _made(tmp_path / "model")
    local = AutoModelForCausalLM.from_pretrained(directory).eval()
    scale = Scale(contexts=(8,), batches=(1,), clients=2, new_tokens=3, rounds=1)
    found = _Chain(directory, local, Link(rtt_ms=2), 3, "off").figures(scale)
    assert 0 < found["steps"]["8"][0] <= found["bounds"]["step"]
    assert found["forward"]["1"][0] > 0
    assert found["together"][0] > 0


def chains_of(alone: list[float]) -> list[dict[str, Any]]:
    def row(network: str, way: str, share: float) -> dict[str, Any]:
        steps = {context: [one * share * less for one in alone] for context, less in (("128", 1.0), ("2048", 0.95))}
        together = [one * share * 0.85 for one in alone]
        return {"network": network, "servers": 3, "way": way, "steps": steps, "together": together}

    return [
        row("1gbit-5ms", "carried by the client", 1.0),
        row("1gbit-5ms", "pushed by servers", 0.9),
        row("100mbit-5ms", "carried by the client", 0.8),
        row("100mbit-5ms", "pushed by servers", 0.9),
    ]


def test_rounds_of_chains_are_no_pairs() -> None:
    # Each side is less by the same share in every round, but the rounds of a side were measured one after the other.
    found = TABLE3.verdicts({"rows": chains_of([1.0, 2.0, 3.0])})
    assert all(sentence.startswith("Not shown: ") for sentence in found)


def test_chains_are_compared() -> None:
    rows = chains_of([1.0, 1.01, 0.99])
    fast, slow = "1gbit-5ms, 3 servers", "100mbit-5ms, 3 servers"
    assert [sentence.split(" (")[0] for sentence in TABLE3.verdicts({"rows": rows})] == [
        f"Shown: a longer context costs at most 10 % of the steps, {fast}",
        f"The opposite: a tenth of the rate costs at most 10 % of the steps, {fast}",
        f"The opposite: servers that push states make more steps than the client, {fast}",
        f"Shown: several clients at once are at most 20 % slower each, carried by the client, {fast}",
        f"Shown: several clients at once are at most 20 % slower each, pushed by servers, {fast}",
        f"Shown: a longer context costs at most 10 % of the steps, {slow}",
        f"Shown: servers that push states make more steps than the client, {slow}",
        f"Shown: several clients at once are at most 20 % slower each, carried by the client, {slow}",
        f"Shown: several clients at once are at most 20 % slower each, pushed by servers, {slow}",
    ]


@pytest.mark.parametrize(
    ("servers", "networks", "says"),
    [([5], None, "5 servers do not divide 12 blocks"), ([3], ["isdn"], "unknown --preset 'isdn'; known: 1gbit-5ms")],
)
def test_chains_that_cannot_be_are_refused(servers: list[int], networks: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_chains(servers, networks)


def test_where_a_swarm_beats_the_bound_of_offloading() -> None:
    assert bound(10.0, 5.0, 2.0) == 0.4
    assert bound(5.0, 5.0, 2.0) == float("inf")
    from_here = crossing(10.0, 2.0, 0.4)
    assert from_here == pytest.approx(2.0)  # where half of it fits, as above
    assert crossing(10.0, 2.0, 0.1) is None
    figures = {
        "swarm": {"1gbit-5ms": [2.0, 2.1, 1.9]},
        "offloaded": {"50": {"size": 10.0, "memory": 5.0, "disk": 2.0, "rates": {"ours": [1.0, 1.1, 0.9]}}},
    }
    assert CROSSING.verdicts(figures)[0].startswith("Shown: a swarm on 1gbit-5ms is faster than ours")
    assert [row[1] for row in CROSSING.tables(figures)[0].rows][-1] == "swarm, 1gbit-5ms"

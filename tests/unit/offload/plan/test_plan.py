"""Plans and forecasts: arithmetic that must add up."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm_plugins.errors import CapacityError
from swarm_plugins.offload.plan import plan
from swarm_plugins.offload.plan.forecast import MEASURED_HITS, Speeds, forecast, hit_ratio
from swarm_plugins.offload.plan.plan import RUNTIME_BYTES, make_plan, stored_bits_ratio
from swarm_plugins.offload.plan.sessions import SessionSizes
from swarm_plugins.offload.plan.sizes import ExpertLayer, ModelSizes, PackedProducts
from swarm_plugins.sizes import parse_bytes
from swarm_plugins.weights.formats.ggml import GgmlFormat
from swarm_plugins.weights.formats.nibbles import NibblesFormat
from swarm_plugins.weights.formats.plain import PlainFormat

MB = 10**6
SPEEDS = Speeds(disk_bytes_per_s=1000.0 * MB, expert_bytes_per_s=1000.0 * MB, step_s=0.05)


def sizes(**changes: Any) -> ModelSizes:
    """8 layers of 8 experts of 10 MB, two picked: 640 MB, 160 MB a token."""
    values: dict[str, Any] = {
        "layers": tuple(ExpertLayer(index, 8, 10 * MB, 2, 10 * MB) for index in range(8)),
        "num_layers": 8,
        "dtype": torch.bfloat16,
        "other_bytes": 100 * MB,
        "context_tokens": 1000,
        "cache_bytes": 20 * MB,
        "session": SessionSizes(token_bytes=20_000, row_bytes=0, coded_token_bytes=6_000),
        "activation_bytes": 5 * MB,
    }
    return ModelSizes(**{**values, **changes})


def test_products_with_packed_weights_take_the_place_of_those_with_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    repacked, kept = NibblesFormat((10, 32), 32), GgmlFormat((10, 256), "Q4_K")
    products = (PackedProducts(repacked, 3 * 320), PackedProducts(kept, 2 * 2560))
    seconds: dict[type, float] = {NibblesFormat: 0.5, GgmlFormat: 7.0, PlainFormat: 1.0}
    monkeypatch.setattr(plan, "product_seconds", lambda stored, *_: seconds[type(stored)])
    # Three products with the first and two with the second, instead of five plain ones.
    for step_s, expected in ((20.0, 20.0 - 5 + 1.5 + 14), (2.0, 1.5 + 14)):
        assert plan.with_packed(step_s, products, torch.bfloat16, torch.device("cpu")) == pytest.approx(expected)


FIXED = 125 * MB + RUNTIME_BYTES


@pytest.mark.parametrize(("share", "expected"), MEASURED_HITS)
def test_hits_are_the_measured_ones_at_the_measured_shares(share: float, expected: float) -> None:
    assert hit_ratio(share) == pytest.approx(expected)


def test_hits_rise_with_the_share_and_are_never_fewer_than_an_even_use_gives() -> None:
    shares = [index / 40 for index in range(41)]
    ratios = [hit_ratio(share) for share in shares]
    assert all(low < high for low, high in itertools.pairwise(ratios))
    assert all(ratio >= share for ratio, share in zip(ratios, shares, strict=True))
    assert (hit_ratio(-0.5), hit_ratio(1.5)) == (0.0, 1.0)


def test_few_experts_are_used_evenly() -> None:
    assert [hit_ratio(share, num_experts=4) for share in (0.25, 0.5, 1.0)] == [0.25, 0.5, 1.0]


def test_with_everything_in_memory_nothing_is_read_and_the_speed_is_the_resident_one() -> None:
    expected = forecast(sizes(), SPEEDS, fast_bytes=640 * MB)
    assert (expected.read_bytes, expected.hit_ratio) == (0.0, 1.0)
    assert expected.tokens_per_s == expected.resident_tokens_per_s == pytest.approx(1 / (1.1 * 0.05))


def test_without_memory_every_expert_of_a_token_is_read() -> None:
    expected = forecast(sizes(), SPEEDS, fast_bytes=0)
    assert expected.read_bytes == 160 * MB
    # A tenth is neither products nor reads; reads hide behind at most seven tenths of the products.
    assert 1 / expected.tokens_per_s == pytest.approx(1.1 * (0.05 + 0.16 - 0.7 * 0.05))


def test_more_memory_is_never_slower() -> None:
    budgets = range(0, 700 * MB, 40 * MB)
    rates = [forecast(sizes(), SPEEDS, fast_bytes=budget).tokens_per_s for budget in budgets]
    assert rates == sorted(rates)
    assert max(rates) <= 1 / (1.1 * 0.05) + 1e-9


def test_ram_counts_only_beside_a_device_with_a_memory_of_its_own() -> None:
    alone = forecast(sizes(), SPEEDS, fast_bytes=160 * MB, ram_bytes=480 * MB)
    speeds = Speeds(
        disk_bytes_per_s=1000.0 * MB, expert_bytes_per_s=1000.0 * MB, step_s=0.05, link_bytes_per_s=10_000.0 * MB
    )
    beside = forecast(sizes(), speeds, fast_bytes=160 * MB, ram_bytes=480 * MB)
    assert alone.ram_share == 0.0
    assert alone.read_bytes > 0
    assert (beside.ram_share, beside.read_bytes) == (0.75, 0.0)
    assert beside.copy_bytes == pytest.approx(160 * MB * (1 - hit_ratio(0.25)))


def test_a_plan_divides_the_memory_to_the_last_byte() -> None:
    plan = make_plan(sizes(), SPEEDS, memory_bytes=FIXED + 160 * MB)
    assert plan.fast_bytes == plan.config.fast_bytes == 160 * MB
    assert plan.forecast.fast_share == 0.25
    assert plan.config.ram_bytes is None
    assert not plan.fits


def test_a_plan_for_more_memory_than_needed_takes_all_experts() -> None:
    plan = make_plan(sizes(), SPEEDS, memory_bytes=FIXED + 900 * MB)
    assert plan.fits
    assert plan.fast_bytes == 640 * MB


def test_too_little_memory_says_how_much_is_needed() -> None:
    needed = FIXED + 30 * MB
    with pytest.raises(CapacityError, match=r"MB are too few: 100 MB for .* for 3 experts: give (\d+MB)") as refused:
        make_plan(sizes(), SPEEDS, memory_bytes=needed - 1)
    said = parse_bytes(str(refused.value).rpartition("give ")[2].partition(",")[0])
    assert needed <= said < needed + MB
    assert make_plan(sizes(), SPEEDS, memory_bytes=needed).fast_bytes == 30 * MB


def test_narrower_experts_take_less_hit_more_and_read_less() -> None:
    plan = make_plan(sizes(), SPEEDS, memory_bytes=FIXED + 100 * MB)
    assert [other.expert_bits for other in plan.alternatives] == [8, 4, 3, 2]
    forecasts = [plan.forecast, *(other.forecast for other in plan.alternatives)]
    assert all(wide.hit_ratio < narrow.hit_ratio for wide, narrow in itertools.pairwise(forecasts))
    assert all(wide.read_bytes > narrow.read_bytes for wide, narrow in itertools.pairwise(forecasts))


@pytest.mark.parametrize(("link", "expected"), [(None, [320, 180, 180, 200]), (1e10, [320, 180, 140, 120])])
def test_a_cpu_with_another_order_of_codes_keeps_narrow_ones_as_4_bits(
    link: float | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "is_native_order", lambda: False)
    planned = make_plan(sizes(), replace(SPEEDS, link_bytes_per_s=link), memory_bytes=FIXED + 100 * MB)
    assert [other.expert_bytes // MB for other in planned.alternatives] == expected
    # Files stay as narrow as they are.
    last = planned.alternatives[-1].forecast
    assert last.read_bytes == pytest.approx(30 * MB * (1 - hit_ratio(last.fast_share)))


def test_widths_count_their_scales_and_no_width_is_wider_than_the_original() -> None:
    assert stored_bits_ratio(4, 16) == pytest.approx(4.5 / 16)
    assert stored_bits_ratio(16, 32) == 0.5
    assert stored_bits_ratio(16, 16) == 1.0


def test_what_would_be_faster_is_the_widest_width_that_is_as_fast_and_the_memory_of_all_experts() -> None:
    plan = make_plan(sizes(), SPEEDS, memory_bytes=FIXED + 160 * MB)
    assert plan.full_memory_bytes == FIXED + 640 * MB
    assert make_plan(sizes(), SPEEDS, memory_bytes=plan.full_memory_bytes).fits
    other = plan.faster_width
    assert other is not None
    rates = {each.expert_bits: each.forecast.tokens_per_s for each in plan.alternatives}
    assert rates[other.expert_bits] > 1.1 * plan.forecast.tokens_per_s
    assert 1.1 * rates[other.expert_bits] >= max(rates.values())
    assert all(1.1 * rate < max(rates.values()) for bits, rate in rates.items() if bits > other.expert_bits)


def test_with_all_experts_in_memory_no_other_width_is_faster() -> None:
    assert make_plan(sizes(), SPEEDS, memory_bytes=FIXED + 900 * MB).faster_width is None

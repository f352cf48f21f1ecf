from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload import OffloadConfig
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.server import SwarmServer
from swarm_plugins.server.startup.capacity import blocks_that_fit, work_bytes
from swarm_plugins.server.startup.placing import mobility_of
from swarm_plugins.testing.models import save_tiny


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"model": ""}, "model is empty", id="model"),
        pytest.param({"blocks": range(0, 4, 2)}, "invalid blocks 0:4: expected", id="step"),
        pytest.param({"blocks": range(3, 3)}, "invalid blocks 3:3: expected", id="empty"),
        pytest.param({"blocks": range(1), "num_blocks": 2}, "blocks 0:1 and num_blocks 2 exclude", id="two-choices"),
        pytest.param({"part": (3, 2)}, "invalid part 3/2: expected K/N", id="part"),
        pytest.param({"num_blocks": 0}, "num_blocks must be at least 1, got 0", id="no-blocks"),
        pytest.param({"also_versions": ("v",) * 5}, "also_versions has 5 entries, at most 4", id="also"),
        pytest.param({"kv_bytes": 0}, "kv_bytes must be above 0, got 0", id="kv"),
        pytest.param({"activation_bytes": -1}, "activation_bytes must be 0 or more, got -1", id="activations"),
        pytest.param({"max_batch_tokens": 0}, "max_batch_tokens must be above 0, got 0", id="batch"),
        pytest.param({"host_maddrs": []}, "host_maddrs is empty", id="nowhere"),
        pytest.param({"blocks": range(1), "experts": range(3, 3)}, "invalid experts 3:3: expected", id="experts"),
        pytest.param({"experts": range(2)}, "experts are given without blocks: name the blocks", id="which-blocks"),
        pytest.param(
            {"experts": range(2), "num_blocks": 1}, "experts are given without blocks: name the blocks", id="any-blocks"
        ),
        pytest.param(
            {"blocks": range(1), "experts": range(2), "slice": (2, 2)}, "invalid slice 2/2: .* K < N", id="slice"
        ),
        pytest.param(
            {"blocks": range(1), "slice": (0, 2)}, "slice 0/2 divides experts that are hosted alone", id="slice-of-what"
        ),
        pytest.param(
            {"blocks": range(1), "experts": range(2), "remote_experts": True, "slice": (0, 2)},
            "slice 0/2 divides experts that are hosted alone: name them as FIRST:END",
            id="slice-of-an-owner",
        ),
        pytest.param(
            {"blocks": range(1), "experts": range(2), "slice": (0, 2), "quantization": "int8"},
            "quantization is 'int8' and slice 0/2: slices are kept as wide as they are stored; leave out one",
            id="quantized-slice",
        ),
        pytest.param(
            {"blocks": range(1), "experts": range(2), "quantization": "nf4", "offload": OffloadConfig()},
            r"quantization is 'nf4' and experts are offloaded: give their width with the budget \(bits=4 in",
            id="quantized-and-offloaded-holder",
        ),
        pytest.param(
            {"remote_experts": True, "offload": OffloadConfig()}, "no expert is held here: leave it out", id="offload"
        ),
        pytest.param(
            {"blocks": range(1), "experts": range(2), "adapters": ("a",)}, "only experts are served", id="preloaded"
        ),
    ],
)
def test_wrong_setting_names_value_and_cure(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeConfig(**{"model": "m", **settings})


@pytest.mark.parametrize("count", [1, 2, 3, 7, 30])
def test_parts_cover_the_model_once(count: int) -> None:
    spans = [ServeConfig(model="m", part=(index, count)).span_of(30) for index in range(1, count + 1)]
    assert [block for span in spans if span is not None for block in span] == list(range(30))


def test_server_that_was_not_started_says_so() -> None:
    server = SwarmServer(ServeConfig(model="m"))
    with pytest.raises(ConfigError, match=r"call start\(\) first"):
        _ = server.info
    with pytest.raises(ConfigError, match=r"call start\(\) first"):
        _ = server.peer_id


def test_blocks_that_fit_leave_the_budgets_their_room(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_tiny("llama", tmp_path / "tiny"))
    block_bytes = sum(info.num_bytes for info in checkpoint.tensors.values()) / 4
    config = ServeConfig(model="m", kv_bytes=1000, activation_bytes=1000)
    available = int((2.5 * block_bytes + 2000) / 0.9)
    assert blocks_that_fit(checkpoint, config, available_bytes=available) == 2
    halves = dataclasses.replace(config, dtype="bfloat16")
    assert checkpoint.config.dtype == torch.float32
    assert blocks_that_fit(checkpoint, halves, available_bytes=available) == 4
    with pytest.raises(ConfigError, match=r"not one block of .* fits: a block takes about"):
        blocks_that_fit(checkpoint, config, available_bytes=2500)


@pytest.mark.parametrize(
    ("settings", "free_gib", "expected_mib"),
    [
        pytest.param({}, 30, (4096, 4096), id="plenty"),
        pytest.param({}, 4, (512, 512), id="half-of-it-set-aside"),
        pytest.param({}, 1, (16, 16), id="none-left"),
        pytest.param({"request_bytes": 100 << 20}, 4, (100, 512), id="given"),
        pytest.param({"run_bytes": 100 << 20}, 4, (512, 100), id="run-given"),
    ],
)
def test_budgets_for_work_are_a_quarter_of_what_is_left(
    settings: dict[str, Any], free_gib: float, expected_mib: tuple[int, int]
) -> None:
    config = ServeConfig(model="m", kv_bytes=1 << 30, activation_bytes=1 << 29, adapter_bytes=1 << 29, **settings)
    found = work_bytes(config, host_bytes=int(free_gib * (1 << 30)))
    assert found == (1 << 29, *(size << 20 for size in expected_mib))
    # Caches, graphs and runs are on the device.
    if not settings:
        _, requests, run = work_bytes(config, host_bytes=5 << 29, device_bytes=int(free_gib * (1 << 30)))
        assert requests == 512 << 20
        assert run == min(4096 << 20, max(16 << 20, int((free_gib - 1.5) * (1 << 28))))


@pytest.mark.parametrize(
    ("free_gib", "expected_gib"),
    [pytest.param(101.5, 16, id="plenty"), pytest.param(21.5, 5, id="a-quarter"), pytest.param(1, 0.5, id="least")],
)
def test_graphs_get_a_quarter_of_what_is_free_first(free_gib: float, expected_gib: float) -> None:
    config = ServeConfig(model="m", kv_bytes=1 << 30, adapter_bytes=1 << 29)
    found = work_bytes(config, host_bytes=int(free_gib * (1 << 30)))
    assert found.graphs == int(expected_gib * (1 << 30))
    left = int((free_gib - 1.5 - expected_gib) * (1 << 30))
    assert found.requests == found.run == min(4 << 30, max(16 << 20, left // 4))
    # On a device, where adapters are not counted, but caches are; the requests lie elsewhere.
    device = work_bytes(config, host_bytes=5 << 29, device_bytes=int((free_gib - 0.5) * (1 << 30)))
    assert device == (found.graphs, 512 << 20, found.run)


def test_budgets_too_small_for_any_request_are_refused() -> None:
    with pytest.raises(ConfigError, match="run_bytes is 1000, expected at least 16777216"):
        ServeConfig(model="m", run_bytes=1000)
    assert ServeConfig(model="m", identity=Path("a/key")).points_file == Path("a/key.points")
    assert ServeConfig(model="m").points_file is None


def test_a_server_whose_experts_take_all_that_is_free_drops_them_before_it_moves() -> None:
    for fast_bytes, wanted in ((None, "drops-first"), (0, "loads-first")):
        offload = OffloadConfig(fast_bytes=fast_bytes)
        config = ServeConfig(model="m", num_blocks=1, kv_bytes=1, activation_bytes=0, offload=offload)
        assert mobility_of(config, span_bytes=0) == wanted

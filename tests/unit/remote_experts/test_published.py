"""Holders of experts that are published in few bits: the numbers of the widened model, and checks of their answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from holders_kit import Held, outcome, serving
from test_checks import CHECKED, checks_of, finish_checks
from test_owner import outcome as outcome_of_span
from test_owner import owned
from transformers import AutoModelForCausalLM

from swarm_plugins import OffloadConfig, load_remote_experts
from swarm_plugins.blocks import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.offload.held import load_expert, load_held_experts
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.startup.held_experts import load_held
from swarm_plugins.verification.quarantine import user_quarantine

pytest.importorskip("compressed_tensors", exc_type=ImportError)
from published_models import save_mxfp4, save_published

CPU = torch.device("cpu")
OFFLOAD = OffloadConfig(fast_bytes=1 << 20, prefetch=False)
SAVERS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "fp8": lambda place: save_published("fp8", "mixtral", place),
    "int4-zeros": lambda place: save_published("int4-zeros", "mixtral", place),
    "mxfp4": save_mxfp4,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("way", SAVERS)
def test_remote_experts_give_the_numbers_of_the_widened_model_and_pass_checks(way: str, tmp_path: Path) -> None:
    directory, twin = SAVERS[way](tmp_path)
    count = int(Checkpoint.open(directory).config.num_local_experts)
    held = {"a": Held(range(2), offload=OFFLOAD), "b": Held(range(2, count))}
    local = AutoModelForCausalLM.from_pretrained(twin, experts_implementation="eager").eval()
    with serving(directory, held, config=CHECKED) as holders:
        remote = load_remote_experts(directory, connection=holders.connection)
        checks_of(remote).chance = lambda: 0.0
        for found, expected in zip(outcome(remote), outcome(local), strict=True):
            # Sums in another order, squared by the loss.
            assert (found - expected).norm() <= 1e-4 * expected.norm()
        finish_checks(remote)
        assert set(checks_of(remote).checked) == {"a", "b"}
    assert not user_quarantine().peers()


@pytest.mark.parametrize("way", ["fp8", "int4-zeros"])
def test_blocks_with_experts_on_disk_or_elsewhere_compute_the_same(way: str, tmp_path: Path) -> None:
    directory, _ = SAVERS[way](tmp_path)
    checkpoint = Checkpoint.open(directory)
    blocks, count = range(int(checkpoint.config.num_hidden_layers)), int(checkpoint.config.num_local_experts)
    hosted, offloaded = load_span(checkpoint, blocks), load_span(checkpoint, blocks, offload=OFFLOAD)
    expected = outcome_of_span(hosted)
    # Gradients are sums in another order.
    torch.testing.assert_close(outcome_of_span(offloaded), expected, rtol=1e-5, atol=1e-4)
    with serving(directory, {"a": Held(range(count))}) as holders, owned(holders) as (span, _):
        torch.testing.assert_close(outcome_of_span(span), expected, rtol=1e-5, atol=1e-4)


def test_a_holder_tells_what_its_experts_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    directory, _ = SAVERS["fp8"](tmp_path)
    config = ServeConfig(model=str(directory), blocks=range(1), experts=range(2))
    assert load_held(Checkpoint.open(directory), range(1), config) is not None
    assert "experts: packed weights stay fp8; each product widens its own, in about 36.9 KB" in caplog.text


def test_what_cannot_be_done_with_packed_experts_is_refused(tmp_path: Path) -> None:
    directory, _ = SAVERS["fp8"](tmp_path)
    checkpoint = Checkpoint.open(directory)
    with pytest.raises(ConfigError, match=r"slice 0/2 of experts in few bits: .* leave out --slice"):
        load_held_experts(checkpoint, range(1), range(2), part=(0, 2), device=CPU)
    with pytest.raises(ConfigError, match=r"expert_bits is 4, but .* is published as fp8: leave expert_bits out"):
        load_held_experts(checkpoint, range(1), range(2), device=CPU, bits=4)
    for quantization in ("none", "mxfp4"):
        with pytest.raises(UnsupportedError, match="cannot be computed here"):
            load_expert(checkpoint, 0, 0, part=None, dtype=torch.float32, quantization=quantization)

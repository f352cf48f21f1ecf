"""The short measurements end, and measure what they say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.plan import measure
from swarm_plugins.offload.plan.measure import disk_rate, expert_rate, link_rate, product_seconds, step_seconds
from swarm_plugins.testing.models import tiny_config
from swarm_plugins.weights.formats.ggml import GgmlFormat
from swarm_plugins.weights.formats.nibbles import NibblesFormat
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.stored import StoredFormat

CPU = torch.device("cpu")


@pytest.mark.parametrize("rate_of", [disk_rate, expert_rate])
def test_the_disk_is_read_for_about_as_long_as_told(rate_of: Callable[..., float], tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    started = time.perf_counter()
    rate = rate_of([file], block_bytes=100_000, seconds=0.1)
    assert 0.1 <= time.perf_counter() - started < 30.0
    assert rate > 0


@pytest.mark.parametrize("rate_of", [disk_rate, expert_rate])
def test_a_file_smaller_than_a_piece_is_read_whole(rate_of: Callable[..., float], tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(5000))
    assert rate_of([file], block_bytes=1 << 20, seconds=0.01) > 0


@pytest.mark.parametrize("rate_of", [disk_rate, expert_rate])
def test_a_file_that_vanished_is_named(rate_of: Callable[..., float], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors cannot be read \(No such file"):
        rate_of([tmp_path / "gone.safetensors"], block_bytes=4096, seconds=0.01)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe", "deepseek_v3", "gpt_oss"])
def test_a_step_is_measured_without_weights(family: str) -> None:
    model = meta_model(tiny_config(family, num_layers=2), torch.float32)
    assert 0 < step_seconds(model, device=CPU, seconds=0.01) < 30.0


def test_the_experts_of_all_layers_are_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    num_products, product = 0, measure._product

    def counted(*tensors: Tensor) -> Tensor:
        nonlocal num_products
        num_products += 1
        return product(*tensors)

    # A clock that products of experts move on: what else this machine does changes nothing.
    monkeypatch.setattr(measure, "_product", counted)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: float(num_products)))
    few, many = (
        step_seconds(meta_model(tiny_config("mixtral", num_layers=layers), torch.float32), device=CPU, seconds=1.0)
        for layers in (2, 12)
    )
    assert few > 0
    assert many == 6 * few


@pytest.mark.parametrize(
    "form", [PlainFormat((64, 64), torch.bfloat16), GgmlFormat((64, 64), "MXFP4"), NibblesFormat((64, 64), 32)], ids=str
)
def test_a_product_with_a_weight_is_measured_without_it(form: StoredFormat) -> None:
    assert 0 < product_seconds(form, torch.bfloat16, CPU) < 30.0


def test_the_cpu_has_no_link() -> None:
    assert link_rate(CPU) is None

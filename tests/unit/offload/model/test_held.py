"""Experts that are held for owners of their blocks: slices of them add up to the whole, however they are stored."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from offload_models import save_toy
from torch import Tensor

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.offload import OffloadConfig
from swarm_plugins.offload.held import load_held_experts
from swarm_plugins.offload.quantizing import quantize_checkpoint

ROWS = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))


def run(path: Path, part: tuple[int, int] | None) -> Tensor:
    checkpoint, offload = Checkpoint.open(str(path)), OffloadConfig(fast_bytes=1 << 20)
    held = load_held_experts(checkpoint, range(1), range(2), part=part, device=torch.device("cpu"), offload=offload)
    with closing(held):
        return held.run(0, ROWS, {1: slice(0, 3)})


@pytest.mark.parametrize("bits", [None, 8])
def test_experts_in_memory_are_read_whatever_the_default_device(tmp_path: Path, bits: int | None) -> None:
    save_toy("mixtral", tmp_path)
    found = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            held = load_held_experts(
                Checkpoint.open(tmp_path), range(1), range(2), device=torch.device("cpu"), bits=bits
            )
            found.append(held.run(0, ROWS, {1: slice(0, 3)}))
            held.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("is_store", [False, True], ids=["checkpoint", "store"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "aria_text"])
def test_slices_add_up_to_the_whole_expert(tmp_path: Path, family: str, is_store: bool) -> None:
    path = tmp_path / "plain"
    save_toy(family, path)
    if is_store:
        quantize_checkpoint(path, tmp_path / "store", expert_bits=16, progress=False)
        path = tmp_path / "store"
    whole = run(path, None)
    assert whole.abs().max() > 0.1
    torch.testing.assert_close(run(path, (0, 2)) + run(path, (1, 2)), whole, rtol=1e-5, atol=1e-5)

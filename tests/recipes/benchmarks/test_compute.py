"""Simulated compute: the same results, after waits in the thread that computes."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from recipes.benchmarks import compute
from recipes.benchmarks.compute import SimulatedCompute
from recipes.benchmarks.links.swarm import DistantSwarm
from swarm_plugins.block_io import CacheOp, SpanInputs
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client.connection import RemoteBlocks
from swarm_plugins.testing import save_tiny

COMPUTE = SimulatedCompute(token_s=0.001, call_s=0.5, backward=3.0)


def results(swarm: DistantSwarm, version: Checkpoint) -> list[Tensor]:
    """Returns outputs and gradient of a batch, and the output of a session's step."""
    blocks = RemoteBlocks(swarm.connection, version=version.version, num_blocks=4)
    hidden = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    outputs = blocks.forward(SpanInputs(blocks=range(4), hidden=hidden)).hidden
    outputs.square().sum().backward()
    assert hidden.grad is not None
    session = blocks.open_session(range(4))
    step = blocks.step(session, SpanInputs(blocks=range(4), hidden=hidden.detach()), list[CacheOp]()).hidden
    blocks.release(session)
    return [outputs.detach(), hidden.grad, step]


def test_blocks_wait_in_proportion_to_their_work_and_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tiny("llama", tmp_path / "tiny")
    version = Checkpoint.open(directory)
    with DistantSwarm(directory) as swarm:
        expected = results(swarm, version)
    waits: list[tuple[str, float]] = []

    def sleep(seconds: float) -> None:
        waits.append((threading.current_thread().name, seconds))

    monkeypatch.setattr(compute, "time", SimpleNamespace(sleep=sleep))
    with DistantSwarm(directory, compute=[COMPUTE, COMPUTE]) as swarm:
        found = results(swarm, version)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    forward_s = 0.5 + 0.001 * 3 * 5
    mine = [seconds for name, seconds in waits if name == "swarm-compute"]
    assert mine == pytest.approx([forward_s] * 4 + [3.0 * forward_s] * 4 + [forward_s] * 4)

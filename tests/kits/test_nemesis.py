"""The schedule of a nemesis, and each kind of fault on a swarm in this process."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kits.liars import LyingSwarm
from kits.nemesis import KINDS, Fault, FaultKind, Nemesis, schedule
from recipes.benchmarks.links import Link
from swarm_plugins.block_io import SpanInputs
from swarm_plugins.book.record import Forgiven
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig
from swarm_plugins.client.connection import RemoteBlocks
from swarm_plugins.errors import ConfigError, TransportError
from swarm_plugins.testing import tiny_model


def test_a_seed_is_a_schedule_of_single_faults() -> None:
    faults = schedule(7, num_servers=4, duration_s=60, kinds=KINDS)
    assert faults == schedule(7, num_servers=4, duration_s=60, kinds=KINDS)
    assert faults != schedule(8, num_servers=4, duration_s=60, kinds=KINDS)
    for fault, following in itertools.pairwise(faults):
        assert fault.start_s + fault.length_s < following.start_s
    assert faults[-1].start_s + faults[-1].length_s <= 60
    assert {fault.kind for fault in faults[: len(KINDS)]} == set(KINDS)
    assert {fault.server for fault in faults} == {0, 1, 2, 3}


def test_wrong_kinds_are_named(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"invalid kinds of faults \['flood'\]: expected some of kill, freeze"):
        schedule(1, num_servers=1, duration_s=1, kinds=["kill", "flood"])  # type: ignore[list-item]
    with LyingSwarm(tiny_llama) as swarm, pytest.raises(ConfigError, match="'lie' cannot strike this swarm"):
        Nemesis(swarm, kinds=["lie"])


def until_it_answers(blocks: RemoteBlocks, inputs: SpanInputs) -> Tensor:
    """Calls until a call works: its deadline is short, and the machine may be busy."""
    until = time.monotonic() + 60.0
    while True:
        blocks.view.peers.book.observe("peer0", Forgiven())
        blocks.view.doubt()
        try:
            return blocks.forward(inputs).hidden
        except TransportError:
            assert time.monotonic() < until


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("freeze_daemon", "slow_link", "lie")])
def test_a_struck_server_fails_and_comes_back(tiny_llama: Path, tmp_path: Path, kind: FaultKind) -> None:
    tiny_model("llama", seed=5).save_pretrained(tmp_path)
    # One failure is an error: what the fault does to a call shows.
    config = SwarmConfig(request_timeout_s=0.3, info_timeout_s=0.3, max_retries=0)
    inputs = SpanInputs(blocks=range(4), hidden=torch.ones(1, 2, 32))
    with LyingSwarm(tiny_llama, spans=[(0, 4)], config=config) as swarm:
        blocks = swarm.connection.blocks(version=Checkpoint.open(tiny_llama).version, num_blocks=4)
        want = until_it_answers(blocks, inputs)
        nemesis = Nemesis(swarm, seed=1, kinds=[kind], other_model=tmp_path)
        heal = nemesis.victim.strike(Fault(kind=kind, server=0, start_s=0, length_s=0))
        with pytest.raises(TransportError):
            blocks.forward(inputs)
        heal()
        assert torch.equal(until_it_answers(blocks, inputs), want)


def test_a_nemesis_prints_its_seed_and_ends_when_it_is_closed(tiny_llama: Path) -> None:
    with LyingSwarm(tiny_llama) as swarm:
        with Nemesis(swarm, kinds=["slow_link"], duration_s=60, length_s=(30, 31), pause_s=(0, 0.01)) as nemesis:
            assert f"seed {nemesis.seed}, 1 faults" in str(nemesis)
            while not nemesis.num_struck:
                assert nemesis.is_running
        assert not nemesis.is_running
        assert all(swarm.transport.line(peer).link == Link() for peer in swarm.peers)

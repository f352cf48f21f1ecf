"""A draining server: open sessions go on, new ones are opened elsewhere, and it is not banned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import virtual_time

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig
from swarm_plugins.errors import MissingBlocksError
from swarm_plugins.server.draining import Draining, wait_until_ended
from swarm_plugins.server.failures import RequestError
from swarm_plugins.testing.in_process import InProcessSwarm


def test_kept_blocks_still_take_sessions() -> None:
    draining = Draining()
    draining.check(range(8))
    draining.begin(range(2, 6))
    draining.check(range(2, 6))
    draining.check(range(3, 4))
    for blocks in (range(1, 3), range(5, 7), range(6, 8)):
        with pytest.raises(RequestError, match=f"leaving blocks {blocks.start}:{blocks.stop}.*look up the swarm"):
            draining.check(blocks)
    draining.begin(range(0))
    with pytest.raises(RequestError, match="leaving blocks 3:4"):
        draining.check(range(3, 4))
    draining.end()
    draining.check(range(8))
    draining.leave()
    with pytest.raises(RequestError, match="leaving blocks 3:4"):
        draining.check(range(3, 4))
    draining.end()
    with pytest.raises(RequestError, match="leaving blocks 3:4"):
        draining.check(range(3, 4))


@pytest.mark.parametrize(("ends_after", "left"), [pytest.param(2, 0, id="ends"), pytest.param(1000, 1, id="cut-off")])
def test_the_wait_ends_with_the_last_session_or_the_time(ends_after: int, left: int) -> None:
    calls = []

    def num_open() -> int:
        calls.append(None)
        return int(len(calls) <= ends_after)

    assert virtual_time.run(wait_until_ended(num_open, 0.3), timeout_s=60) == left


def test_a_session_goes_on_and_a_new_one_goes_elsewhere(tiny_llama: Path) -> None:
    with InProcessSwarm(tiny_llama, spans=[(0, 4), (0, 4)], config=SwarmConfig(max_retries=2)) as swarm:
        blocks = swarm.connection.blocks(version=Checkpoint.open(tiny_llama).version, num_blocks=4)
        inputs = SpanInputs(blocks=range(4), hidden=torch.ones(1, 2, 32))
        old = blocks.open_session(range(4))
        first = blocks.step(old, inputs, ()).hidden
        [busy] = [peer for peer, service in swarm.services.items() if len(service.sessions)]
        [other] = [peer for peer in swarm.services if peer != busy]
        swarm.services[busy].draining.leave()
        blocks.view.entries = {busy: blocks.view.entries[busy]}  # a view from before

        new = blocks.open_session(range(4))
        assert torch.equal(blocks.step(new, inputs, ()).hidden, first)
        assert len(swarm.services[other].sessions) == 1
        assert blocks.view.banned() == []
        blocks.step(old, inputs, ())
        twin = blocks.fork(old)
        blocks.step(twin, inputs, ())
        assert len(swarm.services[busy].sessions) == 2
        assert torch.isfinite(blocks.forward(inputs).hidden).all()

        swarm.services[other].draining.leave()
        with pytest.raises(MissingBlocksError, match="leaving blocks 0:4"):
            blocks.step(blocks.open_session(range(4)), inputs, ())

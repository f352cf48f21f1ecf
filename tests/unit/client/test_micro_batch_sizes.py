"""How many chunks a batch has, and which servers get them, follows from what servers took before."""

from __future__ import annotations

from dataclasses import replace

import torch
from stage_kit import Stage, backward, batch, rows_of, run, three

from swarm_plugins.client.servers import Servers
from swarm_plugins.client.training.batch import BatchCall
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.messages import ForwardRequest


def steps(stages: dict[str, Stage], num_steps: int) -> list[list[int]]:
    """Returns the rows of each request that each of some training steps has made, of all servers."""
    asked: list[list[int]] = []

    async def use(servers: Servers, _: LocalTransport) -> float:
        for _step in range(num_steps):
            before = {peer: len(stage.seen) for peer, stage in stages.items()}
            call = BatchCall(servers, batch(length=20), keep=True)
            assert torch.equal((await call.forward()).hidden, 8 * call.inputs.hidden)
            assert torch.equal(await backward(call), 8 * call.inputs.hidden)
            new = [message for peer, stage in stages.items() for message in stage.seen[before[peer] :]]
            asked.append([rows_of(message) for message in new if isinstance(message, ForwardRequest)])
        return 0.0

    run(stages, use)
    return asked


def test_the_number_of_chunks_follows_from_what_servers_took() -> None:
    stages = three()
    for stage in stages.values():
        stage.row_s = 1.0
    asked = steps(stages, 10)
    assert asked[0] == asked[7] == [8, 8, 8]
    assert asked[8] == asked[9] == [1] * 24


def test_fast_servers_get_whole_batches() -> None:
    stages = three()
    for stage in stages.values():
        stage.row_s = 0.002
    assert steps(stages, 12)[-1] == [8, 8, 8]


def test_servers_with_the_same_blocks_share_a_batch_by_their_speed() -> None:
    stages = {"fast": Stage(0, 3, throughput=20.0), "slow": Stage(0, 3, throughput=20.0 / 3)}
    stages["fast"].row_s, stages["slow"].row_s = 3.0, 9.0
    asked = steps(stages, 12)
    assert asked[:8] == [[8]] * 8
    assert asked[8:] == [[2] * 4] * 4
    assert [stage.count(ForwardRequest) for stage in stages.values()] == [8 + 3 * 4, 4]


def test_chunks_become_so_small_that_a_server_keeps_their_graphs() -> None:
    stages = {"a": Stage(0, 3)}
    stages["a"].row_s, stages["a"].most_kept = 0.001, 3
    assert steps(stages, 4) == [[8], [4, 4], [2] * 4, [2] * 4]
    # One that keeps nothing at all gets whole batches.
    none = {"a": Stage(0, 3)}
    none["a"].row_s, none["a"].most_kept = 0.001, 0
    assert steps(none, 6)[-1] == [8]


def test_rows_on_both_sides_of_a_border_are_one_request() -> None:
    """Long and short ones have the same frequencies only if they run together."""
    stages = three()

    async def use(servers: Servers, _: LocalTransport) -> float:
        inputs = batch(length=20)
        rows = inputs.hidden.shape[0]
        positions = torch.arange(20).expand(rows, -1).clone()
        positions[0] %= 10
        servers.view.config = replace(servers.view.config, micro_batches=2)
        for one, expected in ((positions, [rows]), (positions[1:2], [rows // 2, rows - rows // 2])):
            before = {peer: len(stage.seen) for peer, stage in stages.items()}
            await BatchCall(servers, replace(inputs, position_ids=one, whole_beyond=16), keep=False).forward()
            for peer, stage in stages.items():
                assert sorted(map(rows_of, stage.seen[before[peer] :])) == expected
        return 0.0

    run(stages, use)

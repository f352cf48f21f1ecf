"""A hostile peer among four honest ones of a run, over real connections."""

from __future__ import annotations

import asyncio

import pytest
from run_kit import Trainee, World, agreed
from traitors import Attack, Traitor, first_updates_then_a_state, poisoned, two_records_and_on

from swarm_plugins.together import RunConfig
from swarm_plugins.transport.lasting import LastingNode
from swarm_plugins.transport.node import NodeConfig, SwarmNode

ROUNDS = 5
CONFIG = RunConfig(steps_per_round=2, straggler_s=20.0, poll_s=0.25, dead_s=10.0, transfer_s=60.0)


class Loopback(World):
    """Peers with nodes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, LastingNode] = {}

    async def start(self, *initial_peers: str) -> LastingNode:
        node = LastingNode(SwarmNode(NodeConfig(initial_peers=initial_peers)))
        await node.start()
        self.nodes[node.identity.peer_id] = node
        return node

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.close()

    def network(self, peer: str) -> LastingNode:  # type: ignore[override]
        return self.nodes[peer]


@pytest.mark.swarm
@pytest.mark.parametrize("attack", [first_updates_then_a_state, two_records_and_on])
async def test_one_hostile_peer_neither_replaces_nor_splits_nor_stops_a_run_of_four(attack: Attack) -> None:
    world = Loopback()
    try:
        everyone: list[Trainee] = []
        addresses: tuple[str, ...] = ()
        for number, kind in enumerate((Trainee, Trainee, Trainee, Trainee, Traitor)):
            node = await world.start(*addresses)
            addresses = addresses or tuple(await (await node.node()).addresses())
            one = kind(world, number, config=CONFIG, step_s=0.05, identity=node.identity)
            await node.serve({"rpc_run": one.peer.answer})
            await one.join()
            everyone.append(one)
        *honest, hostile = everyone
        assert isinstance(hostile, Traitor)
        betrayal = asyncio.create_task(hostile.betray(attack))
        for one in honest:
            one.train(ROUNDS)
        for one in honest:
            await one.done()
        betrayal.cancel()
        await hostile.peer.leave()
    finally:
        await world.close()
    poison = {poisoned(round_).digest.hex() for round_ in range(ROUNDS + 3)}
    assert not any(poison & set(one.digests.values()) or one.changed for one in honest)
    assert agreed(*honest) >= ROUNDS - 1
    assert len({one.digests[ROUNDS] for one in honest}) == 1

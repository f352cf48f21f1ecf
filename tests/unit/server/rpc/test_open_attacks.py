"""``rpc_open`` shows the states of its own stream, of the last forward that was committed to, and nothing else."""

from __future__ import annotations

import msgspec
import torch
from fake_server import VERSION, WIDTH, transport_to

from swarm_plugins.server.service import Service
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import (
    Commitment,
    CommitRequest,
    Failure,
    ForwardRequest,
    Message,
    OpenedStates,
    OpenRequest,
)

COMMIT = CommitRequest(
    forward=ForwardRequest(version=VERSION, start=2, end=6, hidden=torch.ones(1, 2, WIDTH)), nonce=b"x" * 16
)


async def ask(channel: Channel, message: Message) -> Message:
    await channel.send(message)
    answer = await channel.receive(timeout_s=5)
    assert answer is not None
    return answer


async def test_states_are_those_of_the_stream_and_of_its_last_commitment(service: Service) -> None:
    transport = transport_to(service, "alice")
    one, other = [await transport.open("server", "rpc_open", timeout_s=5) for _ in range(2)]
    assert isinstance(await ask(one, OpenRequest(states=(0,))), Failure), "nothing was committed to"
    assert isinstance(await ask(one, COMMIT), Commitment)
    opened = await ask(one, OpenRequest(states=(0, 2)))
    assert isinstance(opened, OpenedStates)
    assert [float(state[0, 0, 0]) for state in opened.states] == [3.0, 60.0]
    assert isinstance(await ask(other, OpenRequest(states=(0,))), Failure), "another stream of the same client"
    stranger = await transport.seen_from("eve").open("server", "rpc_open", timeout_s=5)
    assert isinstance(await ask(stranger, OpenRequest(states=(0,))), Failure)
    for states in ((3,), (-1,), (0, 0), tuple(range(10_000))):
        assert isinstance(await ask(one, OpenRequest(states=states)), Failure), states
    wrong = msgspec.structs.replace(COMMIT.forward, hidden=torch.full((1, 2, WIDTH), float("nan")))
    assert isinstance(await ask(one, msgspec.structs.replace(COMMIT, forward=wrong)), Failure)
    assert isinstance(await ask(one, OpenRequest(states=(0,))), Failure), "the states before are not held any more"
    await transport.close()
    assert not service.ledger.used

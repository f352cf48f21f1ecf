"""Asks servers at random, and checks what they answer: who does so finds liars before others believe them.

The "bounty hunters" of Petals (Borzunov et al. 2023, section 4). A caught server is quarantined here, and what it was
caught with is evidence for third parties. Servers cannot tell a probe from a client's forward.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from swarm_plugins.client.calls.call import WrongAnswerError
from swarm_plugins.client.connection import RemoteBlocks
from swarm_plugins.client.servers import NONCE_BYTES
from swarm_plugins.errors import MissingBlocksError, SwarmError, one_line
from swarm_plugins.transport.messages import ForwardRequest
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.verification.verifier import Verifier


class Probe(NamedTuple):
    """What a server was asked for, and what came of it."""

    peer: str
    blocks: range
    outcome: Literal["right", "wrong", "unknown"]
    reason: str = ""


def probe_servers(remote: RemoteBlocks, count: int, states_of: Callable[[], Sequence[Tensor]]) -> Iterator[Probe]:
    """Asks a server at random, so many times.

    Args:
        remote: Blocks whose answers are checked (``SwarmConfig(verify="on")``).
        count: How often.
        states_of: Returns the input of each block for some tokens, ``[B, S, D]``, others at each call.

    Raises:
        MissingBlocksError: If no server is left to be asked.
    """
    for _ in range(count):
        states = states_of()
        servers = {peer: info for peer, info in remote.view.infos.items() if info.state == "online"}
        names = sorted(peer for peer in servers if not remote.view.excludes(peer))
        if not names:
            raise MissingBlocksError(
                f"no server of {remote.view.version} is left to be asked: `swarm audit` lists those in quarantine"
            )
        peer = secrets.choice(names)
        yield remote.connection.loop.run(_probe(remote, peer, servers[peer], states[servers[peer].start]))


async def _probe(remote: RemoteBlocks, peer: str, info: ServerInfo, hidden: Tensor) -> Probe:
    guard, view, blocks = remote.servers.guard, remote.view, range(info.start, info.end)
    if not isinstance(guard, Verifier):
        raise SwarmError('answers of these servers are not checked: load the model with SwarmConfig(verify="on")')
    forward = ForwardRequest(
        version=info.version,
        start=blocks.start,
        end=blocks.stop,
        hidden=hidden.detach().cpu(),
        nonce=secrets.token_bytes(NONCE_BYTES),
    )
    try:
        is_checked = await guard.probe(peer, forward, info, view)
    except WrongAnswerError as exc:
        return Probe(peer, blocks, "wrong", one_line(exc))
    except SwarmError as exc:
        return Probe(peer, blocks, "unknown", one_line(exc))
    return Probe(peer, blocks, "right") if is_checked else Probe(peer, blocks, "unknown", "it could not be checked now")

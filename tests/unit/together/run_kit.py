"""Peers of a run in one event loop: they reach each other in memory, and train by adding numbers."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from recipes.benchmarks.links.transport import LineTransport
from swarm_plugins.together.config import RunConfig
from swarm_plugins.together.outer import SharedState, first_state, write_update
from swarm_plugins.together.peer import RunPeer
from swarm_plugins.together.signing import Seal, run_hash
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.identity import Identity, peer_id_of
from swarm_plugins.transport.run_messages import RunSpec

SHAPES = ((2, 3), (3, 2), (4,))
SPEC = RunSpec(base="1", model="me/base", adapter="LORA r=2", tensors=b"t", rules="mean")
QUICK = RunConfig(steps_per_round=4, straggler_s=20.0, poll_s=1.0, dead_s=5.0, transfer_s=30.0)


def identity_of(number: int) -> Identity:
    """Returns the same key pair each time: ids decide who coordinates."""
    key = ed25519.Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))
    public = key.public_key().public_bytes_raw()
    encoded = bytes([8, 1, 18, len(public)]) + public
    return Identity(key, encoded, peer_id_of(encoded), b"")


@dataclass
class World:
    """All peers, those that are lost too."""

    handlers: dict[str, dict[str, object]] = field(default_factory=dict)
    announced: dict[bytes, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.transport = LineTransport(self.handlers)  # type: ignore[arg-type]

    def network(self, peer: str) -> Network:
        return Network(self, peer)


@dataclass
class Network:
    world: World
    peer: str

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        return await self.world.transport.seen_from(self.peer).open(peer, rpc, timeout_s=timeout_s)

    async def announce_run(self, run: bytes, ttl_s: float) -> None:
        self.world.announced.setdefault(run, set()).add(self.peer)

    async def run_peers(self, run: bytes) -> list[str]:
        return sorted(self.world.announced.get(run, ()))


class Trainee:
    """One peer that trains: each step adds to its weights, and takes some time."""

    def __init__(
        self,
        world: World,
        number: int,
        *,
        config: RunConfig = QUICK,
        spec: RunSpec = SPEC,
        step_s: float = 1.0,
        run_id: str = "me/run",
        identity: Identity | None = None,
        state: SharedState | None = None,
    ) -> None:
        identity = identity or identity_of(number)
        self.world = world
        self.config = config
        self.step_s = step_s
        self.peer_id = identity.peer_id
        self._random = np.random.default_rng(number)
        seal = Seal(run_hash(run_id), identity, allowed_peers=config.allowed_peers, secret_file=config.secret_file)
        weights = [self._random.normal(size=shape).astype(np.float32) for shape in SHAPES]
        self.peer = RunPeer(
            run_id,
            seal,
            world.network(self.peer_id),
            state or first_state(weights),
            spec=spec,
            config=config,
        )
        self.digests: dict[int, str] = {}
        """Of the state with which each round began here."""
        self.changed: list[int] = []
        """Rounds in which it has taken over another state than the one it had."""
        self.is_in: list[bool | None] = []
        self._training: asyncio.Task[None] | None = None

    async def join(self) -> None:
        self.world.handlers[self.peer_id] = {"rpc_run": self.peer.answer}
        await self.peer.join()
        self._note()

    def train(self, until_round: int) -> None:
        """Trains in the background."""
        self._training = asyncio.create_task(self._train(until_round))

    async def done(self) -> None:
        assert self._training is not None
        await self._training

    async def _train(self, until_round: int) -> None:
        while self.peer.round.state.round < until_round:
            await self.one_round()
        await self.peer.linger()
        await self.peer.leave()

    async def one_round(self) -> None:
        now = self.peer.round
        steps = 0
        while now is self.peer.round and not (steps >= self.config.steps_per_round or now.gives_way(steps)):
            await asyncio.sleep(self.step_s)
            steps += 1
            self.peer.progress = (now.state.round, steps, 2 * steps)
        if now is self.peer.round:
            self.is_in.append(await self.peer.contribute(self.update(), base=now.state.digest, samples=2 * steps))
        self._note()

    def update(self) -> bytes:
        return write_update([self._random.normal(size=shape).astype(np.float32) for shape in self.peer.round.shapes])

    async def kill(self) -> None:
        """Makes it vanish in the middle of whatever it does."""
        # It may have closed a round unknown to the others.
        self.digests.pop(max(self.digests, default=0), None)
        await self.world.transport.kill(self.peer_id)
        for task in (self._training, self.peer._task):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def _note(self) -> None:
        state = self.peer.round.state
        before = self.digests.get(state.round)
        self.digests[state.round] = state.digest.hex()
        if before not in (None, self.digests[state.round]):
            self.changed.append(state.round)


def agreed(*trainees: Trainee) -> int:
    """Checks that all have had the same state in all rounds that they share; returns how many these are."""
    shared = set.intersection(*(set(one.digests) for one in trainees))
    for round_ in shared:
        assert len({one.digests[round_] for one in trainees}) == 1, f"round {round_}"
    return len(shared)

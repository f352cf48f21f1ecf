"""A run that is trained together, as a trainer sees it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from swarm_plugins.errors import CheckpointError, ProtocolError, SwarmError, one_line
from swarm_plugins.together.blobs import RPC
from swarm_plugins.together.config import RunConfig
from swarm_plugins.together.outer import Array, SharedState, read_state, write_update
from swarm_plugins.together.peer import RunPeer
from swarm_plugins.together.signing import Seal, run_hash
from swarm_plugins.together.tensors import TrainedTensors
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.lasting import LastingNode
from swarm_plugins.transport.loop import LoopThread
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.run_messages import RunSpec

log = logging.getLogger(__name__)

_TEXT_CHARS = 1024
_LAST_TRIES = 3


class RunProgress(NamedTuple):
    """Where a run is."""

    round: int
    """Counted from 0."""
    peers: int
    """Living peers, this one included."""
    samples: int
    """In all rounds so far, and in this one by now."""
    late: tuple[str, ...]
    """Ids of peers that the closing round waits for; until then, of those that the last round did not wait for."""


class SharedRun:
    """Trains tensors together with other peers; called by one thread, which it holds up at the end of each round.

    Args:
        run_id: Name of the run.
        parameters: The trained parameters, by name.
        base: Version of the base model's weights.
        model: Name of the base model, for messages.
        adapter: Method, rank and target modules, for messages.
        settings: All settings of the adapter, which peers must have in common.
        config: Settings of the run.
        node: Settings of the node by which other peers reach this one.
    """

    def __init__(
        self,
        run_id: str,
        parameters: Mapping[str, nn.Parameter],
        *,
        base: str,
        model: str,
        adapter: str,
        settings: str,
        config: RunConfig,
        node: NodeConfig,
    ) -> None:
        self.run_id = run_id
        self._tensors = TrainedTensors(parameters)
        self._spec = partial(
            RunSpec,
            base=base[:_TEXT_CHARS],
            model=model[:_TEXT_CHARS],
            adapter=adapter[:_TEXT_CHARS],
            tensors=self._tensors.digest(settings),
        )
        self._config = config
        self._node_config = node
        self._loop = LoopThread("swarm-run")
        self._node: LastingNode | None = None
        self._peer: RunPeer | None = None
        self._base: SharedState | None = None
        """The shared state that the module's weights come from."""
        self._steps = self._samples = 0
        self._was_left_out = False
        self._is_publisher = False

    def start(self, resumed: Mapping[str, Any] | None = None) -> None:
        """Joins the run and takes over its weights; founds it with the weights of now if there are no peers.

        Args:
            resumed: What `state_dict` returned when a checkpoint was written.

        Raises:
            ConfigError: If the run's peers train something else, or do not admit this one.
            CheckpointError: If ``resumed`` does not fit.
            TransportError: If the swarm cannot be joined, or the weights do not come.
        """
        own = self._tensors.first_state() if resumed is None else self._resumed(resumed)
        self._loop.start()
        try:
            self._peer = self._loop.run(self._join(own))
        except BaseException:
            self.close()
            raise
        self._base = self._peer.round.state
        if resumed is None:
            self._tensors.load(self._base)
            self._steps = self._samples = 0
        else:
            self._tensors.resume(own)
            # Before it was started again, it may have contributed all that the checkpoint has, and more.
            is_counted = self._peer.is_counted(own)
            if self._base.digest != own.digest:
                # The others have gone on: what no round counts is added to a later one.
                self._settle_if_known(self._tensors.changes(), own.round, is_counted)
            elif is_counted:
                self._tensors.count_from_now()
                self._steps = self._samples = 0
        self._tell()
        progress = self.progress
        log.info("joined run %s: round %d, %d peer(s)", self.run_id, progress.round, progress.peers)

    async def _join(self, own: SharedState) -> RunPeer:
        self._node = LastingNode(SwarmNode(self._node_config))
        await self._node.start()
        await (await self._node.node()).member.check_clock()
        config, identity = self._config, self._node.identity
        seal = Seal(
            run_hash(self.run_id),
            identity,
            allowed_peers=config.allowed_peers,
            secret_file=config.secret_file,
        )
        peer = RunPeer(
            self.run_id,
            seal,
            self._node,
            own,
            spec=self._spec(rules=config.rules_of(identity.peer_id)),
            config=config,
        )
        await self._node.serve({RPC: peer.answer})
        try:
            await peer.join()
        except BaseException:
            await peer.leave()
            raise
        return peer

    def after_step(self, samples: int) -> None:
        """Counts a step of the optimizer. At the end of a round, waits for the others and takes over its result.

        Raises:
            NumericError: If weights have become NaN, or have moved farther than peers accept.
            RequestTimeoutError: If the round was not closed in time.
        """
        self._steps += 1
        self._samples += samples
        self._tell()
        now = self.peer.round
        if now.state is not self._base:
            self._follow()
        elif self._steps >= self._config.steps_per_round or now.gives_way(self._steps) or self._was_left_out:
            # The others wait for this peer again only when it has contributed: a slower one would never catch up.
            self._contribute()

    def finish(self) -> None:
        """Contributes what has been trained since the last round, takes over the result, and leaves. Idempotent."""
        if self._peer is None:
            return
        for _ in range(_LAST_TRIES):
            if self._peer.round.state is not self._base:
                self._follow()
            # The samples of one that was left out of the last round are owed.
            if not (self._steps or self._samples):
                break
            self._contribute()
        if self._samples:
            log.warning("run %s: the last %d samples of this peer are in no round", self.run_id, self._samples)
        progress, self._is_publisher = self.progress, self._peer.is_publisher
        self._loop.run(self._peer.linger())
        log.info("left run %s after round %d: %d samples", self.run_id, progress.round, progress.samples)
        self.close()

    def close(self) -> None:
        """Leaves without a contribution. Idempotent."""
        peer, self._peer = self._peer, None
        node, self._node = self._node, None
        for work in (peer and peer.leave, node and node.close):
            if work:
                with contextlib.suppress(SwarmError):
                    self._loop.run(work())
        self._loop.close()

    @property
    def peer(self) -> RunPeer:
        """This peer.

        Raises:
            ProtocolError: If the run has not been joined.
        """
        if self._peer is None:
            raise ProtocolError(f"run {self.run_id!r} is not under way: call start() first")
        return self._peer

    @property
    def progress(self) -> RunProgress:
        """Where the run is."""
        now, living = self.peer.round, self.peer.living
        here = [status.samples for status in living.values() if status.round == now.state.round]
        late = tuple(now.late(living) if now.closing_s else now.left_out(living))
        return RunProgress(now.state.round, 1 + len(living), now.state.samples + self._samples + sum(here), late)

    @property
    def state(self) -> SharedState:
        """The shared state that the module's weights come from; after `finish`, the last one.

        Raises:
            ProtocolError: If the run has not been joined.
        """
        if self._base is None:
            raise ProtocolError(f"run {self.run_id!r} has not been joined: call start() first")
        return self._base

    @property
    def is_publisher(self) -> bool:
        """Whether this peer publishes the adapter for all; after `finish`, whether it was to do so then."""
        return self._is_publisher if self._peer is None else self._peer.is_publisher

    @property
    def shared(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the module has the shared weights of this round, without what was trained since."""
        return contextlib.nullcontext() if self._base is None else self._tensors.shown(self._base)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps besides the trained weights."""
        if self._base is None:
            return {}
        blob = torch.frombuffer(bytearray(self._base.blob), dtype=torch.uint8)
        counts = {"steps": self._steps, "samples": self._samples}
        return {"run": self.run_id, "state": blob, "owed": self._tensors.owed, **counts}

    def _resumed(self, kept: Mapping[str, Any]) -> SharedState:
        if kept.get("run") != self.run_id:
            raise CheckpointError(
                f"the checkpoint belongs to run {kept.get('run')!r}, not to {self.run_id!r}: resume that run, or start "
                "without ckpt_path"
            )
        try:
            state = read_state(kept["state"].numpy().tobytes(), self._tensors.shapes)
            self._tensors.restore_owed(kept["owed"])
            self._steps, self._samples = int(kept["steps"]), int(kept["samples"])
        except (ProtocolError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit run {self.run_id!r}: {one_line(error, with_kind=True)}"
            ) from error
        return state

    def _contribute(self) -> None:
        # The peer may move on meanwhile: the update belongs to the state that it was computed from.
        base = self.state
        changes = self._tensors.changes()
        work = self.peer.contribute(write_update(changes), base=base.digest, samples=self._samples)
        self._settle_if_known(changes, base.round, self._loop.run(work))

    def _follow(self) -> None:
        """Takes over a state that the other peers have come to without this one."""
        before, after = self._base, self.peer.round.state
        if before is None or before.round == after.round:
            # Two peers have founded the run, or a network was divided: what was trained here stays.
            if before is not None:
                self._tensors.rebase(after)
            self._base = after
            self._tell()
            return
        self._settle(self._tensors.changes(), before.round, is_counted=False)

    def _settle_if_known(self, changes: list[Array], round_: int, is_counted: bool | None) -> None:
        if is_counted is None:
            log.info("run %s: it is not known whether round %d counts this peer", self.run_id, round_)
        self._settle(changes, round_, is_counted=is_counted is not False)

    def _settle(self, changes: list[Array], round_: int, *, is_counted: bool) -> None:
        """Adopts the state of the new round; the changes belong to ``round_``."""
        if not is_counted and self._samples:
            log.warning(
                "run %s: round %d was closed without this peer; its %d samples are added to a later one",
                self.run_id,
                round_,
                self._samples,
            )
        self._tensors.settle(changes, is_counted=is_counted)
        self._was_left_out = not is_counted
        self._base = self.peer.round.state
        self._tensors.load(self._base)
        self._steps, self._samples = 0, 0 if is_counted else self._samples
        self._tell()

    def _tell(self) -> None:
        """Lets the other peers know."""
        if self._base is not None:
            self.peer.progress = (self._base.round, self._steps, self._samples)

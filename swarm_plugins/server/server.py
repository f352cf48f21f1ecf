"""A server: loads a span, joins the swarm, serves and announces it."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from types import TracebackType

import msgspec
import torch
from transformers import PreTrainedConfig

from swarm_plugins.blocks.span import Span
from swarm_plugins.borders import tied_blocks
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.checkpoint.tried import is_tried
from swarm_plugins.errors import ConfigError, TransportError
from swarm_plugins.ledger import Ledger
from swarm_plugins.offload.held import HeldExperts
from swarm_plugins.server.background import in_thread, kept_going, sweep
from swarm_plugins.server.compute.scheduler import Scheduler
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.distances import keep_measured
from swarm_plugins.server.draining import wait_until_ended
from swarm_plugins.server.elsewhere import ExpertsElsewhere, FetchExperts
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.moving import Mover
from swarm_plugins.server.other_versions import OtherVersions
from swarm_plugins.server.presence import Presence
from swarm_plugins.server.rpc.table import operator_handlers, service_handlers
from swarm_plugins.server.service import MAX_REQUEST_BYTES, ExpertsService, Service
from swarm_plugins.server.startup.capacity import Speed, checked_device, set_budgets
from swarm_plugins.server.startup.held_experts import load_held, measure_held
from swarm_plugins.server.startup.joining import joining_info
from swarm_plugins.server.startup.placing import choose_blocks, may_move
from swarm_plugins.server.startup.preload import preload_adapter
from swarm_plugins.server.startup.spans import SpanLoader, rate_of_network
from swarm_plugins.server.startup.weights import hosted_weights
from swarm_plugins.server.state.activations import ActivationStore
from swarm_plugins.server.state.adapter_store import AdapterStore
from swarm_plugins.server.state.cutting import MIN_PORTION_TOKENS, RunLimits
from swarm_plugins.server.state.points import Points
from swarm_plugins.server.state.prefixes import PrefixStore
from swarm_plugins.server.state.pushes import Pushes
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)

_PACK_S = 0.5
"""A pack of session steps is cut to about this time, which a decode step may have to wait."""
_MIN_PACK_TOKENS, _MAX_PACK_TOKENS = 64, 1024
_PORTION_S = 0.02
"""Batches of training are cut so that a forward takes about so long, a backward a few times it: others wait for it."""
_BLOCK_S = 0.25
"""Rows are cut so that a forward through one block takes about this time, a backward a few times it."""
_NO_FETCHING = (
    "remote_experts: experts of other servers are asked for as a client does: give SwarmServer(config, fetch_experts="
    "RemoteShare), from swarm_plugins.remote_experts.owner"
)
_NOT_TRIED = (
    "was never tried with this release of transformers: give SwarmServer(config, try_family=try_family), from "
    "swarm_plugins.backbone.trial, which compares a small model of it"
)
_GRACE_S = 5.0
"""How long `SwarmServer.close` waits for running requests."""


class SwarmServer:
    """Serves a span of blocks, or experts of blocks.

    Args:
        config: What to serve and how.
        fetch_experts: How experts are asked for that other peers hold. None: `ServeConfig.remote_experts` is refused.
        try_family: Compares a cut model of a config with the whole one. None: a model type that nobody has compared is
            refused when the server starts.

    Raises:
        ConfigError: If experts of other peers are wanted, and it is not said how they are asked for.
    """

    def __init__(
        self,
        config: ServeConfig,
        fetch_experts: FetchExperts | None = None,
        try_family: Callable[[PreTrainedConfig, str], None] | None = None,
    ) -> None:
        if config.remote_experts and fetch_experts is None:
            raise ConfigError(_NO_FETCHING)
        self.config = config
        self._fetch_experts = fetch_experts
        self._try_family = try_family
        self._points = Points(config.points_file)
        self._ledger = Ledger(config.request_bytes or MAX_REQUEST_BYTES, groups=self._points)
        self._presence: Presence | None = None
        self._service: Service | ExpertsService | None = None
        self._info: ServerInfo | None = None
        self._spans: HostedSpans | None = None
        self._held: HeldExperts | None = None
        self._share: ExpertsElsewhere | None = None
        self._others: OtherVersions | None = None
        self._chores: list[asyncio.Task[None]] = []
        self.asked_to_end = asyncio.Event()
        """Set once its operator has asked it to drain and to end."""

    @property
    def info(self) -> ServerInfo:
        """What the server announces now.

        Raises:
            ConfigError: If it has not been started.
        """
        if self._service is not None:
            return self._service.info()
        if self._info is None:
            raise ConfigError("this server has not been started: call start() first")
        return self._info

    @property
    def service(self) -> Service | ExpertsService | None:
        """What answers requests, for monitors; None until it has been loaded."""
        return self._service

    @property
    def streams(self) -> StreamCounts:
        """What its streams have carried so far, for monitors."""
        return StreamCounts() if self._presence is None else self._presence.counts

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that its work may take, by the setting that changes each."""
        service, config = self._service, self.config
        found = {} if service is None else {"request_bytes": service.ledger.limit}
        if isinstance(service, Service):
            found["kv_bytes"] = config.kv_bytes
            found["activation_bytes"] = service.activations.budget_bytes
            found["adapter_bytes"] = config.adapter_bytes
            found["run_bytes"] = service.run_limits.run_bytes
        return found

    @property
    def peer_id(self) -> str:
        """Base58 id of this peer."""
        return self._joined().peer_id

    async def addresses(self) -> tuple[str, ...]:
        """Returns the addresses by which others reach this server, and may join by."""
        return await self._joined().addresses()

    async def wait_lost(self) -> None:
        """Returns when the server has lost the network for good."""
        await self._joined().wait_lost()

    async def start(self, *, on_joined: Callable[[SwarmServer], object] | None = None) -> None:
        """Joins the swarm, loads the span, serves and announces it.

        Args:
            on_joined: Called with the server as soon as others can join by its addresses, before the span is loaded.

        Raises:
            SwarmError: If the checkpoint, a setting or the network is at fault.
        """
        try:
            await self._start(on_joined)
        except BaseException:
            await self.close()
            raise

    def _check_family(self, checkpoint: Checkpoint) -> None:
        if is_tried(checkpoint.config):
            return
        if self._try_family is None:
            raise ConfigError(f"model_type {checkpoint.config.model_type!r} {_NOT_TRIED}")
        self._try_family(checkpoint.config, checkpoint.name)

    async def _start(self, on_joined: Callable[[SwarmServer], object] | None) -> None:
        config = self.config
        config.check_files()
        device = checked_device(config.device)
        await in_thread(self._points.load)
        checkpoint = await in_thread(lambda: Checkpoint.open(config.model, revision=config.revision))
        await in_thread(lambda: self._check_family(checkpoint))
        weights = await in_thread(lambda: hosted_weights(checkpoint, config))
        if config.also_versions:
            self._others = OtherVersions(config, checkpoint, weights.version)
            await in_thread(self._others.check)
        num_blocks = num_blocks_of(checkpoint.config)
        named = config.span_of(num_blocks, tied_blocks(checkpoint.config))
        self._presence = Presence(SwarmNode(config.node(), ledger=self._ledger), every_s=config.announce_every_s)
        await self._presence.start()
        if on_joined is not None:
            on_joined(self)
        blocks = named or range(num_blocks)
        self._info = joining_info(config, weights, num_blocks, blocks)
        loader = SpanLoader(checkpoint=checkpoint, config=config, device=device)
        # Before the load, which may take minutes: others that join meanwhile see these blocks as taken.
        if named is None:
            rates = functools.partial(loader.rates, network=self._presence, info=self._info)
            blocks = await choose_blocks(self._presence, checkpoint, config, self._describe, rates)
        await self._presence.announce(lambda: self.info)
        self._held = await in_thread(lambda: load_held(checkpoint, blocks, config))
        if self._held is not None and config.is_holder:
            await self._serve_experts(self._held)
            return
        if config.remote_experts and self._fetch_experts is not None:
            share = self._share = self._fetch_experts(
                self._presence,
                version=weights.version,
                num_blocks=num_blocks,
                blocks=blocks,
                addresses=config.initial_peers or await self.addresses(),
                model=config.model,
                device=device,
                own=self._held,
                on_answer=self._points.earned,
            )
            loader.elsewhere, loader.rehearsing = share.attach, share.rehearsing
        span = await in_thread(lambda: loader.load(blocks))
        service = await self._serve(loader, span)
        if may_move(config) and self._spans is not None:
            mover = Mover(
                config=config,
                presence=self._presence,
                service=service,
                spans=self._spans,
                load=loader.load,
            )
            self._chores.append(kept_going(mover.run(), "move to where the swarm needs it"))

    def _describe(self, **changes: object) -> ServerInfo:
        """Changes what is announced before there is a service."""
        self._info = msgspec.structs.replace(self.info, **changes)
        return self._info

    async def _serve_experts(self, held: HeldExperts) -> None:
        speed = await in_thread(lambda: measure_held(held))
        held.rows_at_once = max(_MIN_PACK_TOKENS, int(speed.throughput * _BLOCK_S))
        self._service = ExpertsService(
            announced=_measured(self.info, held.dtype, speed),
            held=held,
            scheduler=Scheduler(held, points=self._points),
            max_batch_tokens=self.config.max_batch_tokens,
            ledger=self._ledger,
        )
        await self._go_online(self._service)

    async def _go_online(self, service: Service | ExpertsService) -> None:
        presence = self._joined()
        service.describe(max_batch_tokens=set_budgets(service, self.config))
        if self._others is not None:
            await self._others.compare(service)
            self._chores.append(kept_going(self._others.keep_up(service), "compare blocks with other versions"))
        service.scheduler.start()
        self._chores.append(kept_going(sweep(service), "drop expired graphs"))
        handlers = service_handlers(service) | operator_handlers(service, self.config, self.asked_to_end.set)
        await presence.serve(handlers)
        # Only now: clients avoid a server that is announced as online but does not answer.
        service.describe(state="online")
        await presence.announce(lambda: self.info)

    async def _serve(self, loader: SpanLoader, span: Span) -> Service:
        config, share = self.config, self._share
        spans = self._spans = HostedSpans(span)
        loader.pool = spans.pool
        speed = await loader.measured(span)
        pack_tokens = int(speed.throughput / len(span.blocks) * _PACK_S)
        chunk_tokens = max(_MIN_PACK_TOKENS, min(_MAX_PACK_TOKENS, pack_tokens))
        kv_tokens = span.spec.kv_tokens(config.kv_bytes)
        max_session_tokens = min(config.max_session_tokens, span.spec.max_positions, kv_tokens)
        announced = msgspec.structs.replace(
            _measured(self.info, span.spec.dtype, speed),
            network_tokens_s=await rate_of_network(span, self._joined(), self.info),
            total_kv_tokens=kv_tokens,
            kv_row_tokens=span.spec.kv_row_tokens,
            kv_token_bytes=span.spec.kv_token_bytes,
            kv_row_bytes=span.spec.kv_row_bytes,
            has_states=span.spec.has_states,
            max_session_tokens=max_session_tokens,
            needs=() if share is None else share.needs,
            pushes=True,
        )
        service = self._service = Service(
            announced=announced,
            runner=spans,
            scheduler=Scheduler(spans, self._points, chunk_tokens=chunk_tokens),
            max_batch_tokens=config.max_batch_tokens,
            max_session_tokens=max_session_tokens,
            run_limits=RunLimits(
                portion_tokens=max(MIN_PORTION_TOKENS, int(speed.throughput / len(span.blocks) * _PORTION_S)),
                row_tokens=max(MIN_PORTION_TOKENS, int(speed.throughput * _BLOCK_S)),
                token_bytes=speed.token_bytes,
            ),
            kv_bytes=config.kv_bytes,
            activations=ActivationStore(config.activation_bytes or 0, groups=self._points),
            adapters=AdapterStore(config.adapter_bytes, groups=self._points),
            ledger=self._ledger,
            identity=self._joined().identity,
            pushes=Pushes(self._joined(), self._points),
            prefixes=PrefixStore(spans.pool, self._points, is_shared=config.share_prefixes),
        )
        for name in config.adapters:
            service.adapters.publish(await in_thread(functools.partial(preload_adapter, name, span)))
        await self._go_online(service)
        measured = keep_measured(self._joined(), service.info, service.describe, every_s=config.announce_every_s)
        self._chores.append(kept_going(measured, "measure round trips to neighbors"))
        return service

    async def drain(self, drain_s: float) -> int:
        """Takes no new sessions and announces that; waits until the open ones have ended, ``drain_s`` at most.

        Returns:
            How many sessions are left, which `close` cuts off: their clients replay them elsewhere.
        """
        service = self._service
        if service is None:
            return 0
        service.draining.leave()
        sessions = service.sessions if isinstance(service, Service) else ()
        if sessions:
            how_long = f"it ends when they have, after {drain_s:g} s at the latest, or at another signal"
            log.warning("this server drains; open sessions: %d; %s", len(sessions), how_long)
        try:
            await self._joined().announce(lambda: self.info)
        except TransportError as error:
            log.warning("cannot announce that this server is draining: %s", error)
        return await wait_until_ended(lambda: len(sessions), drain_s)

    async def close(self) -> None:
        """Leaves the DHT, waits a moment for running requests, ends everything. Idempotent."""
        presence, self._presence = self._presence, None
        service = self._service
        chores, self._chores = self._chores, []
        for task in chores:
            task.cancel()
        await asyncio.gather(*chores, return_exceptions=True)
        try:
            if presence is not None:
                await presence.retract()
                if service is not None:
                    await wait_until_ended(lambda: service.scheduler.num_waiting, _GRACE_S)
                if self._share is not None:
                    await self._share.close()
                await presence.close()
        finally:
            if service is not None:
                await asyncio.get_running_loop().run_in_executor(None, service.scheduler.close)
                self._points.save()
                log.info("points: %s", self._points.summary())
            if isinstance(service, Service):
                service.activations.clear()
            for part in (self._spans, self._held):
                if part is not None:
                    part.close()

    async def __aenter__(self) -> SwarmServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _joined(self) -> Presence:
        if self._presence is None:
            raise ConfigError("this server is not running: call start() first, and nothing after close()")
        return self._presence


def _measured(info: ServerInfo, dtype: torch.dtype, speed: Speed) -> ServerInfo:
    """Returns what a server announces once it has loaded and measured what it serves."""
    return msgspec.structs.replace(
        info,
        dtype=str(dtype).removeprefix("torch."),
        throughput=round(speed.throughput, 3),
        decode_s=speed.decode_s,
    )

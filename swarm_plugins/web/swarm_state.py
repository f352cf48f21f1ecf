"""The state of a swarm, for the page and for programs: surveyed only while somebody looks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from fastapi import APIRouter, FastAPI, Response
from torch import nn

from swarm_plugins import __version__
from swarm_plugins.backbone.served import stack_of
from swarm_plugins.book import judging
from swarm_plugins.book.judging import Ban
from swarm_plugins.client.discovery.missing import runs
from swarm_plugins.client.discovery.network import LastingNetwork
from swarm_plugins.errors import SwarmError, TransportError, one_line
from swarm_plugins.survey import Joining, ModelStatus, ServerStatus, Surveyed, survey_node
from swarm_plugins.transport.records import possible_round_trips
from swarm_plugins.verification.quarantine import Quarantine, user_quarantine
from swarm_plugins.web.page import page_router

if TYPE_CHECKING:
    from swarm_plugins.client.connection import SwarmConnection
    from swarm_plugins.client.discovery.server_view import ServerView

_EVERY_S = 2.0
_LONGEST_S = 30.0
_SERVERS_S = 20.0
"""Timeout for all servers together: strangers can announce many that never answer."""
_RENEW_S = 30.0
"""Between surveys that may join the swarm anew: libp2p does not call a lost peer for minutes, a new node does."""
_MAX_MODELS = 32
_MAX_SERVERS = 256
_MAX_BLOCKS = 1024
"""Versions that claim more blocks are left out: what is drawn grows with them."""
_MAX_GAPS = 64
_MAX_ADAPTERS = 64
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def source_of(model: nn.Module) -> SwarmSource | None:
    """Returns the state of the swarm that runs a model's blocks, as its client sees it; None if none does.

    Raises:
        TransportError: If no initial peer of the model answers.
    """
    stack = stack_of(model)
    if stack is None:
        return None
    view = stack.remote.view
    return SwarmSource(stack.remote.connection, wanted=view.version.key, views=[view])


class State(NamedTuple):
    """What is known of a swarm."""

    is_known: bool
    """Whether any survey has succeeded."""
    body: bytes
    """JSON: the models, and why the last survey failed if it did."""


class SwarmSource:
    """The state of a swarm: surveyed only when it is asked for, and at most every two seconds.

    Args:
        connection: A started connection to the swarm.
        wanted: Part of a version or of a model's name. None: all that is served.
        views: What a client of this connection knows of servers: its bans are shown.
        timeout_s: Longest wait for one server.
        quarantine: Servers caught with a wrong answer. None: this user's.
        clock: Monotonic seconds; tests pass their own.
    """

    def __init__(
        self,
        connection: SwarmConnection,
        *,
        wanted: str | None = None,
        views: Sequence[ServerView] = (),
        timeout_s: float = 5.0,
        quarantine: Quarantine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._wanted = wanted
        self._views = tuple(views)
        self._timeout_s = timeout_s
        self._quarantine = quarantine or user_quarantine()
        self._clock = clock
        self._lock = threading.Lock()
        self._survey: Future[State] | None = None
        self._started_at = float("-inf")
        self._renewed_at = float("-inf")
        self._models: list[dict[str, Any]] = []
        self._joining = Joining(
            connection.initial_peers,
            connection.config.discovery,
            connection.config.secret_file,
            names={view.version.key: view.model for view in views if view.model},
        )
        self._surveyed_at: float | None = None

    async def state(self) -> State:
        """Returns the state; all callers of two seconds share one survey, which none of them can cancel."""
        return await asyncio.shield(asyncio.wrap_future(self._current()))

    def _current(self) -> Future[State]:
        with self._lock:
            is_over = self._survey is None or self._survey.done()
            if self._survey is None or (is_over and self._clock() - self._started_at >= _EVERY_S):
                self._started_at = self._clock()
                try:
                    self._survey = self._connection.loop.submit(self._look())
                except TransportError as exc:
                    self._survey = Future()
                    self._survey.set_result(self._state(one_line(exc)))
            return self._survey

    async def _look(self) -> State:
        try:
            async with asyncio.timeout(_LONGEST_S):
                found = await survey_node(
                    await self._node(),
                    self._wanted,
                    timeout_s=self._timeout_s,
                    within_s=_SERVERS_S,
                    quarantined=self._quarantine.reasons(),
                    max_models=_MAX_MODELS,
                    max_servers=_MAX_SERVERS,
                )
        except SwarmError as exc:
            return self._state(one_line(exc))
        except TimeoutError:
            return self._state(f"the swarm has not answered within {_LONGEST_S:g} s")
        seen = {one.version for one in found}
        # Nothing announces a model whose servers are all gone, but its client knows what is missing.
        lost = [view for view in self._views if view.version.key not in seen]
        found += [ModelStatus(view.version.key, view.version.name, view.num_blocks, []) for view in lost]
        # In a thread: fingerprints of directories take seconds, once.
        for one in found:
            await asyncio.to_thread(self._joining.source, one)
        self._models = [self._describe(one) for one in found if one.num_blocks <= _MAX_BLOCKS]
        self._surveyed_at = time.time()
        return self._state("")

    async def _node(self) -> Surveyed:
        network: object = self._connection.network
        if isinstance(network, LastingNetwork) and self._clock() - self._renewed_at < _RENEW_S:
            return await network.node()
        self._renewed_at = self._clock()
        if isinstance(network, Surveyed):
            return network
        raise TransportError("the connection to the swarm is closed")

    def _state(self, error: str) -> State:
        body = msgspec.json.encode({
            "software": __version__,
            "surveyed_at": self._surveyed_at,
            "error": error,
            "initial_peers": self._connection.initial_peers,
            "models": self._models,
        })  # fmt: skip
        return State(self._surveyed_at is not None, body)

    def _describe(self, one: ModelStatus) -> dict[str, Any]:
        views = [view for view in self._views if view.version.key == one.version]
        bans = {peer: ban for view in views for peer, ban in judging.bans(view.peers.book).items()}
        shares = [*((blocks, None) for blocks in runs(one.missing)), *one.missing_experts][:_MAX_GAPS]
        return {
            **one.as_dict(),
            "gaps": [
                {
                    "blocks": [blocks.start, blocks.stop],
                    "experts": None if experts is None else [experts.start, experts.stop],
                    "command": self._joining.command(one, blocks, experts),
                }
                for blocks, experts in shares
            ],
            "join": self._joining.command(one, None),
            "servers": [self._describe_server(server, bans) for server in one.servers],
        }

    def _describe_server(self, server: ServerStatus, bans: Mapping[str, Ban]) -> dict[str, Any]:
        peers, ban = self._connection.peers, bans.get(server.peer)
        seen_s = None if peers is None else judging.round_trip_s(peers.book[server.peer])
        return {
            **server.as_dict(),
            "round_trip_s": server.round_trip_s if seen_s is None else seen_s,
            "round_trips": possible_round_trips(server.info),
            "adapters": server.info.adapters[:_MAX_ADAPTERS],
            "ban": None if ban is None else ban._asdict(),
        }


def state_router(source: SwarmSource) -> APIRouter:
    """Returns the route ``/api/v1/state``: the swarm as JSON; 503 with the reason while no survey has succeeded."""
    router = APIRouter()

    @router.get("/api/v1/state", summary="Who serves which blocks")
    async def state() -> Response:
        found = await source.state()
        status = 200 if found.is_known else 503
        return Response(found.body, status_code=status, media_type="application/json", headers=_HEADERS)

    return router


def watching_app(source: SwarmSource) -> FastAPI:
    """Returns an app that shows a swarm, and has no model to talk with."""
    # FastAPI's own pages of documentation load scripts from other hosts.
    app = FastAPI(title="swarm status", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(state_router(source))
    app.include_router(page_router(chat=False))
    return app

"""Which handler answers which rpc."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from swarm_plugins.ledger import Charge
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.rpc.adapter import answer_adapter
from swarm_plugins.server.rpc.drain import Operator, answer_drain
from swarm_plugins.server.rpc.experts import answer_experts
from swarm_plugins.server.rpc.handlers import Answer, answer_info, answer_requests
from swarm_plugins.server.rpc.openings import opening_handler
from swarm_plugins.server.rpc.push import push_handler
from swarm_plugins.server.rpc.session import session_handler
from swarm_plugins.server.rpc.training import answer_backward, answer_forward
from swarm_plugins.server.service import ExpertsService, Service
from swarm_plugins.transport.channel import Handler
from swarm_plugins.transport.identity import load_identity
from swarm_plugins.transport.messages import (
    AdapterUpload,
    BackwardRequest,
    DrainRequest,
    ExpertsRequest,
    ForwardRequest,
    Message,
    NormsRequest,
)
from swarm_plugins.transport.server_info import EchoRequest, InfoRequest

_ANSWERS: dict[str, tuple[Callable[[Any, Any, Charge], Awaitable[Answer]], tuple[type[Message], ...]]] = {
    "rpc_info": (answer_info, (InfoRequest, EchoRequest)),
    "rpc_forward": (answer_forward, (ForwardRequest,)),
    "rpc_backward": (answer_backward, (BackwardRequest,)),
    "rpc_adapter": (answer_adapter, (AdapterUpload, NormsRequest)),
    "rpc_experts": (answer_experts, (ExpertsRequest,)),
}
"""Rpcs whose requests have nothing to do with each other."""
_STREAMS = {"rpc_session": session_handler, "rpc_open": opening_handler, "rpc_push": push_handler}


def service_handlers(service: Service | ExpertsService) -> dict[str, Handler]:
    """Returns the handlers of a service, by rpc name."""
    if isinstance(service, ExpertsService):
        return {name: _handler(service, name) for name in ("rpc_info", "rpc_experts")}
    answering = {name: _handler(service, name) for name in _ANSWERS if name != "rpc_experts"}
    return answering | {name: functools.partial(handler, service) for name, handler in _STREAMS.items()}


def operator_handlers(
    service: Service | ExpertsService, config: ServeConfig, ask_to_end: Callable[[], object]
) -> dict[str, Handler]:
    """Returns the handler for a server's operator; none if its key is not in a file that anyone could have."""
    if config.identity is None:
        return {}
    operator = Operator(load_identity(config.identity), config.drain_s, ask_to_end)
    answer = functools.partial(answer_drain, service, operator)
    return {"rpc_drain": functools.partial(answer_requests, service, "rpc_drain", (DrainRequest,), answer)}


def _handler(service: Service | ExpertsService, rpc: str) -> Handler:
    answer, kinds = _ANSWERS[rpc]
    return functools.partial(answer_requests, service, rpc, kinds, functools.partial(answer, service))

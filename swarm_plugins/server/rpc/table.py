"""Which handler answers which rpc."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.rpc.adapter import adapter_handler
from swarm_plugins.server.rpc.drain import Operator, drain_handler
from swarm_plugins.server.rpc.experts import experts_handler
from swarm_plugins.server.rpc.handlers import info_handler
from swarm_plugins.server.rpc.openings import opening_handler
from swarm_plugins.server.rpc.push import push_handler
from swarm_plugins.server.rpc.session import session_handler
from swarm_plugins.server.rpc.training import backward_handler, forward_handler
from swarm_plugins.server.service import ExpertsService, Service
from swarm_plugins.transport.channel import Handler
from swarm_plugins.transport.identity import load_identity

_HANDLERS = {
    "rpc_info": info_handler,
    "rpc_forward": forward_handler,
    "rpc_backward": backward_handler,
    "rpc_session": session_handler,
    "rpc_adapter": adapter_handler,
    "rpc_open": opening_handler,
    "rpc_push": push_handler,
}
_EXPERTS_HANDLERS = {"rpc_info": info_handler, "rpc_experts": experts_handler}


def service_handlers(service: Service | ExpertsService) -> dict[str, Handler]:
    """Returns the handlers of a service, by rpc name."""
    handlers: Mapping[str, Any] = _EXPERTS_HANDLERS if isinstance(service, ExpertsService) else _HANDLERS
    return {name: functools.partial(handler, service) for name, handler in handlers.items()}


def operator_handlers(
    service: Service | ExpertsService, config: ServeConfig, ask_to_end: Callable[[], object]
) -> dict[str, Handler]:
    """Returns the handler for a server's operator; none if its key is not in a file that anyone could have."""
    if config.identity is None:
        return {}
    operator = Operator(load_identity(config.identity), config.drain_s, ask_to_end)
    return {"rpc_drain": functools.partial(drain_handler, service, operator)}

"""Public test kit: tiny models, a swarm in one process, and a transport that fails on purpose.

Names are resolved at first use: a test that needs a tiny model does not load the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_plugins.lazy import LazyNames

if TYPE_CHECKING:
    from swarm_plugins.testing.in_process import InProcessSwarm
    from swarm_plugins.testing.models import save_tiny, tiny_config, tiny_model, tiny_tokenizer
    from swarm_plugins.testing.transports import Faults, FaultyTransport, LocalTransport

__all__ = [
    "Faults",
    "FaultyTransport",
    "InProcessSwarm",
    "LocalTransport",
    "save_tiny",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
]

_NAMES = LazyNames(
    __name__,
    {
        "Faults": ".transports",
        "FaultyTransport": ".transports",
        "InProcessSwarm": ".in_process",
        "LocalTransport": ".transports",
        "save_tiny": ".models",
        "tiny_config": ".models",
        "tiny_model": ".models",
        "tiny_tokenizer": ".models",
    },
)
__getattr__, __dir__ = _NAMES.get, _NAMES.list

"""Public test kit: tiny models, a swarm in one process, and transports that fail on purpose.

Names are resolved at first use: a test that needs a tiny model does not load the server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_plugins.testing.compute import SimulatedCompute
    from swarm_plugins.testing.faulty_swarm import FaultySwarm
    from swarm_plugins.testing.in_process import InProcessSwarm
    from swarm_plugins.testing.liars import Liar
    from swarm_plugins.testing.models import save_tiny, tiny_config, tiny_model, tiny_tokenizer
    from swarm_plugins.testing.nemesis import Nemesis
    from swarm_plugins.testing.transports import Faults, FaultyTransport, LocalTransport

__all__ = [
    "Faults",
    "FaultySwarm",
    "FaultyTransport",
    "InProcessSwarm",
    "Liar",
    "LocalTransport",
    "Nemesis",
    "SimulatedCompute",
    "save_tiny",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
]

_HOMES = {
    "compute": ("SimulatedCompute",),
    "faulty_swarm": ("FaultySwarm",),
    "models": ("save_tiny", "tiny_config", "tiny_model", "tiny_tokenizer"),
    "in_process": ("InProcessSwarm",),
    "liars": ("Liar",),
    "nemesis": ("Nemesis",),
    "transports": ("Faults", "FaultyTransport", "LocalTransport"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

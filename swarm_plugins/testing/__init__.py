"""Public test kit: tiny models, a swarm in one process, and transports that fail on purpose.

Names are resolved at first use: a test that needs a tiny model does not load the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_plugins.lazy import LazyNames

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

_NAMES = LazyNames(
    __name__,
    {
        "Faults": ".transports",
        "FaultySwarm": ".faulty_swarm",
        "FaultyTransport": ".transports",
        "InProcessSwarm": ".in_process",
        "Liar": ".liars",
        "LocalTransport": ".transports",
        "Nemesis": ".nemesis",
        "SimulatedCompute": ".compute",
        "save_tiny": ".models",
        "tiny_config": ".models",
        "tiny_model": ".models",
        "tiny_tokenizer": ".models",
    },
)
__getattr__, __dir__ = _NAMES.get, _NAMES.list

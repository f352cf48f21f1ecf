"""A Hugging Face Hub on this machine, for ``swarm hub``, demos and tests."""

from __future__ import annotations

from swarm_plugins.local_hub.local_hub import LocalHub
from swarm_plugins.local_hub.state import HubFaults, HubRequest

__all__ = ["HubFaults", "HubRequest", "LocalHub"]

"""A Hugging Face Hub on this machine, for ``swarm hub``, demos and tests."""

from __future__ import annotations

from swarm_plugins.local_hub.exchange import HubFaults, HubRequest
from swarm_plugins.local_hub.local_hub import LocalHub

__all__ = ["HubFaults", "HubRequest", "LocalHub"]

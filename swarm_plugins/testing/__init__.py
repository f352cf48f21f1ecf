"""Public test kit: small models, and stand-ins for the Hub and the network."""

from __future__ import annotations

from swarm_plugins.local_hub.local_hub import LocalHub

__all__ = ["LocalHub"]

"""A swarm of real ``swarm serve`` processes on this machine, for notebooks, demos and tests."""

from swarm_plugins.local_swarm.lines import Lines, Ports
from swarm_plugins.local_swarm.server import LocalServer
from swarm_plugins.local_swarm.swarm import LocalSwarm

__all__ = ["Lines", "LocalServer", "LocalSwarm", "Ports"]

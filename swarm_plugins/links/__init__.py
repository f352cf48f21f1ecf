"""Distance between peers, made on one machine: delay, rate and loss of their connections."""

from swarm_plugins.links.link import NETWORKS, Link, Way

__all__ = ["NETWORKS", "Link", "Way"]

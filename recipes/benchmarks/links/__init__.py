"""Distance between peers, made on one machine: delay, rate and loss of their connections."""

from recipes.benchmarks.links.link import NETWORKS, Link, Way
from recipes.benchmarks.links.relay import Relay

__all__ = ["NETWORKS", "Link", "Relay", "Way"]

"""Tinker's training protocol: what its SDK asks, answered by `swarm_plugins.tuning` and the engine of the API."""

"""Experts of a block at other peers: who holds them, how they are asked, what stands in the model for them.

[`load_remote_experts`][swarm_plugins.load_remote_experts] loads a model whose experts are at other peers.
"""

from __future__ import annotations

"""Runs a span of any HF decoder model: loading, forward, sessions with their caches, shipped adapters.

[`load_span`][swarm_plugins.blocks.load.load_span] loads a span, [`Span`][swarm_plugins.blocks.span.Span] runs it.
"""

from __future__ import annotations

from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanInputs, SpanOutputs
from swarm_plugins.blocks.kv import KVCache, KVPool
from swarm_plugins.blocks.load import load_span
from swarm_plugins.blocks.runner import SpanRunner, SpanSpec, StepInputs
from swarm_plugins.blocks.span import Span

SessionCache = KVCache
"""What a session holds on a server."""

__all__ = [
    "AdapterUse",
    "KVCache",
    "KVPool",
    "LoadedAdapter",
    "SessionCache",
    "Span",
    "SpanInputs",
    "SpanOutputs",
    "SpanRunner",
    "SpanSpec",
    "StepInputs",
    "load_span",
]

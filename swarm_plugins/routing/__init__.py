"""Plans chains of servers from a snapshot of the swarm: pure functions, testable without a network."""

from __future__ import annotations

from swarm_plugins.routing.chain import Demand, ServerEntry, SpanChoice, missing_blocks, plan
from swarm_plugins.routing.experts import Holder, Share, expert_gaps, missing_experts, share_experts

__all__ = [
    "Demand",
    "Holder",
    "ServerEntry",
    "Share",
    "SpanChoice",
    "expert_gaps",
    "missing_blocks",
    "missing_experts",
    "plan",
    "share_experts",
]

"""Plans chains of servers from a snapshot of the swarm: pure functions, testable without a network."""

from __future__ import annotations

from swarm_plugins.routing.bans import BanList
from swarm_plugins.routing.chain import Demand, ServerEntry, SpanChoice, missing_blocks, plan
from swarm_plugins.routing.experts import Holder, Share, expert_gaps, missing_experts, share_experts
from swarm_plugins.routing.pipeline import Schedule, best_schedule, schedule

__all__ = [
    "BanList",
    "Demand",
    "Holder",
    "Schedule",
    "ServerEntry",
    "Share",
    "SpanChoice",
    "best_schedule",
    "expert_gaps",
    "missing_blocks",
    "missing_experts",
    "plan",
    "schedule",
    "share_experts",
]

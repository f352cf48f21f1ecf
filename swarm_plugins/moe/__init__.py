"""Table dispatch for fused experts: which expert gets which token, how it computes, how the results are combined."""

from __future__ import annotations

from swarm_plugins.moe.dispatch import EXPERT_PARAMETERS, combine, expert_mlp, is_fused_experts
from swarm_plugins.moe.low_rank import ExpertDelta
from swarm_plugins.moe.routing import Routing

__all__ = ["EXPERT_PARAMETERS", "ExpertDelta", "Routing", "combine", "expert_mlp", "is_fused_experts"]

"""Table dispatch for fused experts: who gets which token, how an expert computes, how the results are put together."""

from __future__ import annotations

from swarm_plugins.moe.dispatch import combine, expert_mlp
from swarm_plugins.moe.low_rank import ExpertDelta
from swarm_plugins.moe.recognition import EXPERT_PARAMETERS, is_fused_experts
from swarm_plugins.moe.routing import Routing

__all__ = ["EXPERT_PARAMETERS", "ExpertDelta", "Routing", "combine", "expert_mlp", "is_fused_experts"]

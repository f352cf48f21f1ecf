"""HF's own model classes with remote decoder layers.

The entry point is `AutoSwarmModelForCausalLM.from_pretrained(...)`; `stack.py` turns the layer loop of transformers
into one pass through a chain of servers.
"""

from __future__ import annotations

from swarm_plugins.backbone.auto import (
    AutoSwarmModel,
    AutoSwarmModelForCausalLM,
    AutoSwarmModelForImageTextToText,
    AutoSwarmModelForSequenceClassification,
)
from swarm_plugins.backbone.context import OnThisMachine, SwarmSettings, active_place
from swarm_plugins.backbone.inserting import insert_module
from swarm_plugins.backbone.served import ServedBlocks, served_blocks, swarm_connection
from swarm_plugins.backbone.version import base_blocks, base_version

__all__ = [
    "AutoSwarmModel",
    "AutoSwarmModelForCausalLM",
    "AutoSwarmModelForImageTextToText",
    "AutoSwarmModelForSequenceClassification",
    "OnThisMachine",
    "ServedBlocks",
    "SwarmSettings",
    "active_place",
    "base_blocks",
    "base_version",
    "insert_module",
    "served_blocks",
    "swarm_connection",
]

"""Merges a trained adapter into its base, so that it runs where no adapter of PEFT does: as safetensors or GGUF."""

from __future__ import annotations

from swarm_plugins.merging.merge import lora_to_gguf, merge_adapter

__all__ = ["lora_to_gguf", "merge_adapter"]

"""Reads parts of an HF checkpoint (a span of blocks, an expert, the client's share) and loads models from them.

[`Checkpoint`][swarm_plugins.checkpoint.Checkpoint] opens a directory or a repository on the Hub and reads tensors by
byte range; `partition` maps tensors to blocks, `loading` fills HF's own classes.
"""

from __future__ import annotations

from swarm_plugins.checkpoint.headers import TensorInfo
from swarm_plugins.checkpoint.hollow import keep_from_ddp
from swarm_plugins.checkpoint.loading import model_from_tensors
from swarm_plugins.checkpoint.partition import (
    block_tensors,
    client_tensors,
    find_layers,
    layer_list_name,
    layer_prefix,
)
from swarm_plugins.checkpoint.source import Checkpoint
from swarm_plugins.checkpoint.unchanged import block_fingerprints, unchanged_blocks

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "block_fingerprints",
    "block_tensors",
    "client_tensors",
    "find_layers",
    "keep_from_ddp",
    "layer_list_name",
    "layer_prefix",
    "model_from_tensors",
    "unchanged_blocks",
]

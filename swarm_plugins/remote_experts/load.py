"""Loads a mixture-of-experts model whose experts are computed by other peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.client import SwarmConfig, SwarmConnection, connect
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.offload.model.saving import refuse_saving
from swarm_plugins.remote_experts.calls import Holders
from swarm_plugins.remote_experts.experts import RemoteExperts
from swarm_plugins.remote_experts.holders import HolderView
from swarm_plugins.remote_experts.module import IMPLEMENTATION, RemoteExpertsModule, turn_into_remote


def load_remote_experts(
    name_or_dir: str | Path,
    *,
    initial_peers: Sequence[str] = (),
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    config: SwarmConfig | None = None,
    connection: SwarmConnection | None = None,
) -> PreTrainedModel:
    """Loads a model without its experts, which peers of a swarm compute (``swarm serve MODEL --experts A:B``).

    The model has HF's own class: attention, norms, routers and the rest are here and may be trained or adapted; the
    experts are frozen. Gradients reach hidden states and routing weights.

    Args:
        name_or_dir: A directory, or the id of a repository on the Hub; no tensor of an expert is read.
        initial_peers: Addresses to join the swarm by.
        revision: Branch, tag or commit on the Hub.
        dtype: Floating type to compute in; None: the checkpoint's.
        device: Where to compute everything else.
        config: Deadlines, retries, packing of tensors.
        connection: An open connection to use instead of ``initial_peers`` and ``config``.

    Returns:
        The model, in evaluation mode.

    Raises:
        ConfigError: If there is no such model, it is a store of `swarm quantize`, or neither peers nor a connection
            are given.
        CheckpointError: If a file or tensor is missing, truncated or of a wrong shape; names it.
        UnsupportedError: If the model has no experts, or experts that cannot be computed elsewhere.
        TransportError: If no initial peer answers.
    """
    if connection is None and not initial_peers:
        raise ConfigError("no address of a swarm: give initial_peers=[ADDRESS], as `swarm serve` prints it")
    place = torch.device(device)
    moe = MoeCheckpoint.open(name_or_dir, revision=revision, dtype=dtype)
    if moe.quantized is not None:
        # Holders' answers are compared with the plain model's.
        raise ConfigError(
            f"{moe.checkpoint.name} is a quantized store, and experts are at other peers: give the model that it was "
            f"made from, {moe.quantized.manifest.base}"
        )
    opened = (connection or connect(initial_peers, config or SwarmConfig())).start()
    if opened.peers is None or opened.network is None:
        raise ConfigError("the connection is closed: give an open one")
    num_blocks = num_blocks_of(moe.config)
    view = HolderView(
        opened.network,
        opened.peers,
        opened.config,
        version=moe.checkpoint.version,
        num_blocks=num_blocks,
        model=str(name_or_dir),
        initial_peers=opened.initial_peers,
        blocks=range(num_blocks),
        num_experts=moe.store.num_experts,
    )
    experts = RemoteExperts(Holders(view), opened.loop.submit, lifeline=opened)
    model = moe.load_rest(place)
    for block, path in moe.paths.items():
        turn_into_remote(model.get_submodule(path), moe.outline.get_submodule(path), place, block, experts)
    model.set_experts_implementation(IMPLEMENTATION)
    refuse_saving(model, RemoteExpertsModule, which="remote")
    return model

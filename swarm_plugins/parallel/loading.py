"""Loads a checkpoint as a parallel model: each rank reads only its share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from swarm_plugins.checkpoint import Checkpoint, model_from_tensors
from swarm_plugins.checkpoint.loading import class_for_task, take_generation_config
from swarm_plugins.errors import SwarmError, TransportError
from swarm_plugins.parallel.agreement import agree
from swarm_plugins.parallel.apply import parallelize
from swarm_plugins.parallel.meshes import (
    DEFAULT_TIMEOUT_S,
    default_device_type,
    group_of,
    own_device,
    start_torch_distributed,
)


def load_parallel(
    name_or_dir: str | Path,
    mesh: DeviceMesh | None = None,
    *,
    model_class: type[PreTrainedModel] | None = None,
    dtype: torch.dtype | str = "auto",
    revision: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **how: Any,
) -> PreTrainedModel:
    """Loads a mixture of experts with its experts divided over the ranks; call it on every rank.

    As :func:`swarm_plugins.parallelize` of the loaded model, but each rank reads only its own experts, or slices of
    them, so that the model may be larger than the memory of a rank.

    Args:
        name_or_dir: A directory with safetensors weights, or the id of a repository on the Hub.
        mesh: As for `parallelize`. None: every rank has a batch of its own, on its accelerator if it has one.
        model_class: Its class; None: the family's causal language model.
        dtype: Floating type of the weights; ``auto``: the config's.
        revision: Branch, tag or commit on the Hub.
        timeout_s: Deadline of each collective, and for ranks that read more slowly than others.
        **how: Other options of `parallelize`.

    Returns:
        The model, in evaluation mode.

    Raises:
        SwarmError: On every rank, if the checkpoint cannot be read on one of them, or as `parallelize` does.
    """
    device_type = default_device_type() if mesh is None else mesh.device_type
    start_torch_distributed(device_type, timeout_s)
    device, world = own_device(device_type), group_of(range(dist.get_world_size()), timeout_s)

    def trim(model: PreTrainedModel) -> None:
        # transformers constructs it on the meta device, and then reads for each tensor what its placement asks for.
        with torch.device("cpu"):
            parallelize(model, mesh, timeout_s=timeout_s, **how)

    refusal, opened = None, ""
    try:
        checkpoint = Checkpoint.open(name_or_dir, revision=revision)
        checkpoint.refuse_gguf("divide it over ranks")
        cls = model_class or class_for_task(checkpoint.config, "causal language model", MODEL_FOR_CAUSAL_LM_MAPPING)
        opened = checkpoint.version.key
    except SwarmError as exc:
        refusal = exc
    agree(
        f"open the checkpoint {opened}",
        refusal,
        device,
        world,
        alike="the version of the checkpoint (commit, or contents)",
    )
    try:
        model = model_from_tensors(cls, checkpoint.config, None, dtype, checkpoint.name, trim=trim, device=device)
        take_generation_config(model, checkpoint)
    except TransportError:
        raise
    except SwarmError as exc:
        refusal = exc
    agree("load a checkpoint", refusal, device, world)
    return model

"""An ordinary Hugging Face model becomes expert-parallel in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import EPImplementationInterface, apply_expert_parallelism
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from swarm_plugins.errors import ConfigError, SwarmError, UnsupportedError
from swarm_plugins.parallel.agreement import agree, translated
from swarm_plugins.parallel.layout import (
    EpSize,
    ExpertLayer,
    LayerLayout,
    Placement,
    describe,
    layer_index,
    plan_layers,
)
from swarm_plugins.parallel.meshes import (
    BATCH_DIMS,
    EXPERT_DIMS,
    batch_ranks,
    build_mesh,
    start_torch_distributed,
)
from swarm_plugins.parallel.state import Parallelism, is_parallel, remember

ModelT = TypeVar("ModelT", bound=nn.Module)
DISPATCH_STYLE = "ep_dispatch_experts"
DEFAULT_TIMEOUT_S = 600.0


def parallelize(
    model: ModelT,
    mesh: DeviceMesh | None = None,
    *,
    ep_size: EpSize = "auto",
    ep_implementation: str = "all_to_all",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ModelT:
    """Distributes the experts of a loaded model over the ranks, in place; call it on every rank.

    Each layer has groups of a size of its own: the experts are divided over the ranks of a group and copied from group
    to group (DeepSpeed-MoE, section 4.1.3). Everything else stays on every rank. Afterwards each rank computes the
    logits of its own batch; :func:`synchronize_gradients` after ``backward`` makes the gradients those of all batches.

    Args:
        model: A Hugging Face model with an expert-parallel plan (mixtral, qwen3_moe, olmoe, prmoe, ...), with the same
            weights on every rank.
        mesh: A mesh of all ranks; ranks along its last dimension share a batch if that is named "tp". None: every rank
            has a batch of its own; torch.distributed is started if torchrun started this process.
        ep_size: Ranks of a group: an int, a list with one entry per decoder layer, a dict by layer index, or "auto"
            for the largest size that divides a layer's experts and the ranks.
        ep_implementation: A name registered in transformers' ``EPImplementationInterface``.
        timeout_s: Deadline of each collective: how long a rank may be late.

    Returns:
        The model.

    Raises:
        ConfigError: On every rank, if a size does not divide, or if ranks ask for different layouts.
        UnsupportedError: If the model has no expert-parallel plan.
        TransportError: If another rank is lost.
    """
    device_type = next(model.parameters()).device.type if mesh is None else mesh.device_type
    start_torch_distributed(device_type, timeout_s)
    device = (
        torch.device("cpu")
        if device_type == "cpu"
        else torch.device(device_type, torch.accelerator.current_device_index())
    )
    ranks = batch_ranks(mesh)
    layouts: list[LayerLayout] = []
    refusal = None
    try:
        layouts = _plan(model, ranks, ep_size, ep_implementation)
    except SwarmError as exc:
        refusal = exc
    agree(describe(layouts, ranks=ranks.tolist(), ep_implementation=ep_implementation), refusal, device)
    with translated("building the groups"):
        parallelism = _build(layouts, ranks, device_type, ep_implementation, timeout_s)
    _apply(model, parallelism)
    remember(model, parallelism)
    return model


def expert_layers(model: PreTrainedModel) -> list[ExpertLayer]:
    """Returns the layers of a model that have experts, by transformers' expert-parallel plan of its family.

    Raises:
        UnsupportedError: If the family has no such plan, or no layer has experts.
    """
    plan = model.ep_plan or {}
    if DISPATCH_STYLE not in plan.values():
        raise UnsupportedError(
            f"{type(model).__name__} has no expert-parallel plan: its configuration needs base_model_ep_plan, as "
            "mixtral, qwen3_moe, olmoe and prmoe have it"
        )
    found = [
        ExpertLayer(name, layer_index(name), int(module.num_experts))
        for name, module in model.named_modules()
        if plan.get(replace_layer_number_by_wildcard(name)) == DISPATCH_STYLE
    ]
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no layer with experts: nothing to parallelize")
    return found


def _plan(model: nn.Module, ranks: torch.Tensor, ep_size: EpSize, ep_implementation: str) -> list[LayerLayout]:
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__} is not a transformers model: parallelize the model first, then wrap it"
        )
    if is_parallel(model):
        raise ConfigError(f"{type(model).__name__} is already parallel: load it again for another layout")
    names = list(EPImplementationInterface())
    if ep_implementation not in names:
        raise ConfigError(f"unknown ep_implementation {ep_implementation!r}; known: {', '.join(sorted(names))}")
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    placement = Placement(world_size=ranks.numel(), tp_size=ranks.shape[1])
    return plan_layers(expert_layers(model), num_layers, ep_size, placement)


def _build(
    layouts: Sequence[LayerLayout], ranks: torch.Tensor, device_type: str, ep_implementation: str, timeout_s: float
) -> Parallelism:
    batch_mesh = build_mesh(ranks, ranks.shape, BATCH_DIMS, device_type, timeout_s)
    meshes: dict[tuple[int, int], DeviceMesh] = {}
    for layout in layouts:
        key = (layout.ep_size, layout.expert_slices)
        if layout.is_distributed and key not in meshes:
            meshes[key] = build_mesh(ranks, (layout.num_replicas, *key), EXPERT_DIMS, device_type, timeout_s)
    return Parallelism(batch_mesh, layouts, meshes, ep_implementation)


def _apply(model: Any, parallelism: Parallelism) -> None:
    plan = model.ep_plan
    for layout in parallelism.layouts:
        if not layout.is_distributed:
            continue
        mesh = parallelism.expert_meshes[layout.ep_size, layout.expert_slices]
        apply_expert_parallelism(
            model,
            mesh["ep"],
            parallelism.batch_mesh["tp"],
            _plan_of(model, plan, layout),
            ep_implementation=parallelism.ep_implementation,
        )


def _plan_of(model: nn.Module, plan: dict[str, str], layout: LayerLayout) -> dict[str, str]:
    """The rules of transformers' plan for one layer: the parameters first, then the module."""
    name = layout.layer.name
    parameters = [f"{name}.{own}" for own, _ in model.get_submodule(name).named_parameters(recurse=False)]
    found = {one: plan.get(replace_layer_number_by_wildcard(one)) for one in [*parameters, name]}
    return {one: style for one, style in found.items() if style is not None}

"""Makes a loaded Hugging Face model expert-parallel in place."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from transformers import DistributedConfig, PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.parallel.adapters import check_wrappers, divide_adapters, take_adapters, unwrapped
from swarm_plugins.parallel.agreement import agree
from swarm_plugins.parallel.implementations import (
    ExchangeSettings,
    check_drops,
    check_implementation,
    implementation_of,
)
from swarm_plugins.parallel.layout import EpSize, LayerLayout, Placement, describe, plan_layers, undivided_text
from swarm_plugins.parallel.meshes import (
    BATCH_DIMS,
    DEFAULT_TIMEOUT_S,
    EXPERT_DIMS,
    batch_ranks,
    build_mesh,
    default_device_type,
    group_of,
    own_device,
    start_torch_distributed,
)
from swarm_plugins.parallel.mixture import DISPATCH_STYLE, expert_layers, find_mixture
from swarm_plugins.parallel.refusal import Agreed, WatchedLayer, watch
from swarm_plugins.parallel.slicing import (
    check_dense_slices,
    check_shared_batch,
    check_slices,
    slice_dense_layers,
    slice_experts,
)
from swarm_plugins.parallel.state import Parallelism, is_parallel, remember

log = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=nn.Module)


def parallelize(
    model: ModelT,
    mesh: DeviceMesh | None = None,
    *,
    ep_size: EpSize = "auto",
    ep_implementation: str = "flat_all_to_all",
    expert_slices: int = 1,
    ranks_per_node: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ModelT:
    """Distributes the experts of a loaded model over the ranks, in place; call it on every rank.

    Each layer has its own group size: its experts are divided over the ranks of a group and replicated across groups
    (DeepSpeed-MoE, section 4.1.3). If ranks share a batch, the other layers are divided over them by the model's
    tensor-parallel plan. Afterwards each rank computes the logits of its own batch; call
    :func:`synchronize_gradients` after ``backward``.

    Args:
        model: A Hugging Face model with an expert-parallel plan (mixtral, qwen3_moe, olmoe, prmoe, ...), or a module
            that contains one, such as PEFT's; with the same weights on every rank.
        mesh: A mesh of all ranks; ranks along its last dimension share a batch if that is named "tp". None: every rank
            has a batch of its own; torch.distributed is started if torchrun started this process.
        ep_size: Ranks of a group: an int, a list with one entry per decoder layer, a dict by layer index, or "auto"
            for the largest size that divides a layer's experts and the ranks.
        ep_implementation: How tokens reach their experts: "flat_all_to_all" (one unpadded exchange),
            "hierarchical_all_to_all" (inside nodes, then between them), "coordinated_all_to_all" (only among ranks of
            one tensor-parallel index), or any name registered in transformers' ``EPImplementationInterface``.
        expert_slices: Ranks that an expert's intermediate dimension is divided over (section 5.2); with ranks that
            share a batch, 1 or their number.
        ranks_per_node: For the hierarchical exchange: ranks on one machine, counted from rank 0. None:
            ``LOCAL_WORLD_SIZE``, as torchrun sets it.
        timeout_s: Deadline of each collective: how long a rank may be late.

    Returns:
        The model.

    Raises:
        ConfigError: On every rank, if a size does not divide, or if ranks ask for different layouts.
        UnsupportedError: If the model has no expert-parallel plan, or none that the sizes ask for.
        TransportError: If another rank is lost.
    """
    device_type = _device_type(model) if mesh is None else mesh.device_type
    start_torch_distributed(device_type, timeout_s)
    ranks = batch_ranks(mesh)
    layouts: list[LayerLayout] = []
    refusal = None
    try:
        mixture = find_mixture(model)
        layouts = _plan(mixture, ranks, ep_size, expert_slices)
        check_implementation(ep_implementation, layouts, ranks, ranks_per_node)
        if getattr(mixture.config, "capacity_factor", None) is not None:
            check_drops(ep_implementation)
    except SwarmError as exc:
        refusal = exc
    world = group_of(range(dist.get_world_size()), timeout_s)
    shapes = [(name, one.dtype, one.shape) for name, one in model.named_parameters()]
    plan = describe(layouts, ranks=ranks.tolist(), how=[ep_implementation, ranks_per_node], shapes=shapes)
    agree(plan, refusal, own_device(device_type), world)
    parallelism = _build(world, layouts, ranks, device_type, ep_implementation, timeout_s)
    settings = ExchangeSettings(ranks_per_node=ranks_per_node, timeout_s=timeout_s)
    decoder: Any = mixture.base_model
    watch(decoder, [_distribute_experts(mixture, layout, parallelism, settings) for layout in parallelism.divided])
    if ranks.shape[1] > 1:
        slice_dense_layers(mixture, parallelism.batch_mesh["tp"])
    _introduce(mixture, parallelism)
    _watch_optimizers()
    remember(mixture, parallelism)
    undivided = undivided_text(layouts)
    if undivided and ep_size == "auto" and dist.get_rank() == 0:
        log.warning("%s", undivided)
    return model


@cache  # once per process
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_avoid_multi_tensor_kernels)


def _avoid_multi_tensor_kernels(optimizer: Optimizer, *_: Any) -> None:
    """Makes an optimizer update parameters one by one in groups that mix experts and other parameters.

    Torch's multi-tensor kernels, its default on CUDA, refuse tensors of different meshes, and tensors with and without
    one (torch 2.13). This is checked before each step, since a loaded state brings options of its own.
    """
    for group in optimizer.param_groups:
        if len({getattr(parameter, "device_mesh", None) for parameter in group["params"]}) > 1:
            group.update({option: False for option in ("foreach", "fused") if group.get(option, False) is not False})


def _device_type(model: nn.Module) -> str:
    found = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return default_device_type() if found == "meta" else found


def _introduce(model: Any, parallelism: Parallelism) -> None:
    """Leaves what transformers' own loading leaves, for ``generate`` and PEFT."""
    data, tp = parallelism.batch_mesh.shape
    model._tp_size = tp
    if tp > 1:
        # PEFT slices adapters by it. It makes save_pretrained a collective, too, so not where that is not needed.
        model.config.distributed_config = DistributedConfig(fsdp_size=data, tp_size=tp)
        model._device_mesh = parallelism.batch_mesh
        # Experts are not tensor-parallel: PEFT would slice their adapters.
        model._tp_plan = {rule: style for rule, style in model.tp_plan.items() if rule not in model.ep_plan}


def _plan(model: PreTrainedModel, ranks: torch.Tensor, ep_size: EpSize, expert_slices: int) -> list[LayerLayout]:
    if is_parallel(model):
        raise ConfigError(f"{type(model).__name__} is already parallel: load it again for another layout")
    layers = expert_layers(model)
    if expert_slices > 1:
        for layer in layers:
            check_slices(unwrapped(model.get_submodule(layer.name)), layer.name, expert_slices)
    if ranks.shape[1] > 1:
        check_dense_slices(model, ranks.shape[1])
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    placement = Placement(world_size=ranks.numel(), tp_size=ranks.shape[1], expert_slices=expert_slices)
    layouts = plan_layers(layers, num_layers, ep_size, placement)
    for layout in layouts:
        if layout.is_distributed:
            check_wrappers(model.get_submodule(layout.layer.name), layout.layer.name)
            if ranks.shape[1] > 1:
                check_shared_batch(unwrapped(model.get_submodule(layout.layer.name)), layout.layer.name)
    return layouts


def _build(
    world: dist.ProcessGroup,
    layouts: Sequence[LayerLayout],
    ranks: torch.Tensor,
    device_type: str,
    ep_implementation: str,
    timeout_s: float,
) -> Parallelism:
    batch_mesh = build_mesh(ranks, ranks.shape, BATCH_DIMS, device_type, timeout_s)
    meshes: dict[tuple[int, int], DeviceMesh] = {}
    for layout in layouts:
        key = (layout.ep_size, layout.expert_slices)
        if layout.is_distributed and key not in meshes:
            meshes[key] = build_mesh(ranks, (layout.num_replicas, *key), EXPERT_DIMS, device_type, timeout_s)
    return Parallelism(world, batch_mesh, layouts, meshes, ep_implementation)


def _distribute_experts(
    model: Any, layout: LayerLayout, parallelism: Parallelism, settings: ExchangeSettings
) -> WatchedLayer:
    """Divides one layer's experts, and has transformers install the exchange."""
    mesh = parallelism.expert_meshes[layout.ep_size, layout.expert_slices]
    name = layout.layer.name
    outermost = model.get_submodule(name)
    experts: Any = unwrapped(outermost)
    inside = next(one for one, module in model.named_modules() if module is experts)
    plan = {inside: DISPATCH_STYLE}
    if layout.expert_slices > 1:
        slice_experts(experts, mesh["ep", "slice"])
        both = mesh["ep", "slice"].mesh.flatten().tolist()
        settings = replace(settings, slice_mesh=mesh["slice"], ranks=tuple(both))
    else:
        # The parameters first: what is installed looks at the module as it is then.
        own = [parameter for parameter, _ in experts.named_parameters(recurse=False)]
        rule = replace_layer_number_by_wildcard(name)
        styles = {f"{inside}.{one}": model.ep_plan.get(f"{rule}.{one}") for one in own}
        plan = {one: style for one, style in styles.items() if style is not None} | plan
    replace(settings, name=name).attach(experts)
    take_adapters(experts)
    implementation = parallelism.ep_implementation
    apply_expert_parallelism(model, mesh["ep"], parallelism.batch_mesh["tp"], plan, ep_implementation=implementation)
    built = implementation_of(experts)
    if built is None:
        built = Agreed(experts.forward, layout.layer.num_experts, mesh["ep"], name)
        experts.forward = built
    divide_adapters(outermost, name)
    return WatchedLayer(name, experts, model.get_submodule(name.rpartition(".")[0]), built)

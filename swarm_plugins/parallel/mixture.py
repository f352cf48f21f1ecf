"""Finds the mixture of experts in a module, and its layers with experts."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.parallel.adapters import unwrapped
from swarm_plugins.parallel.layout import ExpertLayer, layer_index

DISPATCH_STYLE = "ep_dispatch_experts"


def find_mixture(module: nn.Module) -> PreTrainedModel:
    """Returns the Hugging Face model with experts in a module.

    Raises:
        UnsupportedError: If there is none.
        ConfigError: If there are several.
    """
    models: dict[str, PreTrainedModel] = {}
    for name, part in module.named_modules():
        # The outermost: MixtralForCausalLM, not the MixtralModel in it.
        is_inner = any(not outer or name.startswith(f"{outer}.") for outer in models)
        if isinstance(part, PreTrainedModel) and not is_inner:
            models[name] = part
    if not models:
        raise UnsupportedError(
            f"{type(module).__name__} holds no Hugging Face model: expert parallelism needs one with experts "
            "(mixtral, qwen3_moe, olmoe, prmoe). A LightningModule builds it in __init__ or configure_model(), or uses "
            "strategy='ddp'"
        )
    mixtures = {name: model for name, model in models.items() if model.ep_plan}
    if len(mixtures) > 1:
        names = ", ".join(f"{name!r} ({type(model).__name__})" for name, model in mixtures.items())
        raise ConfigError(
            f"{type(module).__name__} holds {len(mixtures)} mixtures of experts: {names}. Expert parallelism "
            "distributes one: keep the others outside of the module's attributes, in a list, say"
        )
    # Without any, the first one's reason.
    model = next(iter((mixtures or models).values()))
    expert_layers(model)
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
    found = {
        name: unwrapped(module)
        for name, module in model.named_modules()
        if plan.get(replace_layer_number_by_wildcard(name)) == DISPATCH_STYLE
    }
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no layer with experts: nothing to parallelize")
    for name, experts in found.items():
        if not list(experts.parameters(recurse=False)):
            raise UnsupportedError(
                f"{name} is a {type(experts).__name__}, which holds no weights of experts itself: leave experts out of "
                "modules_to_save, and adapt them by LoraConfig(target_parameters=[...])"
            )
    return [ExpertLayer(name, layer_index(name), int(experts.num_experts)) for name, experts in found.items()]  # type: ignore[arg-type]

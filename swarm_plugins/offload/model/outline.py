"""A model without storage, built from a config that may come from anyone: what is wrong with it is one error."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint, find_layers
from swarm_plugins.checkpoint.loading import CONSTRUCTION, class_for_task
from swarm_plugins.errors import CheckpointError, UnsupportedError, one_line
from swarm_plugins.moe import is_fused_experts


def build_outline(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, name: str
) -> PreTrainedModel:
    """Returns a model on the meta device.

    Raises:
        CheckpointError: If the config is wrong.
        UnsupportedError: If the model needs a package that is not installed.
    """
    try:
        with CONSTRUCTION, torch.device("meta"):
            model: PreTrainedModel = model_class._from_config(copy.deepcopy(config), dtype=dtype)
    except ImportError as exc:
        raise UnsupportedError(
            f"{name}: HF's {model_class.__name__} needs another package ({one_line(exc, with_kind=True)}): "
            "install it, or remove the setting that asks for it from config.json"
        ) from exc
    except Exception as exc:
        # Any kind, from any line of HF's model that meets an unexpected number.
        raise CheckpointError(
            f"{name}: HF's {model_class.__name__} cannot be made of its config ({one_line(exc, with_kind=True)}): "
            "correct config.json, or fetch the checkpoint again"
        ) from exc
    return model


def meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the causal language model of a config on the meta device, in evaluation mode.

    Raises:
        CheckpointError: If the config is wrong.
        UnsupportedError: If transformers has no causal language model for it.
    """
    model_class = class_for_task(config, "causal language model", MODEL_FOR_CAUSAL_LM_MAPPING)
    model = build_outline(model_class, config, dtype, config.name_or_path or "this config")
    model.eval()
    return model


def experts_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Returns, by index of the layer, the modules that hold all experts of a layer."""
    return {
        index: module
        for index, layer in enumerate(find_layers(model))
        for module in layer.modules()
        if is_fused_experts(module)
    }


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Returns the type of most bytes of a checkpoint.

    Raises:
        UnsupportedError: If it cannot be computed with: the checkpoint is packed in a format of its own.
    """
    sizes: Counter[torch.dtype] = Counter()
    for info in checkpoint.tensors.values():
        sizes[info.dtype] += info.num_bytes
    dtype = sizes.most_common(1)[0][0]
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedError(
            f"most weights of {checkpoint.name} are stored as {dtype}; supported are float32, float16 and bfloat16: "
            "use a checkpoint that is not packed"
        )
    return dtype


def refuse_quantized(config: PreTrainedConfig, name: str) -> None:
    """Refuses a config that declares its weights to be quantized.

    Raises:
        UnsupportedError: If it does.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{name} is stored quantized ({config.quantization_config}): give the unquantized checkpoint; "
            "its experts can be quantized with OffloadConfig(expert_bits=...)"
        )


def check_picks(outline: PreTrainedModel, paths: Mapping[int, str], name: str) -> None:
    """Checks how many experts the routers pick: all families call it ``top_k``.

    Raises:
        CheckpointError: If a router picks none, or more than there are.
    """
    for layer, path in paths.items():
        num_experts = int(outline.get_submodule(path).num_experts)  # type: ignore[arg-type]
        for module in outline.get_submodule(path.rpartition(".")[0]).modules():
            picks = getattr(module, "top_k", None)
            if picks is not None and not (isinstance(picks, int) and 1 <= picks <= num_experts):
                raise CheckpointError(
                    f"by the config of {name} each token takes {picks!r} experts of layer {layer}, which has "
                    f"{num_experts}: correct config.json, or fetch the checkpoint again"
                )

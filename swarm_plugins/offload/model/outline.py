"""What a mixture-of-experts checkpoint and the model without storage of its config say of each other."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint, find_layers
from swarm_plugins.errors import CheckpointError, UnsupportedError
from swarm_plugins.moe import is_fused_experts

_COMPUTED = (torch.float32, torch.float16, torch.bfloat16)


def experts_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Returns, by index of the layer, the modules that hold all experts of a layer."""
    return {
        index: module
        for index, layer in enumerate(find_layers(model))
        for module in layer.modules()
        if is_fused_experts(module)
    }


def stored_dtype(checkpoint: Checkpoint, *, is_packed: bool = False) -> torch.dtype:
    """Returns the type of most bytes of a checkpoint; of one in few bits, of what is not packed.

    Raises:
        UnsupportedError: If it cannot be computed with: the checkpoint is packed in a format of its own.
    """
    sizes: Counter[torch.dtype] = Counter()
    for info in checkpoint.tensors.values():
        if not is_packed or info.dtype in _COMPUTED:
            sizes[info.dtype] += info.num_bytes
    dtype = next((dtype for dtype, _ in sizes.most_common(1)), torch.bfloat16)
    if dtype not in _COMPUTED:
        raise UnsupportedError(
            f"most weights of {checkpoint.name} are stored as {dtype}; supported are float32, float16 and bfloat16: "
            "use a checkpoint that is not packed"
        )
    return dtype


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy of a config of which transformers makes plain layers."""
    config = copy.deepcopy(config)
    for one in (config, config.get_text_config(decoder=True)):
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    return config


def check_picks(outline: PreTrainedModel, paths: Mapping[int, str], name: str) -> int:
    """Returns how many experts the routers pick at most: all families call it ``top_k``. 0: their modules do not say.

    Raises:
        CheckpointError: If a router picks none, or more than there are.
    """
    most = 0
    for layer, path in paths.items():
        num_experts = int(outline.get_submodule(path).num_experts)  # type: ignore[arg-type]
        for module in outline.get_submodule(path.rpartition(".")[0]).modules():
            picks = getattr(module, "top_k", None)
            if picks is not None and not (isinstance(picks, int) and 1 <= picks <= num_experts):
                raise CheckpointError(
                    f"by the config of {name} each token takes {picks!r} experts of layer {layer}, which has "
                    f"{num_experts}: correct config.json, or fetch the checkpoint again"
                )
            most = max(most, picks or 0)
    return most

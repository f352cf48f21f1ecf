"""Builds a model on the meta device by a stranger's config: whatever is wrong with it ends in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint, find_layers
from swarm_plugins.errors import CheckpointError, UnsupportedError, one_line
from swarm_plugins.moe import is_fused_experts

__all__ = ["build_outline", "check_picks", "experts_modules", "refuse_quantized", "stored_dtype"]


def build_outline(build: Callable[[], PreTrainedModel], what: str, name: str) -> PreTrainedModel:
    """Returns a model without storage.

    Args:
        build: Makes it.
        what: Its class, for messages.
        name: The checkpoint's, for messages.

    Raises:
        CheckpointError: If no model can be made of the config.
        UnsupportedError: If the model needs a package that is absent.
    """
    try:
        with torch.device("meta"):
            return build()
    except ImportError as exc:
        raise UnsupportedError(
            f"{name}: HF's {what} needs another package ({one_line(exc, with_kind=True)}): "
            "install it, or take the setting that asks for it out of config.json"
        ) from exc
    except Exception as exc:
        # Any kind, from any line of HF's model that meets a stranger's number.
        raise CheckpointError(
            f"{name}: HF's {what} cannot be made of its config ({one_line(exc, with_kind=True)}): "
            "correct config.json, or fetch the checkpoint again"
        ) from exc


def refuse_quantized(config: PreTrainedConfig, name: str) -> None:
    """Refuses a checkpoint whose config says that its weights are codes.

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

    Args:
        outline: The model.
        paths: Of its fused experts, by index of the layer.
        name: The checkpoint's, for messages.

    Raises:
        CheckpointError: If it is none, or more than there are.
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


def experts_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Returns, by index of the layer, the modules that hold all experts of a layer."""
    found: dict[int, nn.Module] = {}
    for index, layer in enumerate(find_layers(model)):
        for module in layer.modules():
            if is_fused_experts(module):
                found[index] = module
    return found


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Returns the type that most bytes of a checkpoint have.

    Raises:
        UnsupportedError: If it is none to compute with: the checkpoint is packed in a format of its own.
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

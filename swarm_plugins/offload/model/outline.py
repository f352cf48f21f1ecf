"""Builds a model on the meta device by a stranger's config: whatever is wrong with it ends in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.errors import CheckpointError, UnsupportedError

__all__ = ["build_outline", "check_picks", "refuse_quantized"]

_MAX_REASON_CHARS = 300


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
            f"{name}: HF's {what} needs another package: {_reason(exc)}: install it, or take the setting that asks for "
            "it out of config.json"
        ) from exc
    except Exception as exc:
        # Any kind, from any line of HF's model that meets a stranger's number.
        raise CheckpointError(
            f"{name}: HF's {what} cannot be made of its config ({_reason(exc)}): correct config.json, or fetch the "
            "checkpoint again"
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


def _reason(exc: Exception) -> str:
    return " ".join(f"{type(exc).__name__}: {exc}".split())[:_MAX_REASON_CHARS]
